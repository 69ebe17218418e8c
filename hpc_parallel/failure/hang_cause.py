"""Finds the rank that is behind in a run that makes no progress, from the hang reports of all ranks.

A rank that is behind makes the others wait. With GPUs, the host code of all ranks may wait in the same call.
So NCCL's flight recorder comes first: it shows which host has not queued the collective in which the others
wait, and which GPU has not begun it. If the evidence contradicts itself, no rank is blamed.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, takewhile

from hpc_parallel.failure import failure, normal_end
from hpc_parallel.failure.desync import compare, name_ranks
from hpc_parallel.failure.failure import Record
from hpc_parallel.failure.flight_recorder import Collective, Entered
from hpc_parallel.failure.hang_report import HangReport, read_reports
from hpc_parallel.failure.stacks import NATIVE
from hpc_parallel.record.run_folder import RunFolder

# C code that waits for other ranks, or for the GPU of its own rank.
_FOR_RANKS = re.compile(r"c10d::|gloo::|/libnccl")
_FOR_GPU = re.compile(r"/lib(cuda|cudart|amdhip64|hsa-runtime64)[.-]|\b(cuda|cu|hip)\w+Synchronize\b")
Verdict = tuple[HangReport | None, str]  # the report of the rank to blame, None for nobody, and the reason


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
    if blamed is None:
        return replace(first, rank=failure.NOBODY, kind=failure.HANG, message=message, signal=None)
    record = next((record for record in records if record.rank == blamed.rank), first)
    return replace(
        record, rank=blamed.rank, host=blamed.host, kind=failure.HANG, message=message, signal=None,
        traceback=blamed.stack or record.traceback,
    )  # fmt: skip


def _blame(
    reports: Sequence[HangReport], *, unresponsive: Sequence[int], records: Sequence[Record]
) -> Verdict:
    """The report of the rank to blame and the reason; certain evidence is checked first."""
    ahead = max(reports, key=lambda report: (report.position, not report.stopped))
    for report in reports:
        if report.stopped:
            return report, _beside(f"stopped by a signal (state T) {report.place}", ahead)
    disconnected = [report for report in reports if report.unreachable]
    if disconnected:
        return _lost_link(reports, disconnected=disconnected)
    for report in reports:
        if report.phase is None and not report.is_script:
            return report, _beside(f"hangs {report.place}, where its Python can't run", ahead)
    if unresponsive:
        rank = unresponsive[0]
        hosts = {record.rank: record.host for record in records}
        lost = replace(ahead, rank=rank, host=hosts.get(rank, "a host that is silent"), stack=[])
        return lost, _beside(f"gave no sign for {ahead.idle_s:.0f} s: its host may be cut off", ahead)
    if verdict := _nccl_behind(reports):
        return verdict
    if any(report.is_script for report in reports):
        return _script_behind(reports)
    if verdict := _in_another_collective(reports):
        return verdict
    behind = min(reports, key=_order(reports))
    if _order(reports)(behind) == _order(reports)(ahead) and behind.world_size > 1:
        if device := _device_with_fewer(reports):
            return device
        is_one = len({report.place for report in reports}) == 1
        stand = f"all stand {ahead.place}" if is_one else f"they stand apart: {_places(reports)}"
        summary = f"no rank is behind and rank 0 answers, but {stand}"
        return None, f"{summary} for {behind.idle_s:.0f} s{_last(ahead)}"
    return behind, _beside(f"hangs {behind.place} for {behind.idle_s:.0f} s", ahead)


def _nccl_behind(reports: Sequence[HangReport]) -> Verdict | None:
    """The rank that the GPUs of others wait for, while its own GPU waits in no collective.

    Hosts only queue collectives, so where a host stands says less: it may need a result first, or the queue
    of its GPU may be full. Returns None if NCCL does not know.
    """
    with_device = [(report, report.device) for report in reports if report.device is not None]
    waiting = {report.rank: device.waits_in for report, device in with_device if device.waits_in}
    behind = []
    for report, device in with_device:
        missed = [
            collective
            for collective in waiting.values()
            if not collective.is_p2p
            and device.queued.get(collective.group, collective.sequence) < collective.sequence
        ]
        if waiting and device.waits_in is None and (device.next or missed):
            behind.append((report, device.next, missed))
    if not behind:
        return _unanswered(reports, waiting=waiting) if waiting and reports[0].is_script else None
    report, unbegun, missed = min(behind, key=lambda item: _waits(item[0]))  # one may wait for another
    others = _waiting_in(missed[0] if missed else next(iter(waiting.values())), waiting)
    if unbegun:
        others += f"; the host stands {report.place}"
        message = _lasting(f"its GPU hangs before {unbegun}", report, others)
    else:
        message = _lasting(f"hangs {report.place}", report, f"{others}, which it has not queued")
    return _unless_contradicted(report, message, reports=reports, behind=[item[0] for item in behind])


def _in_another_collective(reports: Sequence[HangReport]) -> Verdict | None:
    """The rank that waits in another collective than its peers, if each rank waits in one.

    A rank that left one out is ahead of those that wait for it, so the order of their places would blame one
    of these. Returns None if all wait in the same one.
    """
    if not all(report.collective and not report.collective.complete for report in reports):
        return None
    by_rank = {report.rank: report for report in reports}
    world_size = reports[0].world_size
    absent = set(range(world_size)) - set(by_rank)  # their collectives are not known
    finding = compare(_comparable(reports), world_size=world_size, silent=absent)
    if finding is None or not by_rank.keys() >= set(finding.ranks):
        return None
    if not finding.ranks:
        return None, _lasting(finding.message, reports[0], _places(reports))
    blamed, other = by_rank[finding.ranks[0]], by_rank[finding.waiting[0]]
    return blamed, _lasting(f"{finding.message}, {blamed.place}", blamed, f"others wait {other.place}")


def _comparable(reports: Sequence[HangReport]) -> dict[int, list[Entered]]:
    """Rank -> its groups in which a rank waits, with its collectives.

    NCCL's hosts queue ahead: only those count that all have queued, and none of a group if the record of a
    host begins after these.
    """
    awaited = {report.collective.group.partition(" ")[0] for report in reports if report.collective}
    numbers: dict[str, list[range]] = defaultdict(list)
    for group in chain.from_iterable(report.entered for report in reports):
        if group.calls:
            numbers[group.group].append(range(group.calls[0].number, group.calls[-1].number + 1))

    def comparable(group: Entered) -> Entered:
        if not group.group.endswith(" nccl"):
            return group
        first, last = (
            max(one.start for one in numbers[group.group]),
            min(one[-1] for one in numbers[group.group]),
        )
        return replace(group, calls=[call for call in group.calls if call.number <= last and first <= last])

    return {
        report.rank: [
            comparable(group)
            for group in report.entered
            if group.calls and group.group.partition(" ")[0] in awaited
        ]
        for report in reports
    }


def _unanswered(reports: Sequence[HangReport], *, waiting: Mapping[int, Collective]) -> Verdict | None:
    """The only rank of a script that may be behind if NCCL in some ranks gave no answer in time.

    Blames nobody if the GPUs of all ranks wait, or if the stacks do not tell which rank is behind.
    """
    others = ", ".join(_waiting_in(awaited, waiting) for awaited in dict.fromkeys(waiting.values()))
    suspects = [report for report in reports if report.rank not in waiting]
    if not suspects:
        return None, _lasting("the GPUs of all ranks wait", reports[0], others)
    silent = [report for report in suspects if report.device is None]
    free = [report for report in suspects if not _waits(report)]
    for remaining in (suspects, free):
        if len(remaining) == 1 and silent:
            return remaining[0], _lasting(f"hangs {remaining[0].place}", remaining[0], others)
    if not silent or free:
        return None
    names = name_ranks([report.rank for report in silent])
    return None, _lasting(f"NCCL in {names} gave no answer", reports[0], others)


def _waiting_in(awaited: Collective, waiting: Mapping[int, Collective]) -> str:
    ranks = [rank for rank, collective in waiting.items() if collective == awaited]
    return f"the GPU of {name_ranks(ranks)} waits in {awaited}"


def _unless_contradicted(
    report: HangReport, message: str, *, reports: Sequence[HangReport], behind: Sequence[HangReport]
) -> Verdict:
    """NCCL's verdict, or both if C code shows that this rank waits for others and another for nothing."""
    free = [other for other in reports if other not in behind and _native(other) and not _waits(other)]
    if not (free and _FOR_RANKS.search(_native(report))):
        return report, message
    stacks = f"rank {report.rank} waits for others in C code, and rank {free[0].rank} stands {free[0].place}"
    return None, f"NCCL and the stacks contradict each other: rank {report.rank} {message}; but {stacks}"


def _script_behind(reports: Sequence[HangReport]) -> Verdict:
    """The rank of a script that is outside torch while other ranks wait for each other inside torch.

    If several ranks are outside torch, or none, the rank at the rarest place is blamed, if there is one. A
    rank whose GPU waits is not blamed, and a host that waits for its GPU may stand anywhere.
    """
    suspects = [report for report in reports if not (report.device and report.device.waits_in)] or reports
    ranks_at = Counter(report.where for report in reports)

    def evidence(report: HangReport) -> tuple[bool, int]:
        return _waits(report), ranks_at[report.where]

    behind = min(suspects, key=evidence)
    others = [report for report in reports if report.where != behind.where]
    if behind.world_size == 1:
        return behind, f"hangs {behind.place}; it has not written anything for {behind.idle_s:.0f} s"
    if not others:
        return None, _lasting("no rank is behind", behind, f"all stand {behind.place}")
    waits_for_gpu = _waits(behind) and any(_FOR_GPU.search(_native(report)) for report in reports)
    if waits_for_gpu or any(evidence(r) == evidence(behind) for r in suspects if r.where != behind.where):
        return None, _lasting("nothing tells which rank is behind", behind, _places(reports))
    place = Counter(report.place for report in others).most_common(1)[0][0]
    return behind, _lasting(f"hangs {behind.place}", behind, f"others wait {place}")


def _places(reports: Sequence[HangReport]) -> str:
    """Each place with the first rank that stands there."""
    places = {report.place: report.rank for report in reversed(reports)}
    return ", ".join(f"rank {rank} {place}" for place, rank in reversed(places.items()))


def _waits(report: HangReport) -> bool:
    """Whether the main thread waits for other ranks or for its GPU, or stands in torch.

    A data loader that waits for data stands in torch too, but it does not count.
    """
    native = _native(report)
    if _FOR_RANKS.search(native) or _FOR_GPU.search(native):
        return True
    python = [line for line in report.stack if not line.startswith(NATIVE)]
    innermost = python[-1] if python else ""
    return "/torch/" in innermost and "/torch/utils/data/" not in innermost


def _native(report: HangReport) -> str:
    """The frames of C code that the innermost Python code has called; empty if they are not known."""
    frames = list(takewhile(lambda line: line.startswith(NATIVE), reversed(report.stack)))
    return "\n".join(frames)


def _lasting(what: str, report: HangReport, rest: str) -> str:
    """A message with the time. A script does not report its progress, so its time is that of all ranks."""
    seconds = f"for {report.idle_s:.0f} s"
    if report.is_script:
        return f"{what}; {rest}; no rank has written anything {seconds}"
    return f"{what} {seconds}; {rest}"


def _device_with_fewer(reports: Sequence[HangReport]) -> tuple[HangReport, str] | None:
    """The rank whose GPU has completed fewer collectives of a group than another GPU.

    This is weaker evidence than `_nccl_behind`, but it needs no events at the start of collectives.
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


def _beside(message: str, ahead: HangReport) -> str:
    """Add where the other ranks wait, if there are any."""
    return message if ahead.world_size == 1 else f"{message}; others wait {ahead.place}{_last(ahead)}"


def _last(report: HangReport) -> str:
    collective = report.collective
    return "" if collective is None or collective.complete else f" ({collective})"
