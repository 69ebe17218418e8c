"""Finds the rank that is behind in a run that makes no progress, from the hang reports of all ranks.

A rank that is behind makes the others wait. With GPUs, the host code of all ranks may wait in the same call.
Then NCCL's flight recorder shows which GPU has not begun the collective in which the others wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.supervise import failure, normal_end
from hpc_parallel.supervise.desync import name_ranks
from hpc_parallel.supervise.failure import Record
from hpc_parallel.supervise.hang_report import HangReport, read_reports


def cause_of(folder: RunFolder, records: Sequence[Record]) -> Record | None:
    """The record of the rank that caused a hang, with what it did; None if no rank reported a hang.

    records: those of the newest attempt. A rank that failed with an error did not hang.
    """
    if not any(record.kind == failure.HANG for record in records):
        return None
    reports = read_reports(folder, attempt=records[0].attempt)
    if not reports:
        return None
    ended = normal_end.ended_ranks(folder, attempt=records[0].attempt)
    responsive = (
        {report.rank for report in reports}
        | {end.rank for end in ended}
        | {record.rank for record in records if record.kind == failure.LOST_PEER}
    )
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
    ahead = max(reports, key=lambda report: (report.position, not report.stopped))
    for report in reports:
        if report.stopped:
            return report, f"stopped by a signal (state T) {report.place}; {_others(ahead)}"
    disconnected = [report for report in reports if report.unreachable]
    if disconnected:
        return _lost_link(reports, disconnected=disconnected)
    for report in reports:
        if report.phase is None and not report.is_script:
            return report, f"hangs {report.place}, where its Python can't run; {_others(ahead)}"
    if unresponsive:
        rank = unresponsive[0]
        hosts = {record.rank: record.host for record in records}
        lost = replace(ahead, rank=rank, host=hosts.get(rank, "a host that is silent"), stack=[])
        return lost, f"gave no sign for {ahead.idle_s:.0f} s: its host may be cut off; {_others(ahead)}"
    if any(report.is_script for report in reports):
        return _script_behind(reports)
    if device := _device_behind(reports):
        return device
    behind = min(reports, key=_order(reports))
    if _order(reports)(behind) == _order(reports)(ahead):
        if device := _device_with_fewer(reports):
            return device
        summary = f"no rank is behind and rank 0 answers, but all stand {ahead.place}"
        return behind, f"{summary} for {behind.idle_s:.0f} s{_last(ahead)}"
    return behind, f"hangs {behind.place} for {behind.idle_s:.0f} s; {_others(ahead)}"


def _script_behind(reports: Sequence[HangReport]) -> tuple[HangReport, str]:
    """The rank of a script that is outside torch while other ranks wait for each other inside torch.

    If several ranks are outside torch, or none, the rank at the rarest place is blamed.
    """
    ranks_at = Counter(report.where for report in reports)
    behind = min(reports, key=lambda report: (_waits_in_torch(report), ranks_at[report.where], report.rank))
    others = [report for report in reports if report.where != behind.where]
    idle = f"no rank has written anything for {behind.idle_s:.0f} s"
    if not others:
        return behind, f"no rank is behind, but all stand {behind.place}: {idle}"
    place = Counter(report.place for report in others).most_common(1)[0][0]
    return behind, f"hangs {behind.place}; others wait {place}; {idle}"


def _waits_in_torch(report: HangReport) -> bool:
    """Whether the innermost frame is in torch, but not in a data loader that waits for data."""
    innermost = report.stack[-1] if report.stack else ""
    return "/torch/" in innermost and "/torch/utils/data/" not in innermost


def _device_behind(reports: Sequence[HangReport]) -> tuple[HangReport, str] | None:
    """The rank whose GPU has not begun its next collective although it waits for no other GPU.

    Hosts only queue collectives, so they say less: a host stands wherever it first needs a result, or where
    the queue of its GPU is full.
    """
    devices = [(report, report.device) for report in reports if report.device is not None]
    waiting = {report.rank: device.waits_in for report, device in devices if device.waits_in is not None}
    for report, device in devices:
        if waiting and device.next is not None and device.waits_in is None:
            others = f"the GPU of {name_ranks(list(waiting))} waits in {next(iter(waiting.values()))}"
            message = f"its GPU hangs before {device.next} for {report.idle_s:.0f} s; {others}"
            return report, f"{message}; the host stands {report.place}"
    return None


def _device_with_fewer(reports: Sequence[HangReport]) -> tuple[HangReport, str] | None:
    """The rank whose GPU has completed fewer collectives of a group than another GPU.

    This is weaker evidence than `_device_behind`, but it needs no events at the start of collectives.
    """
    most: dict[str, int] = {}
    for report in reports:
        for group, number in (report.device.completed if report.device else {}).items():
            most[group] = max(number, most.get(group, number))
    for report in reports:
        for group, number in (report.device.completed if report.device else {}).items():
            if number < most[group]:
                message = f"its GPU has completed {number} collectives of {group}, another GPU {most[group]}"
                return report, f"{message}; all hosts stand {report.place} for {report.idle_s:.0f} s"
    return None


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
