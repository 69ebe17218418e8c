"""After a job has ended badly: one cause out of all records, in `failure.json` and one line.

A batch script ends with `python -m hpc_parallel.job conclude RUN_FOLDER RETURNCODE [--log FILE]`. It must
start fast: neither torch nor Hydra is imported.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hpc_parallel.record import attempts
from hpc_parallel.record.metrics_file import MetricsReader
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import DamagedError, read_json, read_tail
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.supervise import failure, restart
from hpc_parallel.supervise.failure import Record
from hpc_parallel.supervise.hang_report import cause_of
from hpc_parallel.supervise.root_cause import (
    ASKED,
    first_cause,
    killed_tasks,
    lost_node,
    missing_rank,
    this_attempt,
)
from hpc_parallel.supervise.summary import summarise

_LOG_LINES = 40
_TIME_LIMIT = re.compile(r"DUE TO TIME LIMIT|^Slurm says of job [\d_]+: timeout", re.MULTILINE)


def conclude(
    folder: RunFolder,
    *,
    returncode: int,
    text: str = "",
    cancelled: bool | None = None,
    environment: Mapping[str, str] = os.environ,
) -> str | None:
    """Name the cause, write `failure.json` and, where rank 0 left none, `summary.json`.

    `returncode` and `text` (the end of the job's log) speak where no rank left a record.
    `cancelled`: whether someone asked the run to end; None: the signals of the records tell.
    `environment`: Slurm's variables of the job. Returns the one line, or None where nothing failed.
    """
    failure.sweep(folder)
    summary = read_json(folder.summary)
    if summary is not None and summary.get("outcome") in ("completed", "preempted"):
        return None
    if (stopped := read_json(folder.stopped)) is not None:
        return _stopped(folder, stopped=stopped, environment=environment)
    found = failure.records(folder)
    found += killed_tasks(folder, text=text, known={record.rank for record in found})
    if returncode == 0 and not found and not cancelled:
        return None
    cause = first_cause(found)
    if cause is not None and cause.kind in (failure.HANG, failure.LOST_PEER, failure.STOPPED):
        cause = cause_of(folder, found) or cause
    ended: dict[str, Any] | None = None
    if cancelled is None and _TIME_LIMIT.search("\n".join(this_attempt(text).splitlines()[-_LOG_LINES:])):
        cancelled, ended = False, _out_of_time(folder)
    elif cancelled is None and (lost := lost_node(text, cause=cause)):
        ended = _nobody(kind=failure.NODE_LOST, message=lost, line=_count(lost, found), followers=found)
        cancelled = False
    elif cancelled is None:
        cancelled = cause.signal in ASKED if cause else _signal_of_code(returncode) in ASKED
    if cancelled:
        by = f" by {cause.signal}, first rank {cause.rank} on {cause.host}" if cause and cause.signal else ""
        line = f"cancelled{by}"
    else:
        if ended is None and cause is not None:
            named = missing_rank(folder, cause=cause, found=found)
            ended = _failed(named, followers=[record for record in found if record.rank != named.rank])
        elif ended is None:
            ended = _without_record(folder, returncode=returncode, text=text)
        write_json(folder.failure, ended)  # before the summary, which says that all is told
        line = str(ended["line"])
    if summary is None:
        outcome = "cancelled" if cancelled else "failed"
        attempts.end(
            folder, how=str(ended["kind"]) if ended else outcome, host=ended["host"] if ended else None
        )
        write_json(folder.summary, _summary(folder, outcome=outcome, environment=environment))
    return line


def may_restart(folder: RunFolder) -> bool:
    """Whether the failure that was concluded may be followed by another start."""
    ended = read_json(folder.failure)
    if ended is None or (folder.stopped.exists()):
        return False
    config = folder.read_config()
    mendable = failure.can_restart(ended, on_nonfinite=config["training"]["on_nonfinite"])
    return restart.allowed(folder, how=ended["kind"], mendable=mendable, launcher=config["launcher"])


def _stopped(folder: RunFolder, *, stopped: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """The end of a run whose ranks heeded a signal and saved their state; where it may, it starts again."""
    how = restart.why_stopped(stopped["signal"], environment=environment)
    attempts.end(folder, how=how)
    launcher = folder.read_config()["launcher"]
    goes_on = restart.allowed(folder, how=how, mendable=False, launcher=launcher)
    said = {
        restart.TIME_LIMIT: f"the time limit of {launcher['time_minutes']} min was near",
        restart.PREEMPTED: "preempted by Slurm",
        restart.CANCELLED: f"cancelled by {stopped['signal']}",
    }
    line = f"{said[how]}: saved at step {stopped['step']}"
    if how == restart.TIME_LIMIT and not goes_on:
        line += f"; launcher.max_requeues={launcher['max_requeues']} are used up"
        write_json(folder.failure, _nobody(kind=failure.TIME_LIMIT, message=line, line=line))
    if not goes_on:
        line += f"; go on with resume={folder.path}"
    outcome = "preempted" if goes_on else "cancelled" if how == restart.CANCELLED else "failed"
    write_json(folder.summary, _summary(folder, outcome=outcome, environment=environment))
    write_json(folder.stopped, {**stopped, "how": how, "line": line})
    if goes_on:  # last: Slurm may end this process at once
        line += f"; {restart.start_again(folder, launcher=launcher, environment=environment)}"
    return line


def _failed(cause: Record, *, followers: Sequence[Record]) -> dict[str, Any]:
    """The content of `failure.json`."""
    line = _count(f"rank {cause.rank} on {cause.host} failed first: {cause.message}", followers)
    return {
        "rank": cause.rank,
        "host": cause.host,
        "node": cause.node,
        "kind": cause.kind,
        "message": cause.message,
        "signal": cause.signal,
        "time": cause.time,
        "traceback": cause.traceback,
        "details": cause.details,
        "followers": _told(followers),
        "line": line,
    }


def _count(line: str, followers: Sequence[Record]) -> str:
    return line + (f"; {len(followers)} follower{'s' * (len(followers) > 1)}" if followers else "")


def _told(followers: Sequence[Record]) -> list[dict[str, Any]]:
    return [{"rank": other.rank, "host": other.host, "kind": other.kind} for other in followers]


def _without_record(folder: RunFolder, *, returncode: int, text: str) -> dict[str, Any]:
    """A job that died before any rank could speak: a failing set-up line, a lost node."""
    when = "and no rank said why" if any(folder.logs.glob("rank-*.out")) else "before any rank started"
    lines = [line for line in text.splitlines() if line.strip()][-_LOG_LINES:]
    name = _signal_of_code(returncode)
    how = f"killed by {name}" if name else f"exit code {returncode}"
    last = lines[-1].strip() if lines else ""
    message = last if "exit code" in last else f"{how}: {last}" if last else how
    return _nobody(
        kind=failure.KILLED if name else failure.START,
        message=message,
        line=f"the job failed {when}: {message}",
        signal=name,
        traceback=lines,
    )


def _signal_of_code(returncode: int) -> str | None:
    """The signal's name, from a code of subprocess (negative) or of a shell (128 and more)."""
    if returncode < 0:
        return failure.signal_name(-returncode)
    return failure.signal_name(returncode - 128) if 128 < returncode < 128 + 65 else None


def _out_of_time(folder: RunFolder) -> dict[str, Any]:
    """Slurm ended the job at its time limit: its signals look like a cancellation, and it is none."""
    lines = MetricsReader(folder.metrics).read()
    step = lines[-1]["step"] if lines else 0
    minutes = folder.read_config()["launcher"]["time_minutes"]
    message = f"the time limit of {minutes} min was reached after step {step}"
    return _nobody(
        kind=failure.TIME_LIMIT,
        message=message,
        line=f"{message}: raise launcher.time_minutes, or train less",
    )


def _nobody(
    *,
    kind: str,
    message: str,
    line: str,
    signal: str | None = None,
    traceback: Sequence[str] = (),
    followers: Sequence[Record] = (),
) -> dict[str, Any]:
    """A `failure.json` that blames no rank."""
    return {
        "rank": None,
        "host": None,
        "node": None,
        "kind": kind,
        "message": message,
        "signal": signal,
        "time": datetime.now(UTC).isoformat(timespec="microseconds"),
        "traceback": list(traceback),
        "details": {},
        "followers": _told(followers),
        "line": line,
    }


def _summary(folder: RunFolder, *, outcome: str, environment: Mapping[str, str]) -> dict[str, Any]:
    config = folder.read_config()
    lines = MetricsReader(folder.metrics).read()
    return summarise(
        config,
        outcome=outcome,
        lines=lines,
        history=attempts.history(folder, environment=environment),
    )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m hpc_parallel.job conclude", description=__doc__)
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("returncode", type=int, help="of the job: srun's or the agent's")
    parser.add_argument("--log", type=Path, help="its end is told where no rank left a record")
    parser.add_argument("--again", action="store_true", help="of a Slurm job: start it again where it may")
    parser.add_argument("--cancelled", action="store_true", default=None, help="someone asked it to end")
    given = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # a job that is requeued is ended, and this is its last word
    environment = os.environ if given.again else {}  # a local run may lie inside a job that is not its own
    folder = RunFolder(given.run_folder)
    text = ""
    if given.log:
        with suppress(FileNotFoundError, DamagedError):
            text = read_tail(given.log).decode(errors="replace")
    line = conclude(
        folder, returncode=given.returncode, text=text, cancelled=given.cancelled, environment=environment
    )
    if line:
        print(line, file=sys.stderr, flush=True)
    if "SLURM_JOB_ID" in environment and may_restart(folder):
        launcher = folder.read_config()["launcher"]
        print(restart.start_again(folder, launcher=launcher, environment=os.environ), file=sys.stderr)
