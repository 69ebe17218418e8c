"""After a job has ended badly: one cause out of all records, in `failure.json` and one line.

Run as `python -m hpc_parallel.worker.conclude RUN_FOLDER RETURNCODE [--log FILE]` at the end of a
batch script, so it starts fast: neither torch nor Hydra is imported.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Container, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from hpc_parallel.config.layout import processes_per_node
from hpc_parallel.launch.metrics_file import MetricsReader
from hpc_parallel.launch.run_folder import RunFolder, read_json, write_json
from hpc_parallel.worker import failure
from hpc_parallel.worker.failure import Record
from hpc_parallel.worker.standing import cause_of
from hpc_parallel.worker.summary import steps_lost, summarise

_ASKED = ("SIGTERM", "SIGINT")  # how Slurm and people ask a job to end
# A peer may notice a death this much before the record of the death itself is made.
_NOTICE_NS = 100_000_000
_LOG_LINES = 40
_ATTEMPT = "hpc_parallel attempt "  # what a batch script says first (sbatch_templates/environment.sh.j2)
_SRUN_ENDS = {
    "Killed": "SIGKILL", "Out Of Memory": "SIGKILL", "Segmentation fault": "SIGSEGV", "Aborted": "SIGABRT",
    "Bus error": "SIGBUS", "Illegal instruction": "SIGILL",
}  # fmt: skip
_SRUN_KILLED = re.compile(rf"^srun: error: (\S+): tasks? ([\d,-]+): ({'|'.join(_SRUN_ENDS)})", re.MULTILINE)
_TIME_LIMIT = re.compile(r"DUE TO TIME LIMIT|^Slurm says of job \d+: timeout", re.MULTILINE)


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
    summary = read_json(folder.summary)
    if summary is not None and summary["outcome"] in ("completed", "preempted"):
        return None
    found = failure.records(folder)
    found += killed_tasks(folder, text=text, known={record.rank for record in found})
    if returncode == 0 and not found and not cancelled:
        return None
    cause = first_cause(found)
    if cause is not None and cause.kind in (failure.HANG, failure.LOST_PEER, failure.STOPPED):
        cause = cause_of(folder, found) or cause
    ended: dict[str, Any] | None = None
    if cancelled is None and _TIME_LIMIT.search("\n".join(text.splitlines()[-_LOG_LINES:])):
        cancelled, ended = False, _out_of_time(folder)
    elif cancelled is None:
        cancelled = cause.signal in _ASKED if cause else _signal_of_code(returncode) in _ASKED
    if cancelled:
        by = f" by {cause.signal}, first rank {cause.rank} on {cause.host}" if cause and cause.signal else ""
        line = f"cancelled{by}"
    else:
        if ended is None and cause is not None:
            ended = _failed(cause, followers=[other for other in found if other.rank != cause.rank])
        elif ended is None:
            ended = _without_record(folder, returncode=returncode, text=text)
        write_json(folder.failure, ended)  # before the summary, which says that all is told
        line = str(ended["line"])
    if summary is None:
        outcome = "cancelled" if cancelled else "failed"
        write_json(folder.summary, _summary(folder, outcome=outcome, environment=environment))
    return line


def killed_tasks(folder: RunFolder, *, text: str, known: Container[int]) -> list[Record]:
    """Ranks that were killed together with their supervisor, by srun's own lines in the job's log.

    What srun says after it has begun to end the step itself is no cause. Lines of earlier attempts stand
    in the log too: only those since the last start count.
    """
    since = text[max(0, text.rfind(_ATTEMPT)) :].partition("Terminating StepId")[0]
    killed: list[Record] = []
    for host, tasks, end in _SRUN_KILLED.findall(since):
        config = yaml.safe_load(folder.config.read_text(encoding="utf-8"))
        strategy = SimpleNamespace(**config["strategy"])
        per_node = processes_per_node(strategy, gpus_per_node=config["gpus_per_node"])
        for rank in _numbers(tasks):
            if rank not in known:
                # first in time: its peers noticed it and spoke, which it could not
                record = Record(
                    rank=rank, host=host, node=rank // per_node, attempt="", kind=failure.KILLED,
                    message=f"killed by {_SRUN_ENDS[end]}", signal=_SRUN_ENDS[end],
                    time=datetime.now(UTC).isoformat(timespec="microseconds"), time_ns=0, traceback=[],
                )  # fmt: skip
                killed.append(record)
    return killed


def _numbers(text: str) -> list[int]:
    """`0,2-3` of srun -> 0 2 3."""
    spans = [item.partition("-") for item in text.split(",")]
    return [n for first, _, last in spans for n in range(int(first), int(last or first) + 1)]


def first_cause(found: Sequence[Record]) -> Record | None:
    """The first in time of those that failed by themselves.

    Hosts' clocks differ a little, so a rank that lost a peer never comes before one that failed by
    itself. Nor does one that was asked to end: what asked it may have been the clean-up.
    """
    own = [record for record in found if record.kind not in _FOLLOWERS and record.signal not in _ASKED]
    others = [record for record in found if record.kind != failure.STOPPED]
    return min(own or others or found, key=_noticed_ns, default=None)


_FOLLOWERS = (failure.LOST_PEER, failure.STOPPED)


def _noticed_ns(record: Record) -> int:
    return record.time_ns + (_NOTICE_NS if record.kind == failure.LOST_PEER else 0)


def _failed(cause: Record, *, followers: Sequence[Record]) -> dict[str, Any]:
    """The content of `failure.json`."""
    line = f"rank {cause.rank} on {cause.host} failed first: {cause.message}"
    if followers:
        line += f"; {len(followers)} follower{'s' * (len(followers) > 1)}"
    return {
        "rank": cause.rank,
        "host": cause.host,
        "node": cause.node,
        "kind": cause.kind,
        "message": cause.message,
        "signal": cause.signal,
        "time": cause.time,
        "traceback": cause.traceback,
        "followers": [{"rank": other.rank, "host": other.host, "kind": other.kind} for other in followers],
        "line": line,
    }


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
    minutes = yaml.safe_load(folder.config.read_text(encoding="utf-8"))["launcher"]["time_minutes"]
    message = f"the time limit of {minutes} min was reached after step {step}"
    return _nobody(
        kind=failure.TIME_LIMIT,
        message=message,
        line=f"{message}: raise launcher.time_minutes, or train less",
    )


def _nobody(
    *, kind: str, message: str, line: str, signal: str | None = None, traceback: Sequence[str] = ()
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
        "followers": [],
        "line": line,
    }


def _summary(folder: RunFolder, *, outcome: str, environment: Mapping[str, str]) -> dict[str, Any]:
    config = yaml.safe_load(folder.config.read_text(encoding="utf-8"))
    lines = MetricsReader(folder.metrics).read()
    return summarise(
        config,
        outcome=outcome,
        lines=lines,
        lost_steps=steps_lost(folder),
        started=None,
        environment=environment,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hpc_parallel.worker.conclude", description=__doc__)
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("returncode", type=int, help="of the job: srun's or the agent's")
    parser.add_argument("--log", type=Path, help="its end is told where no rank left a record")
    parser.add_argument("--cancelled", action="store_true", default=None, help="someone asked it to end")
    given = parser.parse_args()
    text = given.log.read_text(errors="replace") if given.log and given.log.exists() else ""
    line = conclude(
        RunFolder(given.run_folder), returncode=given.returncode, text=text, cancelled=given.cancelled
    )
    if line:
        print(line, file=sys.stderr)


if __name__ == "__main__":
    main()
