"""The hang report of a user's own script, which does not report its progress."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress

import psutil

from hpc_parallel.failure import hang_report, normal_end
from hpc_parallel.failure.flight_recorder import DumpRequest
from hpc_parallel.failure.process_tree import tree_of
from hpc_parallel.failure.py_spy import spied_stacks
from hpc_parallel.failure.supervisor import PERIOD_S, Supervisor, state_of
from hpc_parallel.machine.world import World
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import size_of

_POLL_S = 0.2
_ANSWER_S = 12.0  # NCCL's answer took up to 11 s on a GPU that four ranks shared
FIRST_S = 60.0  # a script may print nothing for so long at its start, while it imports and connects


class ScriptSupervisor(Supervisor):
    """Notices that no rank of a script writes anything, and finds where each rank stands.

    A script does not report its progress, so one parent looks at the logs of all ranks: that of rank 0, or
    else of the lowest rank that has not ended. At the alarm each parent asks NCCL in its rank for a dump and
    py-spy for the stacks, and then stops its rank by SIGSTOP. Without py-spy, reading a stack ends the rank,
    so the parent first waits until all ranks are stopped. Otherwise the others would lose a peer, and fail
    before their stacks are read.
    """

    is_script = True

    def __init__(
        self,
        folder: RunFolder,
        *,
        world: World,
        process: int,
        timeout_s: float,
        environment: Mapping[str, str],
    ) -> None:
        """environment: that of the process."""
        super().__init__(folder, world=world, process=process, timeout_s=timeout_s)
        self._request = DumpRequest.of(folder, rank=world.rank, environment=environment)
        self._spied: str | None = None
        self._lowest = 0  # the lowest rank that had not ended at the last check
        self._sizes = self._sizes_now()
        self._silent_s, self._limit_s = 0.0, max(FIRST_S, timeout_s)
        self._was_stopped = False  # by another process, before the alarm

    def hangs(self, elapsed_s: float, *, stopped: bool) -> bool:
        """Whether the process was stopped, or all ranks were silent, for the whole time-out."""
        while self._lowest < self.world.rank and normal_end.has_ended(self.folder, rank=self._lowest):
            self._lowest += 1
        sizes = self._sizes_now()
        if sizes != self._sizes:
            self._silent_s, self._limit_s = 0.0, self.timeout_s
        self._silent_s += elapsed_s
        self._sizes = sizes
        silent = self.world.rank == self._lowest and self._silent_s >= self._limit_s
        return super().hangs(elapsed_s, stopped=stopped) or silent

    def _sizes_now(self) -> list[int]:
        if self.world.rank != self._lowest:
            return []
        ranks, streams = range(self.world.world_size), ("out", "err")
        logs = [self.folder.log(rank, stream) for rank in ranks for stream in streams]
        return [size_of(file) for file in (*logs, self.folder.metrics)]

    def on_alarm(self) -> None:
        """See where the rank stands, and stop it there."""
        self.process = python_of(self.process)
        self._was_stopped = state_of(self.process) == "T"
        if not self._was_stopped:
            with suppress(OSError):  # a file server may fail: the rank is stopped and reported all the same
                self._look()
            with suppress(OSError):
                os.kill(self.process, signal.SIGSTOP)
            self.alarmed_at = time.monotonic()  # the other ranks may be stopped as late as this one

    def _look(self) -> None:
        """Read what needs a process that runs: the dump of NCCL and the stacks with frames of C code."""
        request = self._request
        was_sent = request is not None and request.send()
        self._spied = spied_stacks(self.process, native=True)
        if request is None or not was_sent:
            return
        until = time.monotonic() + max(_ANSWER_S, hang_report.grace_s(self.timeout_s))
        while self._without_answer(request) and state_of(self.process) and time.monotonic() < until:
            time.sleep(_POLL_S)
        while (answer := request.answer()) is None and state_of(self.process) and time.monotonic() < until:
            time.sleep(_POLL_S)
        self.device = answer

    def _without_answer(self, request: DumpRequest) -> set[int]:
        ranks = request.ranks_without_answer(self.world.world_size)
        return {rank for rank in ranks if not normal_end.has_ended(self.folder, rank=rank)}

    def report(self, *, stopped: bool) -> None:
        """Write the report, and wait for the reports of the others: the end of this parent ends the job."""
        super().report(stopped=self._was_stopped)
        until = time.monotonic() + hang_report.grace_s(self.timeout_s)
        while not self.others_reported() and time.monotonic() < until:
            time.sleep(min(self.period_s, PERIOD_S))

    def stacks(self) -> str:
        """End the rank and return its stacks. py-spy reads them; if it can't, faulthandler prints them."""
        spied, dumped = self._spied or spied_stacks(self.process, native=False), super().stacks()
        return spied or dumped


def python_of(process: int) -> int:
    """The first Python among a process and its descendants; the process itself if there is none."""
    for member in tree_of(process):
        with suppress(psutil.Error):
            if "python" in os.path.basename(member.exe()):  # torch changes the name of its process
                return int(member.pid)
    return process
