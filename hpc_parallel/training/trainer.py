"""The loop: batches in, steps, a metrics line when one is due. It knows no strategy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from hpc_parallel.config.schema import OptimizerConfig, TrainingConfig
from hpc_parallel.data.sampler import Batches
from hpc_parallel.models.place import at_step
from hpc_parallel.training.measure import Measurement
from hpc_parallel.training.metrics import Metrics
from hpc_parallel.training.nonfinite import LOOK_EVERY
from hpc_parallel.training.optimizer import learning_rate, set_learning_rate
from hpc_parallel.training.step import Step
from hpc_parallel.training.validation import mean_loss, to_device
from hpc_parallel.training.writers import Writer


class Trainer:
    """Trains for `training.steps` optimizer steps."""

    def __init__(
        self,
        step: Step,
        *,
        optimizer: Optimizer,
        batches: Batches,
        validation: Batches,
        validation_steps: int,
        metrics: Metrics,
        measurement: Measurement,
        writers: Sequence[Writer],
        training: TrainingConfig,
        schedule: OptimizerConfig,
        device: torch.device,
    ) -> None:
        """`writers` is empty on every rank but the one that writes."""
        self._step = step
        self._optimizer = optimizer
        self._batches = batches
        self._validation = validation
        self._validation_steps = validation_steps
        self._metrics = metrics
        self._measurement = measurement
        self._writers = writers
        self._training = training
        self._schedule = schedule
        self._device = device

    def fit(self) -> list[dict[str, Any]]:
        """Train to the last step; returns the metrics lines (equal on all ranks)."""
        steps = self._training.steps
        lines: list[dict[str, Any]] = []
        for step in range(1, steps + 1):
            rate = learning_rate(step, steps=steps, config=self._schedule)
            set_learning_rate(self._optimizer, rate)
            batch = to_device(self._batches.at(step - 1), self._device)
            with at_step(step), self._measurement.watch(step):
                result = self._step.run(*batch)
            self._metrics.note(result)
            validate = self._due(step, self._training.validate_every)
            line_due = validate or self._due(step, self._training.log_every)
            if line_due or step % LOOK_EVERY == 0:
                self._step.look(step)
            if line_due:
                line = self._metrics.line(step=step, learning_rate=rate)
                if validate:
                    line["validation_loss"] = self.validate()
                for writer in self._writers:
                    writer.write(line)
                lines.append(line)
        return lines

    def validate(self) -> float | None:
        """Mean loss over the held-out samples; None where it is not finite."""
        started = time.perf_counter()
        loss = mean_loss(
            self._step.evaluate, self._validation, steps=self._validation_steps, device=self._device
        )
        self._metrics.leave_out(time.perf_counter() - started)
        return loss

    def _due(self, step: int, every: int | None) -> bool:
        """The first and the last step always are: what a run starts from and ends with is never left out."""
        return every is not None and (step % every == 0 or step in (1, self._training.steps))
