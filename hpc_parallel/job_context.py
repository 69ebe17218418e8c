"""Lets a user's script log figures and ask whether its job must stop, without torch (docs/own-script.md).

    from hpc_parallel import job_context

    job_context.log(step=step, loss=loss)
    if job_context.stop_requested(step):
        save(job_context.checkpoint_folder)

Outside a job of hpc_parallel, `checkpoint_folder` and `restarts` are None, `log` does nothing and
`stop_requested` returns False.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import SupportsFloat

from hpc_parallel.record.safe_write import append_line, write_text

# Environment variables that describe the job to a rank: the run folder, the number of earlier starts, and the
# prefix of the files with which the ranks agree on a stop.
RUN, RESTARTS, STOP = "HPC_PARALLEL_RUN", "HPC_PARALLEL_RESTARTS", "HPC_PARALLEL_STOP"
LOGGED = Path("logs", "rank-0.metrics.jsonl")  # the file that `log` writes in the run folder
_ANSWER_S = 60.0  # within this time, all ranks must have called `stop_requested` once
_PER_S = 100  # listings of the folder per second, by all ranks together: it may be on a file server

_run = os.environ.get(RUN)
_rank = int(os.environ.get("RANK") or 0)

checkpoint_folder: Path | None = None if _run is None else Path(_run, "checkpoints")
"""A folder for the script's own checkpoints, the same at each start of the run. It exists."""

restarts: int | None = None if _run is None else int(os.environ.get(RESTARTS) or 0)
"""How many starts of this run came before: 0 at the first one."""

if checkpoint_folder is not None:
    with suppress(OSError):  # a full disk: the script then fails where it saves
        checkpoint_folder.mkdir(mode=0o700, exist_ok=True)


def log(*, step: int, **figures: SupportsFloat) -> None:
    """Add a line to the run's metrics: the step, from 1 on, and figures by name, such as `loss`.

    Rank 0's figures are recorded; on other ranks the call does nothing. A figure may be a number or a tensor
    with one element. One that is not finite is recorded as null.

    Raises TypeError or ValueError for a value that is no number.
    """
    if _run is None or _rank != 0:
        return
    numbers = {name: float(value) for name, value in figures.items()}
    values = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
    try:
        append_line(Path(_run, LOGGED), {"step": int(step), **values, "time": datetime.now(UTC).isoformat()})
    except OSError as error:  # a full disk must not end the script
        print(f"hpc_parallel can't record the figures of step {step}: {error}", file=sys.stderr)


def stop_requested(step: int) -> bool:
    """Whether the script must save its state and end with code 0, because its job has to stop.

    A job has to stop before its time limit, at a preemption, and when it is cancelled. Call this function on
    every rank with the same increasing numbers `step`, for example after each step. All ranks get the same
    answer for the same step, even if some ranks are ahead of others. From the first call on, SIGTERM does
    not end the script, unless the script has set its own handler.
    """
    global _agreement
    if _run is None or STOP not in os.environ:
        return False
    if _agreement is None:
        _agreement = Agreement(os.environ[STOP], rank=_rank, ranks=int(os.environ.get("WORLD_SIZE") or 1))
        threading.Thread(target=_agreement.watch, name="stop_requested", daemon=True).start()
        _outlive_sigterm()
    return _agreement.includes(step)


class Agreement:
    """The step from which all ranks answer yes.

    After the request, each rank delays its answers and publishes the last step for which it has answered no.
    When all ranks have published, rank 0 decides: it publishes the step after the highest of these steps. A
    rank that has waited too long publishes the decision that there is no step. The first decision holds for
    all ranks. A thread does this work, so a rank may meanwhile wait for another rank in a collective.
    """

    def __init__(self, prefix: str, *, rank: int, ranks: int, answer_s: float = _ANSWER_S) -> None:
        self._prefix, self._rank, self._ranks, self._answer_s = Path(prefix), rank, ranks, answer_s
        self._changed = threading.Condition()
        self._denied = -1  # the highest step for which the answer was no
        self._holds = False
        self._first: float | None = None  # the step from which the answer is yes

    def includes(self, step: int) -> bool:
        """Whether the ranks stop at `step`; waits while they agree."""
        with self._changed:
            self._changed.wait_for(lambda: not self._holds)
            if self._first is not None and step >= self._first:
                return True
            self._denied = max(self._denied, step)
            return False

    def watch(self) -> None:
        """Wait for the request and agree with the other ranks. Without an agreement all answer no."""
        period_s = max(1.0, self._ranks / _PER_S)
        first = math.inf
        try:
            while self._prefix.name not in self._names():
                time.sleep(period_s)
            with self._changed:
                self._holds = True
            _publish(self._file(self._rank), self._denied)
            first = self._agree(period_s / 5)
        except (OSError, ValueError) as error:  # a file server is gone, for example
            print(f"hpc_parallel can't agree on a step to stop: {error}", file=sys.stderr)
        finally:
            with self._changed:
                self._first, self._holds = first, False
                self._changed.notify_all()

    def _agree(self, period_s: float) -> float:
        answers, decision = [self._file(rank) for rank in range(self._ranks)], self._file("at")
        until = time.monotonic() + self._answer_s
        while decision.name not in (names := self._names()):
            if self._rank == 0 and {file.name for file in answers} <= names:
                _publish(decision, 1 + max(int(os.readlink(file)) for file in answers))
                break
            if time.monotonic() > until:
                _publish(decision, math.inf)
                break
            time.sleep(period_s)
        first = float(os.readlink(decision))
        if first == math.inf:
            print("hpc_parallel: not every rank calls stop_requested: no step is agreed on", file=sys.stderr)
        return first

    def _file(self, end: object) -> Path:
        return self._prefix.with_name(f"{self._prefix.name}-{end}")

    def _names(self) -> set[str]:
        # Listed, not looked up: an NFS client may cache for a minute that a file does not exist.
        return set(os.listdir(self._prefix.parent))


_agreement: Agreement | None = None


def _publish(file: Path, number: float) -> None:
    """Publish a number, unless `file` exists. A symlink has its text from the start and is never replaced."""
    with suppress(FileExistsError):
        os.symlink(str(number), file)


def request_stop(prefix: str) -> None:
    """Ask all ranks to stop, by the file that `stop_requested` waits for."""
    with suppress(OSError):
        write_text(Path(prefix), "")


def has_agreed(prefix: str) -> bool:
    """Whether the ranks have agreed on a step to stop."""
    with suppress(OSError, ValueError):
        return float(os.readlink(f"{prefix}-at")) < math.inf
    return False


def _outlive_sigterm() -> None:
    """Ignore SIGTERM, unless the script handles it. The parent of the rank gets the signal too, and acts."""
    process = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # a forked child, such as a worker of a data loader, ends
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    on_main_thread = threading.current_thread() is threading.main_thread()
    if on_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, handle)
