"""What a rank's parent tells of it when the rank itself can't: it was stopped, or its Python can't run."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_text
from hpc_parallel.supervise import failure, hang_report
from hpc_parallel.supervise.hang_report import Standing
from hpc_parallel.supervise.world import World

_DUMP_S = 5.0  # for a process to write its stacks
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$')


class Overseer:
    """Looks at one rank's process now and then; free of torch."""

    def __init__(self, folder: RunFolder, *, world: World, process: int, timeout_s: float) -> None:
        self.folder, self.world, self.process, self.timeout_s = folder, world, process, timeout_s
        self.period_s = timeout_s / hang_report.LOOKS
        self.stopped_s = 0.0
        self.looked = time.monotonic()
        self.alarmed: float | None = None  # when this one learnt of the hang
        self.done = False

    def look(self) -> None:
        """To be called again and again while the process lives; takes a moment only when it speaks for it.

        Time in which the parent could not run either is not counted: the whole job was suspended.
        """
        before, now = self.looked, time.monotonic()
        if self.done or now - before < min(self.period_s, 0.5):
            return
        self.looked = now
        stopped = state_of(self.process) == "T"
        self.stopped_s = self.stopped_s + min(now - before, 2 * self.period_s) if stopped else 0.0
        if self.alarmed is None:
            if self.stopped_s >= self.timeout_s:
                hang_report.raise_alarm(self.folder, attempt=self.world.attempt)
            if hang_report.alarm(self.folder, attempt=self.world.attempt):
                self.alarmed = now
        if self.alarmed is None:
            return
        told = hang_report.reported(self.folder, attempt=self.world.attempt)
        others = {found.rank for found in told} - {self.world.rank}
        waited = now - self.alarmed > hang_report.grace_s(self.timeout_s)
        if any(found.rank == self.world.rank for found in told):
            self.done = True
        elif waited or (stopped and len(others) == self.world.world_size - 1):
            self._speak(stopped=stopped)
            self.done = True

    def _speak(self, *, stopped: bool) -> None:
        """Take the stacks out of the process, which ends it, and report in its place."""
        text = take_stacks(self.process, log=self.folder.log(self.world.rank, "err"))
        write_text(hang_report.stacks(self.folder, self.world.rank), text)
        stack = stack_of(text)
        found = Standing(
            rank=self.world.rank, host=self.world.host, world_size=self.world.world_size,
            attempt=self.world.attempt, phase=None, step=None, idle_s=self.timeout_s,
            where=spot_of(stack), stack=stack, stopped=stopped,
        )  # fmt: skip
        hang_report.report(self.folder, found)
        how = "stopped by a signal (state T)" if stopped else "its Python can't run"
        failure.record_hang(self.folder, world=self.world, message=f"{how} {found.place}", stack=stack)


@contextlib.contextmanager
def overseen(folder: RunFolder, *, world: World, process: int, timeout_s: float | None) -> Iterator[None]:
    """Look at `process` from a thread until the block ends; `timeout_s` None: nobody looks."""
    if timeout_s is None:
        yield
        return
    overseer = Overseer(folder, world=world, process=process, timeout_s=timeout_s)
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(overseer.period_s):
            overseer.look()

    thread = threading.Thread(target=look, name="overseer")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()  # it may just be speaking for the rank


def state_of(process: int) -> str:
    """The letter of /proc/PID/stat: T for one that a signal has stopped (t: by a debugger); "" when gone."""
    with contextlib.suppress(OSError):
        # Field 2, a name in parentheses, may hold blanks.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def take_stacks(process: int, *, log: Path) -> str:
    """All Python stacks of a process that writes fatal errors to `log` by faulthandler; it ends by SIGABRT.

    That handler needs neither Python's lock nor the main thread. A stopped process meets the signal
    first when it is continued, before any code of its own.
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


def stack_of(text: str) -> list[str]:
    """The frames of the main thread, outermost first: faulthandler writes the oldest thread last."""
    frames: list[str] = []
    within = False
    for line in text.splitlines():
        is_frame = _FRAME.match(line) is not None
        if is_frame:
            frames = [line, *frames] if within else [line]
        within = is_frame
    return frames


def spot_of(stack: list[str]) -> str:
    """The innermost frame that is not torch's."""
    found = [match for line in stack if (match := _FRAME.match(line))]
    own = [match for match in found if "/torch/" not in match["file"]] or found
    if not own:
        return "a place that could not be read"
    return hang_report.spot(own[-1]["file"], int(own[-1]["line"]), own[-1]["name"])
