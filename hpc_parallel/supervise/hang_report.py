"""Hang reports of the ranks of a run that makes no progress, and which rank is behind.

A rank writes `logs/rank-<r>.hang.json` and its stacks (`.stacks`). The end of a batch script reads them,
so this module does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json, write_text
from hpc_parallel.supervise import failure
from hpc_parallel.supervise.failure import Record
from hpc_parallel.supervise.progress import PHASES

if TYPE_CHECKING:
    from hpc_parallel.supervise.world import World

LOOKS = 10  # checks of a watchdog within the time-out
PROBE_S = 4.0  # time-out of a connection to rank 0's host
_SLACK_S = 5.0  # for a probe, and for a file that is visible late on another host's file system


@dataclass(frozen=True)
class Collective:
    """The last collective that a rank began, from torch's flight recorder."""

    name: str
    group: str
    sequence: int  # number in its group
    complete: bool

    def __str__(self) -> str:
        return f"{self.name} {self.sequence} of {self.group}"


@dataclass(frozen=True)
class HangReport:
    """What one rank was doing when the run hung.

    `phase` and `step` are None if its supervisor wrote the report, because the process was stopped or
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
    stack: list[str]
    collective: Collective | None = None
    stopped: bool = False  # by SIGSTOP or a similar signal
    unreachable: str | None = None  # the address of rank 0, if a connection to it failed

    @property
    def position(self) -> tuple[int, int, bool]:
        """Smaller is further behind. Within a phase, a rank outside a collective makes the others wait."""
        if self.phase is None or self.step is None:
            return (-1, -1, False)
        in_collective = self.collective is not None and not self.collective.complete
        return (self.step, PHASES.index(self.phase), in_collective)

    @property
    def place(self) -> str:
        """The phase, step and code line as text."""
        if self.phase is None:
            return f"at {self.where}"
        names = {"data": "loading the data of step", "log": "the metrics of step",
                 "validate": "the validation after step", "save": "the checkpoint of step"}  # fmt: skip
        phase = f"the {self.phase}" if self.phase in ("start", "done") else names.get(self.phase, "step")
        return f"in {phase}{'' if self.phase == 'start' else f' {self.step}'} at {self.where}"


def grace_s(timeout_s: float) -> float:
    """How long a rank waits after its report, until all others have checked and a connection has failed."""
    return 2 * timeout_s / LOOKS + _SLACK_S


def write_report(folder: RunFolder, report: HangReport) -> None:
    """Write a rank's report to the run folder."""
    write_json(_path(folder, report.rank), asdict(report))


def forget(folder: RunFolder, *, world: World) -> None:
    """Remove an earlier attempt's report before this attempt starts: not every launcher names attempts."""
    _path(folder, world.rank).unlink(missing_ok=True)
    stacks(folder, world.rank).unlink(missing_ok=True)
    if world.rank == 0:
        (folder.rendezvous / f"{world.attempt}.hang").unlink(missing_ok=True)


def read_reports(folder: RunFolder, *, attempt: str) -> list[HangReport]:
    """The reports of this attempt, by rank."""
    contents = [failure.readable(path) for path in folder.logs.glob("rank-*.hang.json")]
    reports = [_from_json(values) for values in contents if values and values.get("attempt") == attempt]
    return sorted(reports, key=lambda report: report.rank)


def all_reported(folder: RunFolder, *, world: World) -> bool:
    """Whether every rank has written its report."""
    return len(read_reports(folder, attempt=world.attempt)) == world.world_size


def raise_alarm(folder: RunFolder, *, attempt: str) -> None:
    """Ask every rank to report: a rank that is only slow would not reach the time-out itself."""
    write_text(folder.rendezvous / f"{attempt}.hang", "")


def alarm(folder: RunFolder, *, attempt: str) -> bool:
    """Whether the alarm was raised."""
    # Listed, not looked up: an NFS client may cache for a minute that the file does not exist.
    return f"{attempt}.hang" in os.listdir(folder.rendezvous)


def stacks(folder: RunFolder, rank: int) -> Path:
    """The file with a rank's Python stacks."""
    return folder.logs / f"rank-{rank}.stacks"


def format_frame(file: str, line: int | None, name: str) -> str:
    """Format a frame as `folder/file.py:12 in name`."""
    return f"{'/'.join(Path(file).parts[-2:])}:{line} in {name}"


def cause_of(folder: RunFolder, records: Sequence[Record]) -> Record | None:
    """The record of the rank that caused a hang, with what it did; None if no rank reported a hang.

    records: of the newest attempt. A rank that failed with an error did not hang.
    """
    if not any(record.kind == failure.HANG for record in records):
        return None
    reports = read_reports(folder, attempt=records[0].attempt)
    if not reports:
        return None
    responsive = {report.rank for report in reports} | {
        record.rank for record in records if record.kind == failure.LOST_PEER
    }
    unresponsive = [rank for rank in range(reports[0].world_size) if rank not in responsive]
    blamed, message = _blame(reports, unresponsive=unresponsive, records=records)
    first = min(records, key=lambda record: record.time_ns)
    record = next((record for record in records if record.rank == blamed.rank), first)
    return replace(
        record, rank=blamed.rank, host=blamed.host, kind=failure.HANG, message=message, signal=None,
        traceback=blamed.stack or record.traceback,
    )  # fmt: skip


def _blame(
    reports: Sequence[HangReport], *, unresponsive: Sequence[int], records: Sequence[Record]
) -> tuple[HangReport, str]:
    """The report of the rank to blame and the reason; certain evidence is checked first."""
    ahead = max(reports, key=lambda report: report.position)
    for report in reports:
        if report.stopped:
            return report, f"stopped by a signal (state T) {report.place}; {_others(ahead)}"
    disconnected = [report for report in reports if report.unreachable]
    if disconnected:
        return _lost_link(reports, disconnected=disconnected)
    for report in reports:
        if report.phase is None:
            return report, f"hangs {report.place}, where its Python can't run; {_others(ahead)}"
    if unresponsive:
        rank = unresponsive[0]
        hosts = {record.rank: record.host for record in records}
        lost = replace(ahead, rank=rank, host=hosts.get(rank, "a host that is silent"), stack=[])
        return lost, f"gave no sign for {ahead.idle_s:.0f} s: its host may be cut off; {_others(ahead)}"
    behind = min(reports, key=_order(reports))
    if _order(reports)(behind) == _order(reports)(ahead):
        summary = f"no rank is behind and rank 0 answers, but all stand {ahead.place}"
        return behind, f"{summary} for {behind.idle_s:.0f} s{_last(ahead)}"
    return behind, f"hangs {behind.place} for {behind.idle_s:.0f} s; {_others(ahead)}"


def _order(reports: Sequence[HangReport]) -> Callable[[HangReport], tuple[int, int, bool, int]]:
    """Sort by position, then by the number of the last collective if all ranks are in one group."""
    groups = {report.collective.group if report.collective else None for report in reports}

    def key(report: HangReport) -> tuple[int, int, bool, int]:
        sequence = report.collective.sequence if len(groups) == 1 and report.collective else 0
        return (*report.position, sequence)

    return key


def _lost_link(
    reports: Sequence[HangReport], *, disconnected: Sequence[HangReport]
) -> tuple[HangReport, str]:
    """Blame rank 0's host if no other host reaches it, else the first host that can't reach it."""
    home = reports[0].host
    others = {report.host for report in reports} - {home}
    hosts = sorted({report.host for report in disconnected})
    blamed = reports[0] if len(others) > 1 and others == set(hosts) else disconnected[0]
    address = disconnected[0].unreachable
    return blamed, (
        f"lost link: {', '.join(hosts)} can't reach rank 0 on {home} ({address}) any more; "
        f"it stands {blamed.place}{_last(blamed)}"
    )


def _others(ahead: HangReport) -> str:
    return f"others wait {ahead.place}{_last(ahead)}"


def _last(report: HangReport) -> str:
    collective = report.collective
    return "" if collective is None or collective.complete else f" ({collective})"


def _from_json(values: dict[str, object]) -> HangReport:
    collective = values.pop("collective")
    report = HangReport(**values)  # type: ignore[arg-type]
    return replace(report, collective=Collective(**collective)) if isinstance(collective, dict) else report


def _path(folder: RunFolder, rank: int) -> Path:
    return folder.logs / f"rank-{rank}.hang.json"
