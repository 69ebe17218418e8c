"""Writes checkpoints while training continues, one at a time. A save that fails is always reported."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from hpc_parallel.config.schema import TrainingConfig
from hpc_parallel.failure import failure
from hpc_parallel.failure.desync import name_ranks
from hpc_parallel.problems import print_warning
from hpc_parallel.record import checkpoint_index
from hpc_parallel.record.safe_read import DamagedError
from hpc_parallel.strategies import exchange
from hpc_parallel.strategies.exchange import FollowerError
from hpc_parallel.torch_internals import forget_plans, planner_with_memory
from hpc_parallel.training.checkpoint import CheckpointWriter, StateDict, random_state
from hpc_parallel.training.stager import Stager, stager_for
from hpc_parallel.training.written_parts import WrittenParts

_MARK_EVERY_S = 2.0
_PATIENCE = 2  # a rank that still writes after this many `checkpoint_timeout_s` ends the run
_SAVERS = itertools.count()


class SaveError(RuntimeError):
    """A checkpoint could not be written; the message has the system's reason."""


class StuckSaveError(RuntimeError):
    """Raised on a rank that does not end its part of a checkpoint."""


@dataclass(frozen=True)
class SavingGroup:
    """The group over which the ranks write a checkpoint, and a function that makes a new one.

    A collective that timed out closes the connections of its group. `make` is called on all ranks together.
    timeout_s: the time within which all ranks must have written their parts.
    """

    group: dist.ProcessGroup | None
    make: Callable[[], dist.ProcessGroup]
    timeout_s: float


@dataclass
class Saver:
    """Copies the state to the host's memory, and writes that copy while the next steps run.

    The ranks write together over a group of their own, so that saves and training never share a collective.
    A slow save delays the next one. If a save fails, a warning is printed and the next save tries again,
    because a full or a slow disk should not end the training. Only a blocking save, the last one, raises
    SaveError. Without `training.checkpoint_async`, no copy is made, and the training waits for each save.

    about: further entries of the manifest. saved_step: the step of the newest checkpoint. save_s: how long it
    took to write that checkpoint; later saves replace the value.

    check: called with the step before the state is copied. It raises if the state must not be saved, nor
    copied to the memory of hosts.

    on_wait: called every few seconds while training waits for a save, so that the watchdog does not report a
    hang. If the ranks have not written within the time-out of `saving`, the save has failed. A rank that
    still writes after twice the time-out ends the run.

    on_saved: called with the step of a checkpoint that is found to be complete. warn: receives a line, on
    rank 0, if a save has failed or the next two will not fit on the disk.
    """

    folder: Path
    _: KW_ONLY
    state: Callable[[], StateDict]
    about: Mapping[str, Any]
    training: TrainingConfig
    device: torch.device
    saving: SavingGroup
    saved_step: int = 0
    save_s: float | None = None
    check: Callable[[int], None] = lambda step: None
    on_wait: Callable[[], None] = lambda: None
    on_saved: Callable[[int], None] = lambda step: None
    warn: Callable[[str], None] = print_warning

    def __post_init__(self) -> None:
        self._group, self._parts = self.saving.group, WrittenParts()
        self._thread: ThreadPoolExecutor | None = None  # writes the saves without a copy
        self._plans = f"saver {next(_SAVERS)}"
        self._pending: Future[BaseException | None] | None = None  # with the error of the save
        self._pending_step, self._began_s = 0, 0.0
        self._stager: Stager | None = None
        self._is_short = False  # the next two saves will not fit on the disk
        self._stuck = False  # a rank does not end its part, so nothing may wait for the writing thread

    def due(self, step: int) -> bool:
        """Whether to save after `step`: every `checkpoint_every` steps, and after the last step."""
        every = self.training.checkpoint_every
        return every is not None and (step % every == 0 or step == self.training.steps)

    def save(self, step: int, *, blocking: bool = False) -> None:
        """Begin to write the state after `step`. All ranks must call it at the same step.

        With `blocking`, returns after the checkpoint is on the disk. If that failed, raises SaveError on the
        ranks that could not write, and FollowerError on the others. Raises StuckSaveError on each rank that
        does not end its part of a save, and FollowerError on the others.
        """
        self._finish()
        if step > self.saved_step:
            self.check(step)
            self._begin(step)
        if not blocking and self.training.checkpoint_async:
            return
        if (failed := self._finish()) and blocking:
            reason, ranks = failed
            message = f"the checkpoint of step {step} could not be written: {reason}"
            if ranks and dist.get_rank() not in ranks:
                raise FollowerError(f"ended because {message} ({name_ranks(ranks)})")
            raise SaveError(message)

    def close(self) -> None:
        """Wait for a save that is in progress, unless it is stuck: its thread may never end."""
        self._finish()
        forget_plans(self._plans)
        if self._stager is not None and not self._stuck:  # a stuck thread still reads the buffers
            self._stager.close()
        if self._thread is not None:
            self._thread.shutdown(wait=not self._stuck)

    def _begin(self, step: int) -> None:
        unfinished = checkpoint_index.unfinished_folder(self.folder, step)
        if dist.get_rank() == 0:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            shutil.rmtree(unfinished, ignore_errors=True)  # left by a save that failed
        state: dict[str, Any] = self._parts.of({**self.state(), **random_state(self.device)})
        training = self.training
        writer = CheckpointWriter(
            unfinished,
            folder=self.folder,
            step=step,
            about={**self.about, "samples": step * training.global_batch_size},
            prune=self._prune,
        )
        self._pending_step = step
        planner = planner_with_memory(self._plans)
        save: dict[str, Any] = {"storage_writer": writer, "planner": planner, "process_group": self._group}
        self._began_s = time.perf_counter()
        if self.training.checkpoint_async:
            self._stager = self._stager or stager_for(self.device)  # one, as it keeps the memory of the copy
            written = cast("Future[Any]", dcp.async_save(state, async_stager=self._stager, **save))
        else:
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="save")
            written = self._thread.submit(self._write, state, save)
        self._pending = Future()
        written.add_done_callback(partial(self._end, self._pending, unfinished))

    def _prune(self) -> None:
        """Make room, and warn once if that is not enough. Rank 0 calls it in the thread that writes."""
        kept: dict[str, Any] = {key: getattr(self.training, key) for key in ("keep_last", "keep_every")}
        checkpoint_index.prune(self.folder, **kept)
        with suppress(DamagedError):
            shortage = checkpoint_index.shortage(self.folder, **kept)
            if shortage and not self._is_short:
                self.warn(f"{self.folder} {shortage}. Make room")
            self._is_short = shortage is not None

    def _write(self, state: dict[str, Any], save: dict[str, Any]) -> None:
        """Write without a copy, in a thread, so that this rank's main thread can report that it waits."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # a thread begins with device 0
        dcp.save(state, **save)

    def _end(self, pending: Future[BaseException | None], unfinished: Path, written: Future[Any]) -> None:
        """Measure a save, or make room after a failed one: the next lines of metrics must fit on the disk."""
        error: BaseException | None = None
        try:
            if (error := written.exception()) is None:
                self.save_s = time.perf_counter() - self._began_s
            elif isinstance(error, dcp.api.CheckpointException) and dist.get_rank() == 0:
                # torch raises it after all ranks have ended.
                shutil.rmtree(unfinished, ignore_errors=True)
        finally:
            pending.set_result(error)

    def _finish(self) -> tuple[str, list[int]] | None:
        """Wait until all ranks have ended the pending save.

        Returns why it failed, and the ranks that could not write if they are known; the same on all ranks.
        The outcome on rank 0 counts, because rank 0 completes the checkpoint after all ranks have written.
        """
        if self._pending is None:
            return None
        error = self._wait_for_all(self._pending)
        self._pending = None
        if error is not None and not isinstance(error, dcp.api.CheckpointException) and not is_broken(error):
            raise error
        ranks = sorted(getattr(error, "failures", ()))
        failed = exchange.broadcast(None if error is None else [self._reason(error), ranks])
        if max(exchange.all_gather_numbers([float(is_broken(error))], device=exchange.CPU)[0]):
            broken, self._group = self._group, self.saving.make()
            if broken is not None:
                dist.destroy_process_group(broken)
        if failed is None:
            self.saved_step = self._pending_step
            self.on_saved(self.saved_step)
            return None
        self._give_up(failed[0])
        return failed[0], failed[1]

    def _give_up(self, reason: str) -> None:
        """Remove what a failed save has written, and say why it failed."""
        forget_plans(self._plans)  # torch 2.11 remembers a plan that failed
        if dist.get_rank() != 0:
            return
        step = self._pending_step
        shutil.rmtree(checkpoint_index.unfinished_folder(self.folder, step), ignore_errors=True)
        newest = f"the newest is that of step {self.saved_step}"
        self.warn(f"the checkpoint of step {step} could not be written ({reason}); {newest}")

    def _wait_for_all(self, pending: Future[BaseException | None]) -> BaseException | None:
        """Wait until no rank writes any more; returns this rank's error. All ranks call it together."""
        while True:
            done = bool(wait([pending], timeout=_MARK_EVERY_S).done)
            waited_s = time.perf_counter() - self._began_s
            is_done, waits_s = exchange.all_gather_numbers([float(done), waited_s], device=exchange.CPU)
            if all(is_done):
                return pending.result()
            self.on_wait()
            if max(waits_s) > _PATIENCE * self.saving.timeout_s:
                self._raise_stuck([not done for done in is_done], waited_s=max(waits_s))

    def _raise_stuck(self, is_stuck: Sequence[bool], *, waited_s: float) -> NoReturn:
        """End the run on all ranks. is_stuck: whether each rank still writes."""
        self._pending, self._stuck = None, True
        ranks = [rank for rank, stuck in enumerate(is_stuck) if stuck]
        clause = "have not written their parts" if len(ranks) > 1 else "has not written its part"
        message = (
            f"{name_ranks(ranks)} {clause} of the checkpoint of step {self._pending_step} "
            f"after {waited_s:.0f} s, twice cluster.checkpoint_timeout_s"
        )
        if is_stuck[dist.get_rank()]:
            raise StuckSaveError(message)
        raise FollowerError(f"ended because {message}")

    def _reason(self, error: BaseException) -> str:
        """Why a save failed, as the system says it."""
        if isinstance(error, dcp.api.CheckpointException):
            failures = error.failures.values()
            return "; ".join(sorted({f"{type(failure).__name__}: {failure}" for failure, _ in failures}))
        if failure.kind_and_source(error)[0] == failure.COLLECTIVE_TIMEOUT:
            limit_s = self.saving.timeout_s
            return f"not all ranks had written after cluster.checkpoint_timeout_s = {limit_s:g} seconds"
        return f"{type(error).__name__}: {error}"


def is_broken(error: BaseException | None) -> bool:
    """Whether a save ended with this error because a collective timed out or a rank was lost."""
    kind = None if error is None else failure.kind_and_source(error)[0]
    return kind in (failure.COLLECTIVE_TIMEOUT, failure.LOST_PEER)
