"""The training loop: batches, steps, a line of metrics when one is due. It knows no strategy."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.data.sampler import Batches, to_device
from hpc_parallel.profiling.measurement import Measurement
from hpc_parallel.supervise.error_place import at_step
from hpc_parallel.supervise.progress import Progress
from hpc_parallel.training.metrics import Metrics
from hpc_parallel.training.nonfinite import CHECK_EVERY
from hpc_parallel.training.optimizer import learning_rate, set_learning_rate
from hpc_parallel.training.saver import Saver
from hpc_parallel.training.step import Step
from hpc_parallel.training.validation import mean_loss
from hpc_parallel.training.writers import Writer


@dataclass(frozen=True)
class Samples:
    """The batches of this rank for training and validation, and the device that they are copied to."""

    train: Batches
    validation: Batches
    validation_steps: int  # batches of one validation
    device: torch.device


@dataclass(frozen=True)
class Observers:
    """Everything that observes the training and does not change it."""

    metrics: Metrics
    measurement: Measurement
    writers: Sequence[Writer]  # only one rank has any
    progress: Progress  # read by the watchdog


class Trainer:
    """Trains until `training.steps` optimizer steps are done or a signal asks it to stop."""

    def __init__(
        self,
        step: Step,
        *,
        optimizer: Optimizer,
        samples: Samples,
        observers: Observers,
        config: RunConfig,
        saver: Saver,
        stop: Callable[[int], signal.Signals | None],
        done: int,
    ) -> None:
        """Keep what the loop needs.

        `stop` returns the signal if all ranks stop after this step, else None. `done`: steps that the
        checkpoint contains.
        """
        self._step = step
        self._optimizer = optimizer
        self._samples = samples
        self._metrics = observers.metrics
        self._measurement = observers.measurement
        self._writers = observers.writers
        self._progress = observers.progress
        self._training = config.training
        self._schedule = config.optimizer
        self._saver = saver
        self._stop = stop
        self.done = done
        self._progress.first_step = done + 1

    def fit(self) -> signal.Signals | None:
        """Train to the last step. Returns the signal if one stopped the run before; all state is saved."""
        steps = self._training.steps
        started_after = self.done
        for step in range(started_after + 1, steps + 1):
            rate = learning_rate(step, steps=steps, config=self._schedule)
            set_learning_rate(self._optimizer, rate)
            self._progress.mark("data", step)
            with self._measurement.loading(step - started_after):
                batch = to_device(self._samples.train.at(step - 1), self._samples.device)
            self._progress.mark("step", step)
            with at_step(step), self._measurement.watch(step - started_after):
                result = self._step.run(*batch)
            self._metrics.note(result)
            self.done = step
            validate = self._due(step, self._training.validate_every)
            line_due = validate or self._due(step, self._training.log_every)
            if line_due or step % CHECK_EVERY == 0:
                self._step.raise_if_nonfinite(step)
            if line_due:
                self._progress.mark("log", step)
                line = self._metrics.line(step=step, learning_rate=rate)
                if validate:
                    line["validation_loss"] = self.validate(after=step)
                for writer in self._writers:
                    writer.write(line)
            if self._saver.due(step):
                started = time.perf_counter()
                self._progress.mark("save", step)
                self._step.raise_if_nonfinite(step)  # a checkpoint must be sound
                self._saver.save(step, whole=step == steps)
                self._metrics.leave_out(time.perf_counter() - started)
            if step < steps and (stop_signal := self._stop(step)) is not None:
                self._progress.mark("save", step)
                self._step.raise_if_nonfinite(step)
                self._saver.save(step, whole=True)
                return stop_signal
        self._progress.mark("done", steps)
        return None

    def validate(self, *, after: int) -> float | None:
        """Returns the mean loss over the held-out samples after a step, or None if it is not finite."""

        def evaluate(inputs: Tensor, targets: Tensor) -> Tensor:
            self._progress.mark("validate", after)  # each batch is progress
            return self._step.evaluate(inputs, targets)

        started = time.perf_counter()
        samples = self._samples
        loss = mean_loss(evaluate, samples.validation, steps=samples.validation_steps, device=samples.device)
        self._metrics.leave_out(time.perf_counter() - started)
        return loss

    def _due(self, step: int, every: int | None) -> bool:
        """The first and the last step are always due, so that the start and the end of a run are recorded."""
        return every is not None and (step % every == 0 or step in (1, self._training.steps))
