"""Whom to name: one cause out of the records of all ranks and of what Slurm says in the job's log."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from hpc_parallel.config.layout import processes_per_node
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.supervise import failure, flight_recorder
from hpc_parallel.supervise.desync import compare
from hpc_parallel.supervise.failure import Record

ASKED = ("SIGTERM", "SIGINT")  # how Slurm and people ask a job to end
# A peer may notice a death this much before the record of the death itself is made.
_NOTICE_NS = 100_000_000
_ATTEMPT = "hpc_parallel attempt "  # what a batch script says first (sbatch_templates/environment.sh.j2)
_SRUN_ENDS = {
    "Killed": "SIGKILL", "Out Of Memory": "SIGKILL", "Segmentation fault": "SIGSEGV", "Aborted": "SIGABRT",
    "Bus error": "SIGBUS", "Illegal instruction": "SIGILL",
}  # fmt: skip
_SRUN_KILLED = re.compile(rf"^srun: error: (\S+): tasks? ([\d,-]+): ({'|'.join(_SRUN_ENDS)})", re.MULTILINE)
_NODE_LOST = re.compile(
    r"node failure on (?P<host>[\w.-]+)|due to node (?P<other>[\w.-]+ )?failure"
    r"|^slurm says of job [\d_]+: node_fail",
    re.IGNORECASE | re.MULTILINE,
)
_FOLLOWERS = (failure.LOST_PEER, failure.STOPPED, failure.COLLECTIVE_TIMEOUT)


def this_attempt(text: str) -> str:
    """Lines of earlier attempts stand in the job's log too: only those since the last start count."""
    return text[max(0, text.rfind(_ATTEMPT)) :]


def killed_tasks(folder: RunFolder, *, text: str, known: Container[int]) -> list[Record]:
    """Ranks that were killed together with their supervisor, by srun's own lines in the job's log.

    What srun says after it has begun to end the step itself is no cause.
    """
    since = this_attempt(text).partition("Terminating StepId")[0]
    killed: list[Record] = []
    for host, tasks, end in _SRUN_KILLED.findall(since):
        per_node = _ranks_per_node(folder)
        for rank in _numbers(tasks):
            if rank not in known:
                by_memory = end == "Out Of Memory"
                # first in time: its peers noticed it and spoke, which it could not
                record = Record(
                    rank=rank, host=host, node=rank // per_node, attempt="",
                    kind=failure.OUT_OF_MEMORY if by_memory else failure.KILLED,
                    message="out of the job's memory: ended by Slurm (raise launcher.memory_gb)"
                    if by_memory else f"killed by {_SRUN_ENDS[end]}",
                    signal=_SRUN_ENDS[end], time=datetime.now(UTC).isoformat(timespec="microseconds"),
                    time_ns=0, traceback=[],
                )  # fmt: skip
                killed.append(record)
    return killed


def lost_node(text: str, *, cause: Record | None) -> str | None:
    """The line for a host that Slurm lost, unless a rank failed by its own doing before; None where none was.

    Ranks that a lost host takes along say that a peer is gone, or are ended by srun.
    """
    found = _NODE_LOST.search(this_attempt(text))
    own = cause is not None and cause.kind not in (*_FOLLOWERS, failure.KILLED)
    if found is None or own:
        return None
    host = (found["host"] or found["other"] or "").strip()
    return f"node {host} was lost" if host else "a node was lost"


def first_cause(found: Sequence[Record]) -> Record | None:
    """The first in time of those that failed by themselves.

    Hosts' clocks differ a little, so a rank that lost a peer never comes before one that failed by
    itself. Nor does one that was asked to end: what asked it may have been the clean-up.
    """
    own = [record for record in found if record.kind not in _FOLLOWERS and record.signal not in ASKED]
    others = [record for record in found if record.kind != failure.STOPPED]
    return min(own or others or found, key=_noticed_ns, default=None)


def missing_rank(folder: RunFolder, *, cause: Record, found: Sequence[Record]) -> Record:
    """Who is to blame for a collective that did not come about; `cause` itself where it was none, or nobody.

    Those who waited have failed, the one they waited for may not: where it left no record, what is known
    of it is made one.
    """
    if cause.kind not in (failure.COLLECTIVE_TIMEOUT, failure.DESYNC):
        return cause
    standings = {
        record.rank: calls
        for record in found
        if (
            calls := record.collectives
            or flight_recorder.read_dump(flight_recorder.dump_of(folder, rank=record.rank))
        )
    }
    config = _config(folder)
    per_node = _ranks_per_node(folder)
    finding = compare(standings, world_size=config["nodes"] * per_node)
    if finding is None:
        return cause
    rank = finding.ranks[0]
    known = next((record for record in found if record.rank == rank), None)
    steps = [
        record.details["step"]
        for record in found
        if record.rank in finding.waiting and "step" in record.details
    ]
    step = f" at step {max(steps)}" if steps else ""
    details = finding.details | ({"step": max(steps)} if steps else {})
    if known is None:
        hosts = {record.node: record.host for record in found}
        node = rank // per_node
        known = replace(
            cause, rank=rank, node=node, host=hosts.get(node, f"node {node}"), signal=None, traceback=[]
        )
    return replace(known, kind=cause.kind, message=finding.message + step, details=known.details | details)


def _noticed_ns(record: Record) -> int:
    return record.time_ns + (_NOTICE_NS if record.kind in _FOLLOWERS else 0)


def _numbers(text: str) -> list[int]:
    """`0,2-3` of srun -> 0 2 3."""
    spans = [item.partition("-") for item in text.split(",")]
    return [n for first, _, last in spans for n in range(int(first), int(last or first) + 1)]


def _config(folder: RunFolder) -> Mapping[str, Any]:
    found: Mapping[str, Any] = folder.read_config()
    return found


def _ranks_per_node(folder: RunFolder) -> int:
    config = _config(folder)
    strategy = SimpleNamespace(**config["strategy"])
    return processes_per_node(strategy, gpus_per_node=config["gpus_per_node"])
