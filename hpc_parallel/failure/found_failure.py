"""What `failure.json` says: the rank or host that failed first, a time limit, or why the job failed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from hpc_parallel.config.script import is_script
from hpc_parallel.failure import failure
from hpc_parallel.failure.failure import Record
from hpc_parallel.failure.root_cause import (
    TERMINATION_SIGNALS,
    lost_host,
    missing_rank,
    start_lines,
    this_attempt,
    with_early_ends,
)
from hpc_parallel.record.endings import Failure, Follower
from hpc_parallel.record.owner import Owner
from hpc_parallel.record.recorded import read_run
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.typed import read_if_possible
from hpc_parallel.slurm.allocation import in_allocation
from hpc_parallel.user_code import hint

_LOG_LINES = 40
_TIME_LIMIT = re.compile(r"DUE TO TIME LIMIT|^Slurm says of job [\d_]+: timeout", re.MULTILINE)
# Of the job, not of a step: srun ends its step after a failure. Slurm 25.05 begins with the time, and names
# the signal.
_SCANCEL = re.compile(
    r"^(?:slurmstepd\S*:|\[[^\]\n]*\]) error: \*\*\* JOB \S+ ON \S+ CANCELLED AT \S+ "
    r"(?:DUE TO PREEMPTION |DUE to SIGNAL [^*\n]+ )?\*\*\*",
    re.MULTILINE,
)


def slurm_failure(
    folder: RunFolder, cause: Record | None, *, records: Sequence[Record], text: str
) -> Failure | None:
    """The content of `failure.json` if Slurm reports a time limit or a lost node."""
    if hit_time_limit(text):
        return _out_of_time(folder)
    if (lost := lost_host(text, cause=cause)) is None:
        return None
    return replace(
        without_rank(
            kind=failure.NODE_LOST, message=lost.message, line=_with_count(lost.message, records),
            followers=records,
        ),
        host=lost.host,
        details={"exclude": [lost.host]} if lost.is_there else {},
    )  # fmt: skip


def rank_failure(
    folder: RunFolder, cause: Record | None, *, records: Sequence[Record], returncode: int, text: str
) -> Failure:
    """The content of `failure.json` if a rank, or the job itself, failed."""
    if cause is None:
        return _without_record(folder, returncode=returncode, text=text)
    cause = with_early_ends(folder, cause=missing_rank(folder, cause=cause, records=records))
    if cause.rank == failure.NOBODY:
        line = f"the run hangs: {cause.message}" if cause.kind == failure.HANG else cause.message
        return without_rank(kind=cause.kind, message=cause.message, line=line, followers=records)
    return _failed(cause, followers=[record for record in records if record.rank != cause.rank])


def _failed(cause: Record, *, followers: Sequence[Record]) -> Failure:
    return Failure(
        rank=cause.rank,
        host=cause.host,
        node=cause.node,
        kind=cause.kind,
        message=cause.message,
        signal=cause.signal,
        time=cause.time,
        traceback=tuple(cause.traceback),
        details=cause.details,
        followers=_brief(followers),
        line=_with_count(f"rank {cause.rank} on {cause.host} failed first: {cause.message}", followers),
    )


def _with_count(line: str, followers: Sequence[Record]) -> str:
    return line + (f"; {len(followers)} follower{'s' * (len(followers) > 1)}" if followers else "")


def _brief(followers: Sequence[Record]) -> tuple[Follower, ...]:
    return tuple(Follower(record.rank, record.host, record.kind) for record in followers)


def _without_record(folder: RunFolder, *, returncode: int, text: str) -> Failure:
    """The content of `failure.json` if no rank wrote a record: a set-up line failed, for example."""
    when = "and no rank said why" if any(folder.logs.glob("rank-*.out")) else "before any rank started"
    lines = start_lines(text)[-_LOG_LINES:]
    name = signal_of_code(returncode)
    how = f"killed by {name}" if name else f"exit code {returncode}"
    how = f"the process that starts the ranks was {how}" if returncode < 0 else how
    how += "" if returncode else ", but rank 0 did not complete"
    last = lines[-1].strip() if lines else ""
    message = (last if "exit code" in last else f"{how}: {last}" if last else how) + hint(last)
    return without_rank(
        kind=failure.KILLED if name else failure.START,
        message=message,
        line=f"the job failed {when}: {message}",
        signal=name,
        traceback=lines,
    )


def _out_of_time(folder: RunFolder) -> Failure:
    """The content of `failure.json` for a job that Slurm ended at its time limit."""
    step = (read_run(folder.path).last_metrics or {"step": 0})["step"]
    config = folder.read_config()
    minutes = config["launcher"]["time_minutes"]
    message = f"the time limit of {minutes} min was reached after step {step}"
    advice = "raise launcher.time_minutes, or train less"
    if is_script(config):
        message = f"the time limit of {minutes} min was reached"
        advice = "raise launcher.time_minutes, or set script.stop_signal"
    if in_allocation(config["launcher"]):
        message, advice = "the allocation has reached its time limit", "start the run again in another one"
    elif is_packed(folder):
        message, advice = "the packed job has reached its time limit", "raise sweep.pack_minutes"
    return without_rank(kind=failure.TIME_LIMIT, message=message, line=f"{message}: {advice}")


def without_rank(
    *,
    kind: str,
    message: str,
    line: str,
    signal: str | None = None,
    traceback: Sequence[str] = (),
    followers: Sequence[Record] = (),
) -> Failure:
    """A `failure.json` that blames no rank."""
    return Failure(
        kind=kind,
        message=message,
        signal=signal,
        time=datetime.now(UTC).isoformat(timespec="microseconds"),
        traceback=tuple(traceback),
        followers=_brief(followers),
        line=line,
    )


def hit_time_limit(text: str) -> bool:
    return _TIME_LIMIT.search("\n".join(this_attempt(text).splitlines()[-_LOG_LINES:])) is not None


def looks_cancelled(cause: Record | None, *, returncode: int, text: str) -> bool:
    """Whether a termination signal that Slurm does not explain ended the first rank.

    Without a cause, the exit code of the job is checked. mpirun may end with another one, and its ranks lose
    each other, but Slurm says in the log that it ends the job.
    """
    if hit_time_limit(text) or lost_host(text, cause=cause):
        return False
    if (cause is None or cause.kind == failure.LOST_PEER) and _SCANCEL.search(this_attempt(text)):
        return True
    return (cause.signal if cause else signal_of_code(returncode)) in TERMINATION_SIGNALS


def signal_of_code(returncode: int) -> str | None:
    """The name of the signal in an exit code of subprocess (negative) or of a shell (above 128)."""
    if returncode < 0:
        return failure.signal_name(-returncode)
    return failure.signal_name(returncode - 128) if 128 < returncode < 128 + 65 else None


def is_packed(folder: RunFolder) -> bool:
    """Whether the job of the run has other runs too, so that it is not for this one to start it again."""
    holder = read_if_possible(Owner, folder.owner)
    return holder is not None and holder.is_packed
