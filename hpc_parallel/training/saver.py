"""Writes checkpoints while training continues, one at a time. A save that fails is always reported."""

from __future__ import annotations

import itertools
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from hpc_parallel.config.schema import TrainingConfig
from hpc_parallel.record import checkpoint_index
from hpc_parallel.torch_internals import forget_plans, planner_with_memory
from hpc_parallel.training.checkpoint import State, Writer, random_state
from hpc_parallel.training.stager import Stager, stager_for

_MARK_EVERY_S = 2.0
_SAVERS = itertools.count()


class SaveError(RuntimeError):
    """A checkpoint could not be written; the message has the system's reason."""


class Saver:
    """Copies the state to the host's memory, and writes that copy while the next steps run.

    The ranks write together over `group`. A save beside the training needs one of its own (`Groups.saving`),
    so that the two never share a collective.
    A slow save delays the next one. If a save fails, a warning is printed and the next save tries again,
    because a full disk should not end the training. Only a blocking save, the last one, raises SaveError.
    """

    def __init__(
        self,
        folder: Path,
        *,
        state: Callable[[], State],
        about: Mapping[str, Any],
        training: TrainingConfig,
        device: torch.device,
        group: dist.ProcessGroup | None,
        saved_step: int = 0,
        save_s: float | None = None,
        check: Callable[[int], None] = lambda step: None,
        on_wait: Callable[[], None] = lambda: None,
        on_saved: Callable[[int], None] = lambda step: None,
    ) -> None:
        """`about`: further entries of the manifest; `saved_step`: the step of the newest checkpoint.

        `save_s`: how long it took to write that checkpoint; later saves replace the value.

        `check` is called with the step before its state is copied, and raises if it must not be saved.

        `on_wait` is called every few seconds while training waits for a save, so that the watchdog does not
        report a hang. If a rank never joins the save, the time-out of collectives ends it.

        `on_saved` is called with the step of a checkpoint that is found to be complete.
        """
        self._folder = folder
        self._state = state
        self._about = about
        self._training = training
        self._device = device
        self._group = group
        self._saved_step = saved_step
        self.save_s = save_s
        self._plans = f"saver {next(_SAVERS)}"
        self._check = check
        self._on_wait = on_wait
        self._on_saved = on_saved
        self._pending: Future[Any] | None = None
        self._pending_step = 0
        self._stager: Stager | None = None

    def due(self, step: int) -> bool:
        """Whether to save after `step`: every `checkpoint_every` steps, and after the last step."""
        every = self._training.checkpoint_every
        return every is not None and (step % every == 0 or step == self._training.steps)

    def save(self, step: int, *, blocking: bool = False) -> None:
        """Begin to write the state after `step`. All ranks must call it at the same step.

        With `blocking`, returns after the checkpoint is on the disk, and raises SaveError if that failed.
        """
        self._finish()
        if step > self._saved_step:
            self._check(step)
            self._begin(step)
        if blocking and (error := self._finish()):
            raise SaveError(f"the checkpoint of step {step} could not be written: {error}")

    def close(self) -> None:
        """Wait for a save that is in progress."""
        self._finish()
        forget_plans(self._plans)
        if self._stager is not None:
            self._stager.close()

    def _begin(self, step: int) -> None:
        unfinished = checkpoint_index.unfinished_folder(self._folder, step)
        if dist.get_rank() == 0:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            shutil.rmtree(unfinished, ignore_errors=True)  # left by a save that failed
        state: dict[str, Any] = {**self._state(), **random_state(self._device)}
        training = self._training
        writer = Writer(
            unfinished,
            folder=self._folder,
            step=step,
            about={**self._about, "samples": step * training.global_batch_size},
            prune=partial(
                checkpoint_index.prune,
                self._folder,
                keep_last=training.keep_last,
                keep_every=training.keep_every,
            ),
        )
        self._pending_step = step
        planner = planner_with_memory(self._plans)
        save: dict[str, Any] = {"storage_writer": writer, "planner": planner, "process_group": self._group}
        began_s = time.perf_counter()
        if self._training.checkpoint_async:
            stager = self._open_stager()
            self._pending = cast("Future[Any]", dcp.async_save(state, async_stager=stager, **save))
        else:
            self._pending = Future()
            try:
                self._pending.set_result(dcp.save(state, **save))
            except Exception as error:
                self._pending.set_exception(error)
        self._pending.add_done_callback(partial(self._measure, began_s))

    def _measure(self, began_s: float, done: Future[Any]) -> None:
        if done.exception() is None:
            self.save_s = time.perf_counter() - began_s

    def _open_stager(self) -> Stager:
        """One stager for all checkpoints, since it keeps the memory of the copy."""
        if self._stager is None:
            self._stager = stager_for(self._device)
        return self._stager

    def _finish(self) -> str | None:
        """Wait for the pending save; returns the system's reason if it failed, the same on all ranks."""
        if self._pending is None:
            return None
        while not wait([self._pending], timeout=_MARK_EVERY_S).done:
            self._on_wait()
        error = self._pending.exception()
        self._pending = None
        if error is None:
            self._saved_step = self._pending_step
            self._on_saved(self._saved_step)
            return None
        if not isinstance(error, dcp.api.CheckpointException):
            raise error
        forget_plans(self._plans)  # torch 2.11 remembers a plan that failed
        reason = "; ".join(
            sorted({f"{type(failure).__name__}: {failure}" for failure, _ in error.failures.values()})
        )
        if dist.get_rank() == 0:
            shutil.rmtree(
                checkpoint_index.unfinished_folder(self._folder, self._pending_step), ignore_errors=True
            )
            print(
                f"WARNING: the checkpoint of step {self._pending_step} could not be written ({reason}); "
                f"the newest is that of step {self._saved_step}",
                file=sys.stderr,
                flush=True,
            )
        return reason
