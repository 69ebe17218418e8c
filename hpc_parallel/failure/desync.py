"""Find the rank that did not enter a collective, or entered another, from each rank's last collectives."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from hpc_parallel.failure.flight_recorder import BEFORE_STEPS

Calls = Mapping[int, str]  # the newest collectives of a group on one rank: number -> name


@dataclass(frozen=True)
class Desync:
    """The ranks to blame for a collective that did not complete."""

    collective: str
    number: int  # sequence number in the group
    ranks: tuple[int, ...]  # to blame, as global ranks; empty if nothing says which
    waiting: tuple[int, ...]
    message: str  # what the first of `ranks` did; what each did if nothing says which of them is to blame

    @property
    def details(self) -> dict[str, Any]:
        return {"collective": self.collective, "number": self.number, "missing": list(self.ranks)}


def compare(collectives: Mapping[int, Sequence[Mapping[str, Any]]], *, world_size: int) -> Desync | None:
    """Find the first disagreement; None if all ranks with a record are at the same collectives.

    A member of the group may have no record because its process was ended while it waited. So it counts as
    missing only if no rank with a record is behind.

    collectives: rank -> `flight_recorder.by_group`.
    """
    groups: dict[str, dict[int, Calls]] = defaultdict(dict)
    members: dict[str, set[int]] = {}
    for rank, rank_groups in collectives.items():
        for group in rank_groups:
            name = group["group"]
            groups[name][rank] = {number: call for number, call, *_ in group["calls"]}
            members.setdefault(name, set()).update(group["ranks"] or range(world_size))
    disagreeing = {
        name: finding
        for name, calls in groups.items()
        if (finding := _mismatch(calls) or _missing(calls, members=members[name]))
    }
    findings = list(disagreeing.values())
    # A rank that waits in another group's collective is itself blocked: blame the last rank of the chain.
    # If two ranks wait for each other, blame the one that left its usual sequence of collectives.
    blocked = {rank for finding in findings for rank in finding.waiting}

    def innocence(finding: Desync) -> tuple[bool, bool, bool]:
        rank = finding.ranks[0]
        # Leave out the groups that agree: a group that is used rarely would break any usual sequence.
        used = [group for group in collectives.get(rank, ()) if group["group"] in disagreeing]
        # A new size breaks a sequence too (a message of figures has one more, for example). So if both ranks
        # left theirs, the names alone decide.
        return rank in blocked, not breaks_sequence(used), not breaks_sequence(used, by_size=False)

    least = min(map(innocence, findings), default=None)
    suspects = [finding for finding in findings if innocence(finding) == least]
    if len({finding.ranks[0] for finding in suspects}) > 1 and suspects[0].ranks[0] in blocked:
        told = "; ".join(f"rank {finding.ranks[0]}: {finding.message}" for finding in suspects)
        message = f"ranks wait for each other, and no earlier step shows which is behind: {told}"
        return replace(suspects[0], ranks=(), message=message)
    return suspects[0] if suspects else None


def breaks_sequence(groups: Sequence[Mapping[str, Any]], *, by_size: bool = True) -> bool:
    """Whether a rank's last collective has never followed the one before it, or the same phase of a step."""
    calls = sorted(
        (time, group["group"], name, str(sizes) if by_size else "", phase)
        for group in groups
        for _, name, sizes, time, phase in group["calls"]
        if phase != BEFORE_STEPS
    )
    kinds: list[tuple[str, ...]] = []
    latest = None
    for _, *kind, phase in calls:
        if phase != latest:  # what follows depends on the phase, not on the end of the phase before
            kinds.append((str(phase).partition(" ")[0],))
            latest = phase
        kinds.append(tuple(kind))
    usual = {after for before, after in pairwise(kinds[:-1]) if before == kinds[-2]}
    return bool(usual) and kinds[-1] not in usual


def _mismatch(calls: Mapping[int, Calls]) -> Desync | None:
    """The first number at which ranks entered collectives of different names; the minority is to blame."""
    for number in sorted(set.intersection(*(set(rank_calls) for rank_calls in calls.values()))):
        names = Counter(rank_calls[number] for rank_calls in calls.values())
        if len(names) > 1:
            right, _ = names.most_common(1)[0]
            wrong = tuple(sorted(rank for rank in calls if calls[rank][number] != right))
            waiting = tuple(sorted(set(calls) - set(wrong)))
            other = calls[wrong[0]][number]
            message = f"entered {other} where {name_ranks(waiting)} entered {right} (collective {number})"
            return Desync(right, number, wrong, waiting=waiting, message=message)
    return None


def _missing(calls: Mapping[int, Calls], *, members: set[int]) -> Desync | None:
    # NCCL's hosts only queue collectives, so those that wait for nothing run ahead of those that wait.
    last = {rank: max(rank_calls) for rank, rank_calls in calls.items()}
    behind = min(last.values())
    missing = sorted(rank for rank in last if last[rank] == behind)
    number = behind + 1
    if len(missing) == len(last):
        missing, number = sorted(members - set(last)), behind
    waiting = tuple(sorted(rank for rank in last if last[rank] >= number))
    if not missing:
        return None
    name = calls[waiting[0]].get(number, "a collective that is no longer recorded")
    first = missing[0]
    previous = f"; its last collective was {calls[first][last[first]]} {last[first]}" if first in last else ""
    others = f", with {name_ranks(missing[1:])}" if missing[1:] else ""
    message = (
        f"missing{others} from {name} (collective {number}), in which {name_ranks(waiting)} waited{previous}"
    )
    return Desync(name, number, tuple(missing), waiting=waiting, message=message)


def name_ranks(ranks: Sequence[int]) -> str:
    """Format ranks as `rank 3`, `ranks 0, 1, 2` or `63 ranks`."""
    if len(ranks) > 8:
        return f"{len(ranks)} ranks"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
