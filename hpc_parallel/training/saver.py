"""When checkpoints are written: while training goes on, one at a time, none dropped in silence."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from hpc_parallel.config.schema import TrainingConfig
from hpc_parallel.record import checkpoint_index
from hpc_parallel.torch_internals import stagers_last
from hpc_parallel.training.checkpoint import State, Writer, random_state

_MARK_EVERY_S = 2.0


class SaveError(RuntimeError):
    """A checkpoint could not be written; the message has the system's words."""


class Saver:
    """Copies the state to the host's memory, and writes that copy while the next steps run.

    The ranks write together, over a group of their own, so that nothing meets the training's collectives.
    A save that can't keep up delays the next one. One that fails is told and tried again at the next
    turn: a full disk need not end the training, unless it is the last save.
    """

    def __init__(
        self,
        folder: Path,
        *,
        state: Callable[[], State],
        about: Mapping[str, Any],
        training: TrainingConfig,
        device: torch.device,
        group: dist.ProcessGroup,
        saved: int = 0,
        waiting: Callable[[], None] = lambda: None,
    ) -> None:
        """Save nothing yet.

        `about`: further keys of the manifest. `saved`: the step of the newest checkpoint. `waiting` is called
        every few seconds while a save delays the training, so that the watchdog does not take it for a hang.
        If a rank does not join the save, the time-out of the collectives ends it.
        """
        self._folder = folder
        self._state = state
        self._about = about
        self._training = training
        self._device = device
        self._group = group
        self._saved = saved
        self._waiting = waiting
        self._pending: Future[Any] | None = None
        self._step = 0  # of the pending save
        self._stager: DefaultStager | None = None

    def due(self, step: int) -> bool:
        """Every so many steps, and after the last."""
        every = self._training.checkpoint_every
        return every is not None and (step % every == 0 or step == self._training.steps)

    def save(self, step: int, *, whole: bool = False) -> None:
        """Begin to write the state after `step`, on all ranks at the same step.

        With `whole` it is on the disk on return. Raises SaveError then, where that failed.
        """
        self._finish()
        if step > self._saved:
            self._begin(step)
        if whole and (error := self._finish()):
            raise SaveError(f"the checkpoint of step {step} could not be written: {error}")

    def close(self) -> None:
        """Wait for what is being written."""
        self._finish()
        if self._stager is not None:
            self._stager.close()

    def _begin(self, step: int) -> None:
        beside = checkpoint_index.beside(self._folder, step)
        if dist.get_rank() == 0:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            shutil.rmtree(beside, ignore_errors=True)  # of a save that failed
        state = self._state() | random_state(self._device)
        training = self._training
        writer = Writer(
            beside,
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
        self._step = step
        if self._training.checkpoint_async:
            self._pending = cast(
                "Future[Any]",
                dcp.async_save(
                    cast(dict[str, Any], state),
                    storage_writer=writer,
                    process_group=self._group,
                    async_stager=self._open_stager(),
                ),
            )
        else:
            self._pending = Future()
            try:
                self._pending.set_result(
                    dcp.save(cast(dict[str, Any], state), storage_writer=writer, process_group=self._group)
                )
            except Exception as error:
                self._pending.set_exception(error)

    def _open_stager(self) -> DefaultStager:
        """The same one for all checkpoints, since it keeps pinned memory, if torch can use it again."""
        if self._stager is None or not stagers_last():
            on_gpu = self._device.type == "cuda"
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=on_gpu,
                    use_shared_memory=False,
                    use_async_staging=False,
                    use_non_blocking_copy=on_gpu,
                )
            )
        return self._stager

    def _finish(self) -> str | None:
        """Wait for the pending save; the system's words where it failed (on all ranks alike)."""
        if self._pending is None:
            return None
        while not wait([self._pending], timeout=_MARK_EVERY_S).done:
            self._waiting()
        error = self._pending.exception()
        self._pending = None
        if error is None:
            self._saved = self._step
            return None
        if not isinstance(error, dcp.api.CheckpointException):
            raise error
        words = "; ".join(sorted({f"{type(each).__name__}: {each}" for each, _ in error.failures.values()}))
        if dist.get_rank() == 0:
            shutil.rmtree(checkpoint_index.beside(self._folder, self._step), ignore_errors=True)
            print(
                f"WARNING: the checkpoint of step {self._step} could not be written ({words}); "
                f"the newest is that of step {self._saved}",
                file=sys.stderr,
                flush=True,
            )
        return words
