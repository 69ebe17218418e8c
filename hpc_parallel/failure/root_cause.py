"""Find the root cause in the records of all ranks and in Slurm's messages in the job's log."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import NamedTuple

from hpc_parallel.config.script import is_script
from hpc_parallel.failure import failure, flight_recorder, normal_end
from hpc_parallel.failure.desync import compare
from hpc_parallel.failure.failure import Record
from hpc_parallel.failure.flight_recorder import Entered
from hpc_parallel.failure.stacks import spot_of
from hpc_parallel.layout.layout import processes_per_node, recorded_strategy
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.slurm.short_forms import expand_numbers

TERMINATION_SIGNALS = ("SIGTERM", "SIGINT")  # with which Slurm and users ask a job to end
# A peer may notice a death up to this time before the death itself is recorded.
_NOTICE_NS = 100_000_000
# The first line of a start, of a batch script (sbatch_templates/environment.sh.j2) and of a local run.
ATTEMPT = "hpc_parallel attempt "
_SRUN_ENDS = {
    "Killed": "SIGKILL", "Out Of Memory": "SIGKILL", "Segmentation fault": "SIGSEGV", "Aborted": "SIGABRT",
    "Bus error": "SIGBUS", "Illegal instruction": "SIGILL",
}  # fmt: skip
_SRUN_KILLED = re.compile(rf"^srun: error: (\S+): tasks? ([\d,-]+): ({'|'.join(_SRUN_ENDS)})", re.MULTILINE)
_MOST_KILLED = 2**16  # any program may write to the log; the first killed rank is the cause
_NODE_LOST = re.compile(
    r"node failure on (?P<host>[\w.-]+)|due to node (?P<other>[\w.-]+ )?failure"
    r"|^slurm says of job [\d_]+: node_fail"
    r"|^(?:ORTE|PRTE) has lost communication with a remote daemon"  # mpirun of Open MPI
    r"|^srun: error: Task launch for \S+ failed on node (?P<unfit>[\w.-]+): (?P<why>[^\n]*)",
    re.IGNORECASE | re.MULTILINE,
)
_FOLLOWERS = (failure.LOST_PEER, failure.STOPPED, failure.COLLECTIVE_TIMEOUT)


def this_attempt(text: str) -> str:
    """The part of the job's log since the last start: the log also holds earlier attempts."""
    return text[max(0, text.rfind(ATTEMPT)) :]


def start_lines(text: str) -> list[str]:
    """The lines of the job's log since the last start, without the first one and without empty lines."""
    lines = this_attempt(text).splitlines()
    return [line for line in lines if line.strip() and not line.startswith(ATTEMPT)]


def killed_tasks(folder: RunFolder, *, text: str, recorded: Container[int]) -> list[Record]:
    """Records for ranks that were killed together with their supervisor, from srun's lines in the log.

    Lines after "Terminating StepId" are ignored, because srun itself then ends the tasks.

    recorded: ranks that have a record.
    """
    before_termination = this_attempt(text).partition("Terminating StepId")[0]
    killed: list[Record] = []
    for host, tasks, end in _SRUN_KILLED.findall(before_termination):
        per_node = _ranks_per_node(folder)
        for rank in _ranks_in(tasks):
            if len(killed) == _MOST_KILLED:
                return killed
            if rank not in recorded:
                by_memory = end == "Out Of Memory"
                # time_ns=0: first in time, because its peers recorded its death only afterwards
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


class LostHost(NamedTuple):
    """A host that Slurm lost (None: unknown), or one that is there, but could not start its ranks."""

    message: str
    host: str | None
    is_there: bool = False


def lost_host(text: str, *, cause: Record | None) -> LostHost | None:
    """The host that Slurm's lines in the log name; None if there is none, or a rank failed by itself before.

    Other ranks then report a lost peer, or srun ends them.
    """
    match = _NODE_LOST.search(this_attempt(text))
    failed_by_itself = cause is not None and cause.kind not in (*_FOLLOWERS, failure.KILLED)
    if match is None or failed_by_itself:
        return None
    if match["unfit"]:
        return LostHost(
            f"node {match['unfit']} could not start its ranks: {match['why']}", match["unfit"], True
        )
    host = (match["host"] or match["other"] or "").strip() or None
    return LostHost(f"node {host} was lost" if host else "a node was lost", host)


def find_root_cause(records: Sequence[Record]) -> Record | None:
    """The first record in time of a rank that failed by itself.

    The clocks of hosts differ slightly, so a rank that lost a peer never precedes one that failed by
    itself. A rank that was asked to end does not precede it either: our clean-up may have asked it.
    """
    failed_by_itself = [
        record
        for record in records
        if record.kind not in _FOLLOWERS and record.signal not in TERMINATION_SIGNALS
    ]
    not_stopped = [record for record in records if record.kind != failure.STOPPED]
    return min(failed_by_itself or not_stopped or records, key=_noticed_ns, default=None)


def missing_rank(folder: RunFolder, *, cause: Record, records: Sequence[Record]) -> Record:
    """The rank to blame for a collective that did not complete, or `cause` if there is no such rank.

    NOBODY if ranks wait for each other and nothing says which of them is behind.

    The ranks that waited have failed. The rank that they waited for may have no record. In this case, a
    record is built from what is known about it.
    """
    if cause.kind not in (failure.COLLECTIVE_TIMEOUT, failure.DESYNC):
        return cause
    per_node = _ranks_per_node(folder)
    world_size = folder.read_config()["nodes"] * per_node
    entered = _entered_collectives(folder, records)
    silent = {record.rank for record in records if record.kind == failure.DESYNC} - set(entered)
    finding = compare(entered, world_size=world_size, silent=silent)
    if finding is None:
        return cause
    if not finding.ranks:
        return replace(cause, rank=failure.NOBODY, message=finding.message, signal=None)
    rank = finding.ranks[0]
    blamed = next((record for record in records if record.rank == rank), None)
    steps = [
        record.details["step"]
        for record in records
        if record.rank in finding.waiting and "step" in record.details
    ]
    step = f" at step {max(steps)}" if steps else ""
    details = finding.details | ({"step": max(steps)} if steps else {})
    if blamed is None:
        hosts = {record.node: record.host for record in records}
        node = rank // per_node
        blamed = replace(
            cause, rank=rank, node=node, host=hosts.get(node, f"node {node}"), signal=None, traceback=[]
        )
    place = f"; it stood at {spot_of(blamed.traceback)}" if blamed.signal and blamed.traceback else ""
    message = finding.message + step + place
    return replace(blamed, kind=cause.kind, message=message, details=blamed.details | details)


def with_early_ends(folder: RunFolder, *, cause: Record) -> Record:
    """Name the ranks that had ended normally, if other ranks then waited for a peer or lost one.

    The ranks of a script may have ended too early, but the lost peer may also be another rank, so they are
    not blamed. Those of our tasks end only after the summary is written, and this run has none.
    """
    if cause.kind not in (failure.LOST_PEER, failure.COLLECTIVE_TIMEOUT, failure.HANG):
        return cause
    ends = normal_end.ended_ranks(folder, attempt=cause.attempt)
    if not ends or is_script(folder.read_config()):
        return replace(cause, message=cause.message + normal_end.clause(ends))
    first = min(ends, key=lambda end: end.time)
    message = f"ended with exit code 0 while others waited for it: {cause.message}"
    node = first.rank // _ranks_per_node(folder)
    blamed = replace(cause, rank=first.rank, host=first.host, node=node, kind=failure.ERROR, message=message)
    return replace(blamed, traceback=[], details={}, signal=None)


def _entered_collectives(folder: RunFolder, records: Sequence[Record]) -> dict[int, list[Entered]]:
    """Rank -> the collectives in its record or else in its dump; ranks with neither are left out."""
    collectives = {}
    for record in records:
        dump = flight_recorder.dump_of(folder, rank=record.rank)
        if calls := record.collectives or flight_recorder.read_dump(dump):
            collectives[record.rank] = calls
    return collectives


def _noticed_ns(record: Record) -> int:
    return record.time_ns + (_NOTICE_NS if record.kind in _FOLLOWERS else 0)


def _ranks_in(text: str) -> list[int]:
    """The ranks of srun's task list; empty if `text` is not a list: the program may have printed the line."""
    try:
        return [int(number) for number in expand_numbers(text)]
    except ValueError:
        return []


def _ranks_per_node(folder: RunFolder) -> int:
    config = folder.read_config()
    strategy = recorded_strategy(config)
    return processes_per_node(strategy, gpus_per_node=config["gpus_per_node"])
