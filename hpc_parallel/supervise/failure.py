"""What a rank leaves behind when it fails: `logs/rank-<r>.failure.json`."""

from __future__ import annotations

import contextlib
import errno
import re
import signal
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import DamagedError, read_json, read_tail
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.supervise import flight_recorder, oom
from hpc_parallel.supervise.error_place import place_of, step_of

if TYPE_CHECKING:
    from hpc_parallel.supervise.world import World

KILLED = "killed"  # by a signal that the clean-up did not send
LOST_PEER = "lost_peer"  # another rank went away or did not answer: a follower by nature
STOPPED = "stopped"  # ended by the clean-up after another's failure, or because all agreed to
COLLECTIVE_TIMEOUT = "collective_timeout"  # waited in vain: a follower too, whoever did not come is the cause
DESYNC = "desync"  # ranks entered different collectives
NONFINITE = "nonfinite"  # loss or gradients; training.on_nonfinite
DISK = "disk"  # full, broken, read-only, over its quota
NODE_LOST = "node_lost"
CONFIGURATION = "configuration"  # what only the job could see
TIME_LIMIT = "time_limit"  # Slurm's
START = "start"  # the ranks did not find each other
OUT_OF_MEMORY = "out_of_memory"
HANG = "hang"  # no progress for cluster.hang_timeout_s (who is behind: supervise/hang_report.py)
ERROR = "error"  # the user's code, or ours

# What gloo, NCCL and torch's store say when the other side of a connection is gone or silent.
_LOST_PEER = re.compile(
    r"connection (was likely )?closed|closed by (remote )?peer|connection reset|connection refused"
    r"|connection timed out|broken pipe|socket closed|socket timeout|pair closure|no route to host"
    r"|failed to recv, got 0 bytes|gloo connectfullmesh failed|remote process exited|ncclremoteerror",
    re.IGNORECASE,
)
_TIMEOUT = re.compile(
    r"timed out waiting \d+ ?ms|watchdog caught collective operation timeout", re.IGNORECASE
)
# gloo got a message of another size than it waits for; torch's own comparison (TORCH_DISTRIBUTED_DEBUG).
_DESYNC = re.compile(r"op\.preamble\.length|detected mismatch between collectives", re.IGNORECASE)
_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)
_DISK = {errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS}
_NO_SPACE = re.compile(
    r"no space left on device|disk quota exceeded|read-only file system|input/output error", re.IGNORECASE
)
_MESSAGE_CHARACTERS = 400
_LOG_END_BYTES = 64 * 1024
_BY_NAME = {
    "StartError": START, "ForgedError": START, "ConfigError": CONFIGURATION, "NonFiniteError": NONFINITE,
    "FollowerError": STOPPED, "MemoryError": OUT_OF_MEMORY, "OutOfMemoryError": OUT_OF_MEMORY,
}  # fmt: skip
# What another try, perhaps on other nodes, may get past; an error of the code or of a full disk comes again.
MENDABLE = frozenset({KILLED, LOST_PEER, COLLECTIVE_TIMEOUT, NODE_LOST, START, HANG})


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
    details: dict[str, Any] = field(default_factory=dict)  # figures of the kind: asked_bytes, step, ...
    collectives: list[dict[str, Any]] = field(default_factory=list)  # supervise/flight_recorder.py


def can_restart(cause: Mapping[str, Any], *, on_nonfinite: str) -> bool:
    """Whether a restart from a checkpoint can mend `cause`, the content of `failure.json`.

    After values that were not finite only where `training.on_nonfinite` is `rollback`, from a checkpoint
    of a step before `cause["details"]["step"]`, and once: the same step would end the same way again.
    """
    if cause["kind"] == NONFINITE:
        return on_nonfinite == "rollback"
    # A job that failed before any rank started, as by a line of its set-up, fails again.
    nobody = cause["rank"] is None and cause["kind"] in (START, KILLED)
    return cause["kind"] in MENDABLE and not nobody


def record_exception(
    folder: RunFolder, *, world: World, error: BaseException, collectives: Sequence[dict[str, Any]] = ()
) -> None:
    """Keep why this rank fails and which collectives it had entered; its first word counts."""
    kind, source = _kind_and_source(error)
    where = place_of(error)
    details: dict[str, Any] = {"where": where} if where else {}
    if kind == OUT_OF_MEMORY:
        message, details = oom.describe(source, where=where)
    else:
        words = " ".join(str(source).split())[:_MESSAGE_CHARACTERS]
        told = kind in (NONFINITE, STOPPED, CONFIGURATION)  # our own words, which need no class before them
        name = type(source).__name__
        message = words if told and words else f"{name}: {words}" if words else name
        details |= getattr(source, "details", {})
    if (step := step_of(error)) is not None:
        details.setdefault("step", step)
    _keep(
        folder,
        world=world,
        kind=kind,
        message=message,
        lines="".join(traceback.format_exception(error)).splitlines(),
        details=details,
        collectives=list(collectives),
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
    elif name == "SIGABRT" and (words := _last_timeout(folder, rank=world.rank)):
        kind, message = COLLECTIVE_TIMEOUT, words  # NCCL's watchdog ends the process so
    else:
        kind, message = KILLED, f"killed by {name}"
    _keep(folder, world=world, kind=kind, message=message, signal_name=name)


def record_hang(folder: RunFolder, *, world: World, message: str, stack: list[str]) -> None:
    """Keep that this rank has made no progress, its own fault or not."""
    _keep(folder, world=world, kind=HANG, message=message, lines=stack)


def forget(folder: RunFolder, *, rank: int) -> None:
    """Drop the record of an earlier attempt, before this one starts."""
    _path(folder, rank).unlink(missing_ok=True)
    sweep(folder, rank=rank)
    flight_recorder.dump_of(folder, rank=rank).unlink(missing_ok=True)


def forget_all(folder: RunFolder) -> None:
    """The same for all ranks, of which this start may have fewer."""
    for record in folder.logs.glob("rank-*.failure.json"):
        record.unlink(missing_ok=True)


def sweep(folder: RunFolder, *, rank: int | None = None) -> None:
    """Remove what a rank that ended in the midst of writing left beside its files; None: all ranks, once
    they are gone."""
    for torn in folder.logs.glob(f".rank-{'*' if rank is None else rank}.*"):
        torn.unlink(missing_ok=True)


def records(folder: RunFolder) -> list[Record]:
    """What the ranks of the newest attempt left, first in time first."""
    found = sorted(_read(folder), key=lambda record: record.time_ns)
    return [record for record in found if record.attempt == found[-1].attempt]


def kind_of(error: BaseException) -> str:
    """The kind of an exception or of what caused it: pipeline stages wrap what their blocks raise."""
    return _kind_and_source(error)[0]


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _kind_and_source(error: BaseException) -> tuple[str, BaseException]:
    """Also the exception that tells it: where all are of no special kind, the outermost."""
    link: BaseException | None = error
    while link is not None:
        if (kind := _kind_of_one(link)) != ERROR:
            return kind, link
        link = link.__cause__
    return ERROR, error


def _kind_of_one(error: BaseException) -> str:
    names = [parent.__name__ for parent in type(error).__mro__]  # by name, so torch stays unimported
    for name in names:
        if name in _BY_NAME:
            return _BY_NAME[name]
    if isinstance(error, OSError):  # a user's own socket too; torch's collectives raise RuntimeError
        return DISK if error.errno in _DISK else OUT_OF_MEMORY if error.errno == errno.ENOMEM else ERROR
    if "CheckpointException" in names and _NO_SPACE.search(str(error)):
        return DISK
    if isinstance(error, RuntimeError):
        kinds = (
            (_LOST_PEER, LOST_PEER), (_TIMEOUT, COLLECTIVE_TIMEOUT), (_DESYNC, DESYNC),
            (_OUT_OF_MEMORY, OUT_OF_MEMORY), (_NO_SPACE, DISK),
        )  # fmt: skip
        return next((kind for pattern, kind in kinds if pattern.search(str(error))), ERROR)
    return ERROR


def _last_timeout(folder: RunFolder, *, rank: int) -> str | None:
    """The end of the rank's log, where NCCL's watchdog says what it waited for."""
    with contextlib.suppress(OSError, DamagedError):
        log = read_tail(folder.log(rank, "err"), limit_bytes=_LOG_END_BYTES)
        lines = log.decode(errors="replace").splitlines()
        found = next((line for line in reversed(lines) if _TIMEOUT.search(line)), None)
        return None if found is None else found.strip()[:_MESSAGE_CHARACTERS]
    return None


def _keep(
    folder: RunFolder,
    *,
    world: World,
    kind: str,
    message: str,
    signal_name: str | None = None,
    lines: list[str] | None = None,
    details: dict[str, Any] | None = None,
    collectives: list[dict[str, Any]] | None = None,
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
        details=details or {},
        collectives=collectives or [],
    )
    # A full disk may be the very failure: it must not hide the exception under another.
    with contextlib.suppress(OSError):
        earlier = readable(path)
        if earlier is None or earlier.get("attempt") != record.attempt:
            write_json(path, asdict(record))


def _read(folder: RunFolder) -> Iterator[Record]:
    for path in folder.logs.glob("rank-*.failure.json"):
        if (values := readable(path)) is not None:
            try:
                yield Record(**values)
            except TypeError:  # another version's, or torn
                continue


def readable(path: Path) -> dict[str, Any] | None:
    """What a rank wrote; None if it is missing or damaged."""
    try:
        return read_json(path)
    except DamagedError:
        return None


def _path(folder: RunFolder, rank: int) -> Path:
    return folder.logs / f"rank-{rank}.failure.json"
