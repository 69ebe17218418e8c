"""The loop: batches in, steps, a metrics line when one is due. It knows no strategy."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from hpc_parallel.config.schema import OptimizerConfig, TrainingConfig
from hpc_parallel.data.sampler import Batches
from hpc_parallel.models.place import at_step
from hpc_parallel.training.measure import Measurement
from hpc_parallel.training.metrics import Metrics
from hpc_parallel.training.nonfinite import LOOK_EVERY
from hpc_parallel.training.optimizer import learning_rate, set_learning_rate
from hpc_parallel.training.progress import Progress
from hpc_parallel.training.saver import Saver
from hpc_parallel.training.step import Step
from hpc_parallel.training.validation import mean_loss, to_device
from hpc_parallel.training.writers import Writer


class Trainer:
    """Trains up to `training.steps` optimizer steps, or to where it is asked to stop."""

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
        saver: Saver | None = None,
        stop: Callable[[int], signal.Signals | None] = lambda step: None,
        done: int = 0,
        progress: Progress | None = None,
    ) -> None:
        """`writers` is empty on every rank but the one that writes. `stop`: whether all ranks stop after
        this step, and by which signal. `done`: steps that a checkpoint has brought along;
        `progress`: for others to look at."""
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
        self._saver = saver
        self._stop = stop
        self.done = done
        self._progress = progress or Progress()
        self._progress.first_step = done + 1

    def fit(self) -> signal.Signals | None:
        """Train to the last step; returns the signal by which it was stopped before, all being saved."""
        steps = self._training.steps
        started_after = self.done
        for step in range(started_after + 1, steps + 1):
            rate = learning_rate(step, steps=steps, config=self._schedule)
            set_learning_rate(self._optimizer, rate)
            self._progress.mark("data", step)
            with self._measurement.loading(step - started_after):
                batch = to_device(self._batches.at(step - 1), self._device)
            self._progress.mark("step", step)
            with at_step(step), self._measurement.watch(step - started_after):
                result = self._step.run(*batch)
            self._metrics.note(result)
            self.done = step
            validate = self._due(step, self._training.validate_every)
            line_due = validate or self._due(step, self._training.log_every)
            if line_due or step % LOOK_EVERY == 0:
                self._step.look(step)
            if line_due:
                self._progress.mark("log", step)
                line = self._metrics.line(step=step, learning_rate=rate)
                if validate:
                    line["validation_loss"] = self.validate(after=step)
                for writer in self._writers:
                    writer.write(line)
            if self._saver is not None and self._saver.due(step):
                started = time.perf_counter()
                self._progress.mark("save", step)
                self._step.look(step)  # what is kept must be sound
                self._saver.save(step, whole=step == steps)
                self._metrics.leave_out(time.perf_counter() - started)
            if step < steps and (asked := self._stop(step)) is not None:
                if self._saver is not None:
                    self._progress.mark("save", step)
                    self._step.look(step)
                    self._saver.save(step, whole=True)
                return asked
        self._progress.mark("done", steps)
        return None

    def validate(self, *, after: int) -> float | None:
        """Mean loss over the held-out samples, after a step; None where it is not finite."""

        def evaluate(inputs: Tensor, targets: Tensor) -> Tensor:
            self._progress.mark("validate", after)  # each batch is progress
            return self._step.evaluate(inputs, targets)

        started = time.perf_counter()
        loss = mean_loss(evaluate, self._validation, steps=self._validation_steps, device=self._device)
        self._metrics.leave_out(time.perf_counter() - started)
        return loss

    def _due(self, step: int, every: int | None) -> bool:
        """The first and the last step always are: what a run starts from and ends with is never left out."""
        return every is not None and (step % every == 0 or step in (1, self._training.steps))
