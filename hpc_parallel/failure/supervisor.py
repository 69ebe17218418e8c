"""The checks that the parent of a rank runs in a thread, and the hang report that the parent writes.

The parent writes the report because a rank that is stopped, or that can't run Python, can't write its own.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hpc_parallel.failure import failure, hang_report
from hpc_parallel.failure.flight_recorder import DeviceProgress
from hpc_parallel.failure.hang_report import HangReport
from hpc_parallel.failure.stacks import reader_of, spot_of, stack_of
from hpc_parallel.machine.world import World
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_text

PERIOD_S = 1.0  # between two calls of the checks of `watching`
_DUMP_S = 5.0  # time-out for a process to write its stacks


class Supervisor:
    """Checks the process of one rank from time to time, without torch."""

    is_script = False

    def __init__(self, folder: RunFolder, *, world: World, process: int, timeout_s: float) -> None:
        self.folder, self.world, self.process, self.timeout_s = folder, world, process, timeout_s
        self.period_s = timeout_s / hang_report.LOOKS
        self.stopped_s = 0.0
        self.checked_at = time.monotonic()
        self.alarmed_at: float | None = None  # when this supervisor noticed the alarm
        self.device: DeviceProgress | None = None  # of a GPU with NCCL, if the parent can know it
        self.done = False

    def __call__(self, is_last: bool) -> None:
        """Check the process if a period has passed. `watching` calls this."""
        if not is_last and time.monotonic() - self.checked_at >= self.period_s:
            self.check()

    def check(self) -> None:
        """Check the process; call this repeatedly while it runs. Only the writing of a report takes time.

        Time in which the parent could not run is not counted, because then the whole job was suspended.
        """
        before, now = self.checked_at, time.monotonic()
        if self.done or now - before < min(self.period_s, 0.5):
            return
        self.checked_at = now
        stopped = state_of(self.process) == "T"
        if self.alarmed_at is None:
            if self.hangs(min(now - before, 2 * self.period_s), stopped=stopped):
                hang_report.raise_alarm(self.folder, attempt=self.world.attempt)
            if hang_report.alarm(self.folder, attempt=self.world.attempt):
                self.alarmed_at = now
                self.on_alarm()
        if self.alarmed_at is None:
            return
        waited = now - self.alarmed_at > hang_report.grace_s(self.timeout_s)
        if hang_report.has_report(self.folder, rank=self.world.rank, attempt=self.world.attempt):
            self.done = True
        elif waited or (stopped and self.others_reported()):
            self.report(stopped=stopped)
            self.done = True

    def hangs(self, elapsed_s: float, *, stopped: bool) -> bool:
        """Whether this rank has to raise the alarm. elapsed_s: since the last check."""
        self.stopped_s = self.stopped_s + elapsed_s if stopped else 0.0
        return self.stopped_s >= self.timeout_s

    def on_alarm(self) -> None:
        """Called once, when this supervisor has noticed the alarm."""

    def others_reported(self) -> bool:
        """Whether all other ranks have written their reports."""
        return hang_report.other_reports(self.folder, world=self.world) == self.world.world_size - 1

    def report(self, *, stopped: bool) -> None:
        """Read the stacks of the process, which ends it, and write its report."""
        text = self.stacks()
        write_text(hang_report.stacks(self.folder, self.world.rank), text)
        stack, where = stack_of(text), spot_of(stack_of(text))
        if (reader := reader_of(text)) and not stopped:  # either thread may hold the GIL
            stack, where = [*stack, *reader], f"{where} or in reading the next batch at {spot_of(reader)}"
        report = HangReport(
            rank=self.world.rank, host=self.world.host, world_size=self.world.world_size,
            attempt=self.world.attempt, phase=None, step=None, idle_s=self.timeout_s,
            where=where, stack=stack, device=self.device, stopped=stopped, is_script=self.is_script,
        )  # fmt: skip
        hang_report.write_report(self.folder, report)
        alive = "no rank has written anything:" if self.is_script else "its Python can't run"
        reason = "stopped by a signal (state T)" if stopped else alive
        failure.record_hang(self.folder, world=self.world, message=f"{reason} {report.place}", stack=stack)

    def stacks(self) -> str:
        """End the process, and return its Python stacks."""
        return take_stacks(self.process, log=self.folder.log(self.world.rank, "err"))


@contextlib.contextmanager
def watching(checks: Sequence[Callable[[bool], None]]) -> Iterator[None]:
    """While the block runs, call each check with False from time to time, and at its end with True.

    If a check fails, because the disk is full for example, its error is printed and it is not called again.
    """
    ended = threading.Event()
    alive = list(checks)

    def run() -> None:
        is_last = False
        while not is_last:
            is_last = ended.wait(PERIOD_S)
            for check in list(alive):
                try:
                    check(is_last)
                except Exception:
                    traceback.print_exc()
                    alive.remove(check)

    thread = threading.Thread(target=run, name="watching")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def state_of(process: int) -> str:
    """The state in /proc/PID/stat: T if a signal stopped it (t: a debugger); "" if it has ended."""
    with contextlib.suppress(OSError):
        # Field 2, a name in parentheses, may contain spaces.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def take_stacks(process: int, *, log: Path) -> str:
    """End a process with SIGABRT and return its Python stacks, which faulthandler writes to `log`.

    faulthandler needs neither the GIL nor the main thread. When a stopped process is continued, it
    handles the signal before it runs any of its own code.
    """
    size = log.stat().st_size if log.exists() else 0
    with contextlib.suppress(OSError):
        resource.prlimit(process, resource.RLIMIT_CORE, (0, 0))  # the stacks are enough
    os.kill(process, signal.SIGABRT)
    os.kill(process, signal.SIGCONT)
    deadline = time.monotonic() + _DUMP_S
    while state_of(process) not in ("", "Z", "X") and time.monotonic() < deadline:
        time.sleep(0.02)
    with contextlib.suppress(OSError), log.open(errors="replace") as file:
        file.seek(size)
        return file.read()
    return ""
