"""Find the rank that did not enter a collective, or entered another, from each rank's last collectives."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from hpc_parallel.failure.flight_recorder import BEFORE_STEPS, Call, Entered

Names = Mapping[int, str]  # the newest collectives of a group on one rank: number -> name


@dataclass(frozen=True)
class Desync:
    """The ranks to blame for a collective that did not complete."""

    group: str
    collective: str
    number: int  # sequence number in the group
    ranks: tuple[int, ...]  # to blame, as global ranks; empty if nothing says which
    waiting: tuple[int, ...]
    message: str  # what the first of `ranks` did; what each did if nothing says which of them is to blame

    @property
    def details(self) -> dict[str, Any]:
        return {"collective": self.collective, "number": self.number, "missing": list(self.ranks)}


def compare(
    collectives: Mapping[int, Sequence[Entered]], *, world_size: int, silent: Set[int] = frozenset()
) -> Desync | None:
    """Find the first disagreement; None if all ranks with a record are at the same collectives.

    A member of the group may have no record because its process was ended while it waited. So it counts as
    missing only if no rank with a record is behind.

    collectives: rank -> `flight_recorder.by_group`. silent: ranks without a record that had entered another
    collective than their peers, so they are not missing.
    """
    groups: dict[str, dict[int, Names]] = defaultdict(dict)
    members: dict[str, set[int]] = {}
    newest: dict[int, tuple[int, str]] = {}  # rank -> time and group of its last collective
    for rank, rank_groups in collectives.items():
        for group in rank_groups:
            if group.calls:
                groups[group.group][rank] = {call.number: call.name for call in group.calls}
                members.setdefault(group.group, set()).update(group.ranks or range(world_size))
                newest[rank] = max(newest.get(rank, (0, "")), (group.calls[-1].time_ns, group.group))
    findings: list[Desync] = []

    def waits_for_silent(finding: Desync) -> bool:
        """Whether the rank waits in another group for a silent one, which is then to blame."""
        _, group = newest.get(finding.ranks[0], (0, finding.group))
        return group != finding.group and not silent.isdisjoint(members[group])

    for name, calls in groups.items():
        absent = silent | _forgetful(name, collectives)
        missing = _missing(name, calls, members=members[name] - absent)
        findings += _mismatches(name, calls) or [one for one in missing if not waits_for_silent(one)]
    # A rank that waits in another group's collective is itself blocked: blame the last rank of the chain.
    # If two ranks wait for each other, blame the one that left its usual sequence of collectives.
    blocked = {rank for finding in findings for rank in finding.waiting}
    # Leave out the groups that agree: a group that is used rarely would break any usual sequence.
    disagreeing = {finding.group for finding in findings}

    def innocence(finding: Desync) -> tuple[bool, ...]:
        rank = finding.ranks[0]
        used = [group for group in collectives.get(rank, ()) if group.group in disagreeing]
        calls = _until(finding, used)
        # A new size breaks a sequence too (a message of figures has one more, for example). So if both ranks
        # left theirs, the names alone decide.
        breaks = breaks_sequence(calls), breaks_sequence(calls, by_size=False), _ends_a_phase_early(calls)
        return rank in blocked, *(not one for one in breaks)

    least = min(map(innocence, findings), default=None)
    suspects = [finding for finding in findings if innocence(finding) == least]
    if len({finding.ranks[0] for finding in suspects}) > 1 and suspects[0].ranks[0] in blocked:
        each = "; ".join(f"rank {finding.ranks[0]}: {finding.message}" for finding in suspects)
        message = f"ranks are in different collectives, and no earlier step shows which is right: {each}"
        return replace(suspects[0], ranks=(), message=message)
    return suspects[0] if suspects else None


def _forgetful(name: str, collectives: Mapping[int, Sequence[Entered]]) -> set[int]:
    """The ranks whose record begins after the last collective of a group: torch keeps the newest only."""
    calls = {
        rank: [(group.group, call.time_ns) for group in groups for call in group.calls]
        for rank, groups in collectives.items()
    }
    newest = max(time for rank_calls in calls.values() for group, time in rank_calls if group == name)
    return {rank for rank, own in calls.items() if own and all(time > newest for _, time in own)}


def _until(finding: Desync, groups: Sequence[Entered]) -> list[tuple[str, Call]]:
    """The collectives of a rank since its first step, in order, with their groups.

    The last one is that of the finding. If the rank did not enter this one, it is what it entered instead.
    """
    calls = [(group.group, call) for group in groups for call in group.calls if call.phase != BEFORE_STEPS]
    calls.sort(key=lambda item: item[1].time_ns)
    place = (finding.group, finding.number)
    end = next((at for at, (group, call) in enumerate(calls, 1) if (group, call.number) == place), None)
    return calls[:end]


def breaks_sequence(calls: Sequence[tuple[str, Call]], *, by_size: bool = True) -> bool:
    """Whether the last call has never followed the one before it, or the same phase of a step."""
    kinds: list[tuple[str, ...]] = []
    latest = None
    for group, call in calls:
        phase = str(call.phase).partition(" ")[0]
        if call.phase != latest:  # what follows depends on the phase, not on the end of the phase before
            kinds.append((phase,))
            latest = call.phase
        kinds.append((phase, group, call.name, call.sizes if by_size else ""))
    usual = {after for before, after in pairwise(kinds[:-1]) if before == kinds[-2]}
    return bool(usual) and kinds[-1] not in usual


def _ends_a_phase_early(calls: Sequence[tuple[str, Call]]) -> bool:
    """Whether the last call begins a phase, and the one before it has never ended a phase of its kind."""
    ends = {call.phase or "": (group, call.name, call.sizes) for group, call in calls}  # in order
    *earlier, latest = list(ends)[:-1] or [""]
    if not latest or calls[-2][1].phase == calls[-1][1].phase:
        return False
    usual = [ends[phase] for phase in earlier if phase.partition(" ")[0] == latest.partition(" ")[0]]
    return bool(usual) and ends[latest] not in usual


def _mismatches(group: str, calls: Mapping[int, Names]) -> list[Desync]:
    """The first number at which ranks entered collectives of different names: the minority is to blame.

    One for each side if no side is larger.
    """
    for number in sorted(set.intersection(*(set(rank_calls) for rank_calls in calls.values()))):
        names = Counter(rank_calls[number] for rank_calls in calls.values())
        if len(names) > 1:
            most = max(names.values())
            return [
                _mismatch(group, calls, number=number, right=right)
                for right, count in names.items() if count == most
            ]  # fmt: skip
    return []


def _mismatch(group: str, calls: Mapping[int, Names], *, number: int, right: str) -> Desync:
    wrong = tuple(sorted(rank for rank in calls if calls[rank][number] != right))
    waiting = tuple(sorted(set(calls) - set(wrong)))
    other = calls[wrong[0]][number]
    message = f"entered {other} where {name_ranks(waiting)} entered {right} (collective {number})"
    return Desync(group, right, number, wrong, waiting=waiting, message=message)


def _missing(group: str, calls: Mapping[int, Names], *, members: set[int]) -> list[Desync]:
    # NCCL's hosts only queue collectives, so those that wait for nothing run ahead of those that wait.
    last = {rank: max(rank_calls) for rank, rank_calls in calls.items()}
    behind = min(last.values())
    missing = sorted(rank for rank in last if last[rank] == behind)
    number = behind + 1
    if len(missing) == len(last):
        missing, number = sorted(members - set(last)), behind
    waiting = tuple(sorted(rank for rank in last if last[rank] >= number))
    if not missing:
        return []
    name = calls[waiting[0]].get(number, "a collective that is no longer recorded")
    first = missing[0]
    previous = f"; its last collective was {calls[first][last[first]]} {last[first]}" if first in last else ""
    others = f", with {name_ranks(missing[1:])}" if missing[1:] else ""
    message = (
        f"missing{others} from {name} (collective {number}), in which {name_ranks(waiting)} waited{previous}"
    )
    return [Desync(group, name, number, tuple(missing), waiting=waiting, message=message)]


def name_ranks(ranks: Sequence[int]) -> str:
    """Format ranks as `rank 3`, `ranks 0, 1, 2` or `63 ranks`."""
    if len(ranks) > 8:
        return f"{len(ranks)} ranks"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
