"""What a rank leaves behind when it fails: `logs/rank-<r>.failure.json`."""

from __future__ import annotations

import contextlib
import re
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_parallel.launch.run_folder import RunFolder, read_json, write_json

if TYPE_CHECKING:
    from hpc_parallel.worker.world import World

KILLED = "killed"  # by a signal that the clean-up did not send
LOST_PEER = "lost_peer"  # another rank went away or did not answer: a follower by nature
STOPPED = "stopped"  # ended by the clean-up after another's failure
TIME_LIMIT = "time_limit"  # Slurm's
START = "start"  # the ranks did not find each other
OUT_OF_MEMORY = "out_of_memory"
HANG = "hang"  # no progress; who is behind is told by the ranks' standings together (worker/standing.py)
ERROR = "error"  # the user's code, or ours

# What gloo, NCCL and torch's store say when the other side of a connection is gone or silent.
_LOST_PEER = re.compile(
    r"connection (was likely )?closed|closed by (remote )?peer|connection reset|connection refused"
    r"|connection timed out|broken pipe|socket closed|socket timeout|pair closure|no route to host"
    r"|failed to recv, got 0 bytes|timed out waiting \d+ ?ms|gloo connectfullmesh failed"
    r"|remote process exited|ncclremoteerror|watchdog caught collective operation timeout",
    re.IGNORECASE,
)
_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)
_MESSAGE_CHARACTERS = 400


@dataclass(frozen=True)
class Record:
    """One rank's end: who, where, of which kind, when (by the clock of its own host)."""

    rank: int
    host: str
    node: int
    attempt: str
    kind: str
    message: str  # one line
    signal: str | None
    time: str  # ISO 8601, UTC, microseconds
    time_ns: int
    traceback: list[str]


def record_exception(folder: RunFolder, *, world: World, error: BaseException) -> None:
    """Keep why this rank fails; its first word counts."""
    words = " ".join(str(error).split())[:_MESSAGE_CHARACTERS]
    _keep(
        folder,
        world=world,
        kind=kind_of(error),
        message=f"{type(error).__name__}: {words}" if words else type(error).__name__,
        lines="".join(traceback.format_exception(error)).splitlines(),
    )


def record_death(folder: RunFolder, *, world: World, returncode: int, stopped: bool = False) -> None:
    """Keep how a rank ended that could not say so itself; what it has said stands.

    `returncode` as of subprocess: negative for a signal. `stopped`: our own clean-up sent the signal.
    """
    name = signal_name(-returncode) if returncode < 0 else None
    if name is None:
        kind, message = ERROR, f"ended with exit code {returncode} and no word why"
    elif stopped:
        kind, message = STOPPED, f"ended by {name} after another rank's failure"
    else:
        kind, message = KILLED, f"killed by {name}"
    _keep(folder, world=world, kind=kind, message=message, signal_name=name)


def record_hang(folder: RunFolder, *, world: World, message: str, stack: list[str]) -> None:
    """Keep that this rank has made no progress, its own fault or not."""
    _keep(folder, world=world, kind=HANG, message=message, lines=stack)


def forget(folder: RunFolder, *, rank: int) -> None:
    """Drop the record of an earlier attempt, before this one starts."""
    _path(folder, rank).unlink(missing_ok=True)


def records(folder: RunFolder) -> list[Record]:
    """What the ranks of the newest attempt left, first in time first."""
    found = sorted(_read(folder), key=lambda record: record.time_ns)
    return [record for record in found if record.attempt == found[-1].attempt]


def kind_of(error: BaseException) -> str:
    """The kind of an exception or of what caused it: pipeline stages wrap what their blocks raise."""
    kind = _kind_of_one(error)
    if kind == ERROR and error.__cause__ is not None:
        return kind_of(error.__cause__)
    return kind


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _kind_of_one(error: BaseException) -> str:
    names = {parent.__name__ for parent in type(error).__mro__}  # by name, so torch stays unimported
    if "StartError" in names:
        return START
    # A user's own socket raises OSError; torch's collectives and store raise RuntimeError.
    if isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)):
        return LOST_PEER
    if names & {"MemoryError", "OutOfMemoryError"}:
        return OUT_OF_MEMORY
    if isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)):
        return OUT_OF_MEMORY
    return ERROR


def _keep(
    folder: RunFolder,
    *,
    world: World,
    kind: str,
    message: str,
    signal_name: str | None = None,
    lines: list[str] | None = None,
) -> None:
    path = _path(folder, world.rank)
    now_ns = time.time_ns()
    record = Record(
        rank=world.rank,
        host=world.host,
        node=world.node,
        attempt=world.attempt,
        kind=kind,
        message=message,
        signal=signal_name,
        time=datetime.fromtimestamp(now_ns / 1e9, UTC).isoformat(timespec="microseconds"),
        time_ns=now_ns,
        traceback=lines or [],
    )
    # A full disk may be the very failure: it must not hide the exception under another.
    with contextlib.suppress(OSError):
        earlier = read_json(path)
        if earlier is None or earlier.get("attempt") != record.attempt:
            write_json(path, asdict(record))


def _read(folder: RunFolder) -> Iterator[Record]:
    for path in folder.logs.glob("rank-*.failure.json"):
        values = read_json(path)
        if values is not None:
            yield Record(**values)


def _path(folder: RunFolder, rank: int) -> Path:
    return folder.logs / f"rank-{rank}.failure.json"
