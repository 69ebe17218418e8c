"""The failure record that a rank writes: `logs/rank-<r>.failure.json`."""

from __future__ import annotations

import contextlib
import errno
import re
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import dropwhile, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_parallel.failure import flight_recorder, normal_end, oom
from hpc_parallel.failure.error_place import place_of, step_of
from hpc_parallel.failure.flight_recorder import Entered
from hpc_parallel.failure.stacks import place_of_crash, stack_at_sigterm
from hpc_parallel.machine.xids import describe
from hpc_parallel.problems import ConfigError
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import DamagedError, read_json, read_tail
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.record.typed import build
from hpc_parallel.user_code import described, hint

if TYPE_CHECKING:
    from hpc_parallel.machine.world import World

KILLED = "killed"  # by a signal that our clean-up did not send
LOST_PEER = "lost_peer"  # another rank ended or did not answer: always a follower
STOPPED = "stopped"  # ended by our clean-up after another rank's failure, or because all ranks agreed to
COLLECTIVE_TIMEOUT = "collective_timeout"  # also a follower: the rank that did not enter is the cause
DESYNC = "desync"  # ranks entered different collectives
NONFINITE = "nonfinite"  # loss or gradients; training.on_nonfinite
REPLICAS = "replicas"  # weights of replicas differ; training.compare_replicas
DISK = "disk"  # full, broken, read-only, over its quota or a limit of file sizes
NODE_LOST = "node_lost"
CONFIGURATION = "configuration"  # a problem that only the job could detect
TIME_LIMIT = "time_limit"  # of Slurm
START = "start"  # the ranks could not connect to each other
OUT_OF_MEMORY = "out_of_memory"
HANG = "hang"  # no progress for cluster.hang_timeout_s (failure/hang_cause.py finds the rank to blame)
PREFLIGHT = "preflight"  # a host that is not healthy or differs from the others, found at the start
FABRIC = "fabric"  # data between nodes takes a path that fabric.require=true does not allow
ERROR = "error"  # in the user's code or ours
NOBODY = -1  # the rank of a cause for which no rank is to blame

# Messages of gloo, NCCL and torch's store when the other side of a connection is gone or silent.
_LOST_PEER = re.compile(
    r"connection (was likely )?closed|closed by (remote )?peer|connection reset|connection refused"
    r"|connection timed out|broken pipe|socket closed|socket timeout|no route to host"
    r"|failed to recv, got 0 bytes|gloo connectfullmesh failed|remote process exited|ncclremoteerror",
    re.IGNORECASE,
)
# gloo says "application timeout" in the other collectives of the rank whose time-out has passed.
_TIMEOUT = re.compile(
    r"timed out waiting \d+ ?ms|application timeout caused pair closure"
    r"|watchdog caught collective operation timeout",
    re.IGNORECASE,
)
# gloo received a message of an unexpected size; torch compared the collectives (TORCH_DISTRIBUTED_DEBUG).
_DESYNC = re.compile(r"op\.preamble\.length|detected mismatch between collectives", re.IGNORECASE)
# What C++ and the C library write before they abort; Python's faulthandler writes the next line.
_ABORT = re.compile(
    r"\s*what\(\):\s*(.+)|(terminate called without .+|.{1,500}: Assertion .{1,500} failed\."
    r"|(?:free|malloc|realloc|munmap_chunk)\(\).+|double free .+|corrupted (?:size|double).+"
    r"|\*\*\* .+ smashing detected.+)"
)
_ABORTED = re.compile("Fatal Python error: Aborted")
# The line of an exception, after the lines of its traceback: its class, and its message.
_RAISED = re.compile(
    r"^Traceback \(most recent call last\):\n(?:[ \t].*\n)*(([\w.]+)(?:: (.*))?)", re.MULTILINE
)
_ABORT_LINES = 30  # of a message
_CRASHES = {"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV"}  # faulthandler writes the stack of these
_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)
_DISK = {errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EFBIG}
_NO_SPACE = re.compile(
    r"no space left on device|disk quota exceeded|read-only file system|input/output error"
    r"|errno 27\] file too large",
    re.IGNORECASE,
)
_MESSAGE_CHARACTERS = 400
_LOG_END_BYTES = 64 * 1024
_KILL_WAIT_S = 35.0  # Slurm's default KillWait is 30 s
_BY_NAME = {
    "StartError": START, "ForgedError": START, "ConfigError": CONFIGURATION,
    "DifferenceError": CONFIGURATION, "UserCodeError": ERROR, "NonFiniteError": NONFINITE,
    "ReplicaError": REPLICAS, "StuckSaveError": HANG, "PreflightError": PREFLIGHT,
    "FabricError": FABRIC, "FollowerError": STOPPED, "MemoryError": OUT_OF_MEMORY,
    "OutOfMemoryError": OUT_OF_MEMORY,
}  # fmt: skip
WITHOUT_CODE = frozenset({PREFLIGHT, FABRIC, STOPPED})  # no code is to blame, so the message is enough


@dataclass(frozen=True)
class Record:
    """How one rank ended: rank, host, kind, and time by the clock of its host."""

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
    details: dict[str, Any] = field(default_factory=dict)  # depends on the kind: asked_bytes, step, ...
    collectives: list[Entered] = field(default_factory=list)


def record_exception(
    folder: RunFolder,
    *,
    world: World,
    error: BaseException,
    collectives: Sequence[Entered] = (),
    xids: Sequence[int] = (),
) -> None:
    """Record why this rank failed and which collectives it had entered, unless it already has a record.

    xids: errors that the driver reported for this rank's GPU.
    """
    kind, source = kind_and_source(error)
    no_code = kind in WITHOUT_CODE | {NONFINITE, REPLICAS}
    where = None if no_code else place_of(error)
    details: dict[str, Any] = {"where": where} if where else {}
    if kind == OUT_OF_MEMORY:
        message, details = oom.describe(source, where=where)
    else:
        text = " ".join(str(source).split())[:_MESSAGE_CHARACTERS]
        # The text of these exceptions needs no class name before it.
        is_ours = no_code or isinstance(source, ConfigError)
        message = text if is_ours and text else described(source)
        message += "" if is_ours else hint(text)
        details |= getattr(source, "details", {})
    if (step := step_of(error)) is not None:
        details.setdefault("step", step)
    if xids:
        details["xids"] = list(xids)
        message += f"; its GPU reported {', '.join(map(describe, dict.fromkeys(xids)))}"
    _write(
        folder,
        world=world,
        kind=kind,
        message=message,
        lines="".join(traceback.format_exception(error)).splitlines(),
        details=details,
        collectives=list(collectives),
    )


def record_death(
    folder: RunFolder,
    *,
    world: World,
    returncode: int,
    log_start: int = 0,
    stopped: bool = False,
    cgroup: str | None = None,
) -> None:
    """Record how a rank ended if it could not record this itself. An existing record is kept.

    returncode: as in subprocess, negative for a signal; log_start: the size of the error log when the rank
    started; stopped: our clean-up sent the signal; cgroup: the cgroup in which the kernel has killed a
    process because memory ran out.
    """
    log = _log_end(folder, rank=world.rank, start=log_start)
    name = signal_name(-returncode) if returncode < 0 else None
    if name is None:
        kind, message = ERROR, f"ended with exit code {returncode} and wrote no reason"
        if returncode == 1 and (raised := _RAISED.findall(log)):  # no file could be opened for a record
            line, error, text = raised[-1]
            kind = kind_of_text(error.rpartition(".")[2], text)
            message = f"ended with exit code 1; the last exception of its log: {line[:_MESSAGE_CHARACTERS]}"
    elif stopped:
        kind, message = STOPPED, f"ended by {name} after another rank's failure"
    elif name == "SIGABRT" and (reason := _reason_of_abort(log)):
        kind, message = reason
    elif name == "SIGKILL" and cgroup is not None:
        kind, message = OUT_OF_MEMORY, f"killed by SIGKILL: out of memory in cgroup {cgroup}"
    else:
        kind, message = KILLED, f"killed by {name}"
    lines: list[str] = []
    if kind in (KILLED, DESYNC) and name in _CRASHES:
        where, lines = place_of_crash(log)
        message += where
    elif name in ("SIGTERM", "SIGKILL") and _is_fresh(folder.log(world.rank, "err")):
        lines = stack_at_sigterm(log)
    _write(folder, world=world, kind=kind, message=message + hint(message), signal_name=name, lines=lines)


def record_reason(
    folder: RunFolder,
    *,
    world: World,
    kind: str,
    message: str,
    lines: list[str],
    details: dict[str, Any] | None = None,
) -> None:
    """Record a failure that another process has described in a text."""
    message = message[:_MESSAGE_CHARACTERS] + hint(message)
    _write(folder, world=world, kind=kind, message=message, lines=lines, details=details)


def kind_of_text(name: str, message: str) -> str:
    """The kind of an exception of another process, by the name of its class and its message."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    is_of_torch = name == "RuntimeError" or name.startswith("Dist")  # DistBackendError, DistNetworkError
    if is_of_torch:
        return _kind_of_one(RuntimeError(message))
    return DISK if name == "OSError" and _NO_SPACE.search(message) else ERROR


def record_hang(folder: RunFolder, *, world: World, message: str, stack: list[str]) -> None:
    """Record that this rank has made no progress, whether it is the cause or not."""
    _write(folder, world=world, kind=HANG, message=message, lines=stack)


def forget(folder: RunFolder, *, rank: int) -> None:
    """Remove a rank's record of an earlier attempt before this attempt starts."""
    _path(folder, rank).unlink(missing_ok=True)
    normal_end.forget(folder, rank=rank)
    remove_partial_files(folder, rank=rank)
    flight_recorder.dump_of(folder, rank=rank).unlink(missing_ok=True)


def forget_all(folder: RunFolder) -> None:
    """Remove the records of all ranks: an earlier attempt may have had more ranks."""
    for record in folder.logs.glob("rank-*.failure.json"):
        record.unlink(missing_ok=True)
    normal_end.forget(folder)


def forget_job(folder: RunFolder, job_id: str) -> None:
    """Remove the records of the ranks of a job, whose run goes on as another one."""
    for record in _read(folder):
        if record.attempt.startswith(f"slurm-{job_id}-"):
            _path(folder, record.rank).unlink(missing_ok=True)


def remove_partial_files(folder: RunFolder, *, rank: int | None = None) -> None:
    """Remove the temporary files of a rank that ended while it wrote them.

    rank: None for all ranks, after they have ended.
    """
    for partial in folder.logs.glob(f".rank-{'*' if rank is None else rank}.*"):
        partial.unlink(missing_ok=True)


def records(folder: RunFolder) -> list[Record]:
    """The records of the newest attempt, in order of time."""
    ordered = sorted(_read(folder), key=lambda record: record.time_ns)
    return [record for record in ordered if record.attempt == ordered[-1].attempt]


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def kind_and_source(error: BaseException) -> tuple[str, BaseException]:
    """The kind of a failure, and the exception that shows it: `error` or one of its causes.

    The first exception of another kind than ERROR counts; without one, `error` itself. Pipeline stages wrap
    the exceptions of blocks.
    """
    link: BaseException | None = error
    while link is not None:
        if (kind := _kind_of_one(link)) != ERROR:
            return kind, link
        link = link.__cause__
    return ERROR, error


def _kind_of_one(error: BaseException) -> str:
    names = [parent.__name__ for parent in type(error).__mro__]  # by name, so that torch is not imported
    for name in names:
        if name in _BY_NAME:
            return _BY_NAME[name]
    if isinstance(error, OSError):  # may come from the user's socket; torch's collectives raise RuntimeError
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


def _reason_of_abort(log: str) -> tuple[str, str] | None:
    """The kind and the line of a rank's log that says why NCCL's watchdog, gloo or C++ ended the process.

    The line of a time-out comes first, because it says what the rank waited for. A remote error follows the
    end of another rank. gloo ends a rank that receives more than it expects. None without such a line.
    """
    lines = log.splitlines()[::-1]
    of_nccl = [line for line in lines if "nccl" in line.lower()]
    for pattern, kind, candidates in (
        (_TIMEOUT, COLLECTIVE_TIMEOUT, lines),
        (_LOST_PEER, LOST_PEER, of_nccl),
    ):
        for line in candidates:
            if pattern.search(line):
                return kind, line.strip()[:_MESSAGE_CHARACTERS]
    before = islice(dropwhile(lambda line: not _ABORTED.match(line), lines), 1, _ABORT_LINES)
    if why := next(filter(None, map(_ABORT.fullmatch, before)), None):
        text = str(why[1] or why[2])[:_MESSAGE_CHARACTERS]
        if _DESYNC.search(text):
            return DESYNC, text
        return OUT_OF_MEMORY if text == "std::bad_alloc" else KILLED, f"killed by SIGABRT: {text}"
    return None


def _is_fresh(log: Path) -> bool:
    """Whether the rank has written since SIGTERM, which comes a short time before SIGKILL."""
    with contextlib.suppress(OSError):
        return time.time() - log.stat().st_mtime < _KILL_WAIT_S
    return False


def _log_end(folder: RunFolder, *, rank: int, start: int) -> str:
    """The end of what the rank's log of errors got after its byte `start`; empty if it can't be read."""
    with contextlib.suppress(OSError, DamagedError):
        log = folder.log(rank, "err")
        return read_tail(log, limit_bytes=_LOG_END_BYTES, start=start).decode(errors="replace")
    return ""


def _write(
    folder: RunFolder,
    *,
    world: World,
    kind: str,
    message: str,
    signal_name: str | None = None,
    lines: list[str] | None = None,
    details: dict[str, Any] | None = None,
    collectives: list[Entered] | None = None,
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
    # A full disk may be the failure itself: a second exception must not hide the first.
    with contextlib.suppress(OSError):
        earlier = readable(path)
        if earlier is None or earlier.get("attempt") != record.attempt:
            write_json(path, asdict(record))


def _read(folder: RunFolder) -> Iterator[Record]:
    for path in folder.logs.glob("rank-*.failure.json"):
        if (record := build(Record, readable(path))) is not None:
            yield record


def readable(path: Path) -> dict[str, Any] | None:
    """The content of a rank's JSON file; None if it is missing or damaged."""
    try:
        return read_json(path)
    except DamagedError:
        return None


def _path(folder: RunFolder, rank: int) -> Path:
    return folder.logs / f"rank-{rank}.failure.json"
