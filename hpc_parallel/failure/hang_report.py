"""Hang reports of the ranks of a run that makes no progress (failure/hang_cause.py compares them).

A rank writes `logs/rank-<r>.hang.json` and its stacks (`.stacks`). The end of a batch script reads them,
so this module does not import torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_parallel.failure import failure
from hpc_parallel.failure.flight_recorder import Collective, DeviceProgress, Entered
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json, write_text
from hpc_parallel.record.typed import build

if TYPE_CHECKING:
    from hpc_parallel.machine.world import World

# The phases that a watchdog reports, in the order of a step. The lowest (step, phase) is furthest behind.
PHASES = ("start", "data", "step", "log", "validate", "save", "done")
PLACES = {
    "data": "loading the data of step", "log": "the metrics of step",
    "validate": "the validation after step", "save": "the checkpoint of step",
}  # fmt: skip
READER = "read ahead"  # the name of the thread that reads the next batch (training/read_ahead.py)
LOOKS = 10  # checks of a watchdog within the time-out
PROBE_S = 4.0  # time-out of a connection to rank 0's host
# The innermost frame, or its line of code, of a send or receive, which torch does not record for gloo.
_FOR_RANKS = re.compile(r"/torch/distributed/|\.wait\(\)")
_NAME = re.compile(r"rank-(\d{1,7})\.hang\.json")
_MOST_RANKS = 10**6  # a report that names more is not ours
_SLACK_S = 5.0  # for a probe, and for a file that another host sees late


@dataclass(frozen=True)
class HangReport:
    """What one rank was doing when the run hung.

    `phase` and `step` are None if the rank's supervisor wrote the report, because the rank was stopped or
    could not run Python.
    """

    rank: int
    host: str
    world_size: int
    attempt: str
    phase: str | None
    step: int | None
    idle_s: float  # since its last progress mark, without time in which it was suspended
    where: str  # file:line in function: the innermost frame outside torch
    stack: list[str] = field(default_factory=list)
    collective: Collective | None = None
    device: DeviceProgress | None = None  # of a GPU with NCCL
    entered: list[Entered] = field(default_factory=list)
    stopped: bool = False  # by SIGSTOP or a similar signal
    unreachable: str | None = None  # the address of rank 0, if a connection to it failed
    is_script: bool = False  # the rank runs a user's script, which has no phases

    @property
    def position(self) -> tuple[int, int, bool]:
        """Smaller is further behind. Within a phase, a rank that waits for no other makes the others wait."""
        if self.phase is None or self.step is None:
            return (-1, -1, False)
        in_collective = self.collective is not None and not self.collective.complete
        waits = in_collective or any(map(_FOR_RANKS.search, self.stack[-2:]))
        return (self.step, PHASES.index(self.phase), waits)

    @property
    def place(self) -> str:
        """The phase, step and code line as text."""
        if self.phase is None:
            return f"at {self.where}"
        ends = {"start": "the start", "done": "the work after step"}
        phase = ends.get(self.phase) or PLACES.get(self.phase, "step")
        return f"in {phase}{'' if self.phase == 'start' else f' {self.step}'} at {self.where}"


def grace_s(timeout_s: float) -> float:
    """How long a rank waits after its report, until all others have checked and a connection has failed."""
    return 2 * timeout_s / LOOKS + _SLACK_S


def write_report(folder: RunFolder, report: HangReport) -> None:
    write_json(_path(folder, report.rank), asdict(report))


def forget(folder: RunFolder, *, world: World) -> None:
    """Remove an earlier attempt's report before this attempt starts. Some launchers do not name attempts."""
    _path(folder, world.rank).unlink(missing_ok=True)
    stacks(folder, world.rank).unlink(missing_ok=True)
    if world.rank == 0:
        (folder.rendezvous / f"{world.attempt}.hang").unlink(missing_ok=True)


def read_reports(folder: RunFolder, *, attempt: str) -> list[HangReport]:
    """The reports of this attempt, by rank. Reads every file, so only the end of a run calls it."""
    contents = [failure.readable(path) for path in folder.logs.glob("rank-*.hang.json")]
    reports = [report_of(values) for values in contents if values and values.get("attempt") == attempt]
    return sorted((report for report in reports if report is not None), key=lambda report: report.rank)


def has_report(folder: RunFolder, *, rank: int, attempt: str) -> bool:
    values = failure.readable(_path(folder, rank))
    return values is not None and values.get("attempt") == attempt


def other_reports(folder: RunFolder, *, world: World) -> int:
    """The number of other ranks with a report, counted by file names. Each rank removes its old report."""
    ranks = {int(match[1]) for name in os.listdir(folder.logs) if (match := _NAME.fullmatch(name))}
    return len([rank for rank in ranks if rank < world.world_size and rank != world.rank])


def raise_alarm(folder: RunFolder, *, attempt: str) -> None:
    """Ask every rank to report: a rank that is only slow would not reach the time-out itself."""
    write_text(folder.rendezvous / f"{attempt}.hang", "")


def alarm(folder: RunFolder, *, attempt: str) -> bool:
    """Whether the alarm was raised."""
    # List the folder: an NFS client may cache for a minute that a single file does not exist.
    return f"{attempt}.hang" in os.listdir(folder.rendezvous)


def stacks(folder: RunFolder, rank: int) -> Path:
    """The file with a rank's Python stacks."""
    return folder.logs / f"rank-{rank}.stacks"


def report_of(values: Mapping[str, Any]) -> HangReport | None:
    """The report in a file, whose values may be anything; None if it is not a report of ours."""
    report = build(HangReport, values)
    if report is None or not 0 <= report.rank < report.world_size <= _MOST_RANKS:
        return None
    is_odd = report.phase is None and values.get("phase") is not None
    return None if is_odd or (report.phase in PHASES) != (report.step is not None) else report


def _path(folder: RunFolder, rank: int) -> Path:
    return folder.logs / f"rank-{rank}.hang.json"
