"""The training loop: batches, steps, metrics, validation, checkpoints. It is the same for every strategy."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from hpc_parallel.config.optimizer_rules import learning_rate
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.data.sampler import Batches
from hpc_parallel.strategies.loss import WithMetrics
from hpc_parallel.training.memory_copies import MemoryCopies
from hpc_parallel.training.nonfinite import CHECK_EVERY
from hpc_parallel.training.observers import Observers
from hpc_parallel.training.optimizer import ModelOptimizer
from hpc_parallel.training.read_ahead import ReadAhead
from hpc_parallel.training.saver import Saver
from hpc_parallel.training.step import Step
from hpc_parallel.training.validation import validate


@dataclass(frozen=True)
class RankBatches:
    """This rank's batches for training and validation."""

    train: ReadAhead
    validation: Batches
    validation_samples: int  # samples in one validation
    device: torch.device
    evaluation: WithMetrics  # the loss function


@dataclass(kw_only=True)
class Trainer:
    """Trains for `training.steps` optimizer steps, or until a signal stops it.

    stop: returns the signal if all ranks stop after this step, else None. steps_done: the number of steps in
    the checkpoint that the run was restored from, else 0. memory: copies the state to the memory of hosts
    between two checkpoints.
    """

    step: Step
    optimizer: ModelOptimizer
    samples: RankBatches
    observers: Observers
    config: RunConfig
    saver: Saver
    stop: Callable[[int], signal.Signals | None]
    steps_done: int
    memory: MemoryCopies | None = None
    ended_early: str | None = None  # why a callback ended the training
    pruned: str | None = None  # why the training ended before other runs of its sweep

    def __post_init__(self) -> None:
        self.observers.progress.first_step = self.steps_done + 1

    def fit(self) -> signal.Signals | None:
        """Train to the last step.

        Returns the signal that stopped the training earlier, after its checkpoint is complete, else None.
        A callback may also end the training earlier (`ended_early`), or a comparison with other runs
        (`pruned`).
        """
        if self.steps_done:  # the last start may have died between its early end and its summary
            self.ended_early = self.observers.callbacks.reason()
        if self.ended_early is not None:
            self._save_last(self.steps_done)  # which may come from a copy in memory
            return None
        with collecting(self.config.training.collect_every) as collect:
            return self._fit(collect)

    def _fit(self, collect: Callable[[int], object]) -> signal.Signals | None:
        steps = self.config.training.steps
        for step in range(self.steps_done + 1, steps + 1):
            collect(step)
            rate = learning_rate(step, steps=steps, config=self.config.optimizer)
            self.optimizer.begin_step(step, rate=rate)
            result = self.step.train(step, batches=self.samples.train, observers=self.observers)
            self.observers.metrics.note(result)
            self.steps_done = step
            self.observers.callbacks.step(step)
            validate = self._due(step, self.config.training.validate_every)
            line_due = validate or self._due(step, self.config.training.log_every)
            if line_due or step % CHECK_EVERY == 0:
                self.step.raise_if_nonfinite(step, batches=self.samples.train)
            if line_due:
                self._log(step, rate=rate, validate=validate)
            if self.saver.due(step):
                self._save(step, blocking=step == steps)
            if self.ended_early is not None:
                self._save_last(step)
                break
            if self.pruned is not None:
                self._save(step, blocking=True)
                break
            if step < steps and (signalled := self.stop(step)) is not None:
                self._save(step, blocking=True)
                return signalled
            if self.memory is not None and step < steps and self.memory.due(step):
                self._copy(step, memory=self.memory)
        self.observers.progress.mark("done", self.steps_done)
        return None

    def _log(self, step: int, *, rate: float, validate: bool) -> None:
        self.observers.progress.mark("log", step)
        line = self.observers.metrics.line(step=step, learning_rate=rate)
        if validate:
            line |= self.validate(after=step)
        for writer in self.observers.writers:
            writer.write(line)
        reason = self.observers.callbacks.line(line)
        if step < self.config.training.steps:
            if reason is not None and not validate and self.config.training.validate_every is not None:
                self._log(step, rate=rate, validate=True)  # the last step is validated, also an early one
            self.ended_early = reason
            if reason is None and self.observers.pruning is not None:
                self.pruned = self.observers.pruning.why(line)

    def _save_last(self, step: int) -> None:
        """Save the last step of a training that ends early, in the same way as the planned last step."""
        if self.config.training.checkpoint_every is not None:
            self._save(step, blocking=True)

    def _save(self, step: int, *, blocking: bool) -> None:
        self.observers.progress.mark("save", step)
        # A checkpoint must hold finite weights only.
        self.step.raise_if_nonfinite(step, batches=self.samples.train)
        started = time.perf_counter()
        self.saver.save(step, blocking=blocking)
        self.observers.metrics.leave_out(time.perf_counter() - started, cause="saving")

    def _copy(self, step: int, *, memory: MemoryCopies) -> None:
        self.observers.progress.mark("save", step)
        self.step.raise_if_nonfinite(step, batches=self.samples.train)
        started = time.perf_counter()
        self.saver.check(step)
        memory.keep(step, on_wait=lambda: self.observers.progress.mark("save", step))
        self.observers.metrics.leave_out(time.perf_counter() - started, cause="saving")

    def validate(self, *, after: int) -> dict[str, float | None]:
        """Returns the mean loss and metrics over the held-out samples after step `after`, by their keys."""

        def evaluate(inputs: Tensor, targets: Tensor) -> Tensor:
            self.observers.progress.mark("validate", after)  # a long validation is not a hang
            return self.step.evaluate(inputs, targets)

        started = time.perf_counter()
        samples = self.samples
        samples.train.settle()
        means = validate(
            evaluate, samples.validation, count=samples.validation_samples, device=samples.device,
            evaluation=samples.evaluation,
        )  # fmt: skip
        self.observers.metrics.leave_out(time.perf_counter() - started, cause="validation")
        return means

    def _due(self, step: int, every: int | None) -> bool:
        """The first and the last step are always due, so the metrics show where a run starts and ends."""
        return every is not None and (step % every == 0 or step in (1, self.config.training.steps))


@contextmanager
def collecting(every: int | None) -> Iterator[Callable[[int], object]]:
    """Switch Python's garbage collector off, and yield a function that collects before every `every`-th step.

    By default it runs at another time on each rank, and all other ranks wait for this rank in the next
    collective. None: leave the collector on.
    """
    if every is None or not gc.isenabled():
        yield lambda step: None
        return
    gc.collect()
    gc.disable()
    try:
        # Mostly generation 1, the objects of the last steps: the oldest one is large and changes little.
        yield lambda step: None if step % every else gc.collect(1 if step % (20 * every) else 2)
    finally:
        gc.enable()
