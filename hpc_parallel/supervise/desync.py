"""Who did not come to a collective, or came to another one, by what each rank had entered at its end."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Calls = Mapping[int, str]  # the newest collectives of a group on one rank: number -> name


@dataclass(frozen=True)
class Finding:
    """Ranks that are to blame for a collective that did not come about."""

    collective: str
    number: int  # of the group's collectives
    ranks: tuple[int, ...]  # to blame, of the whole world
    waiting: tuple[int, ...]
    message: str  # of the first of `ranks`: what it did

    @property
    def details(self) -> dict[str, Any]:
        return {"collective": self.collective, "number": self.number, "missing": list(self.ranks)}


def compare(standings: Mapping[int, Sequence[Mapping[str, Any]]], *, world_size: int) -> Finding | None:
    """The first disagreement; None where all that left a word stand at the same collectives.

    `standings`: rank -> `flight_recorder.by_group`. A member of a group that left no word did not come
    only if no rank that did leave one is behind: it may have been ended while it waited.
    """
    groups: dict[str, dict[int, Calls]] = defaultdict(dict)
    members: dict[str, set[int]] = {}
    for rank, found in standings.items():
        for group in found:
            name = group["group"]
            groups[name][rank] = {number: call for number, call, *_ in group["calls"]}
            members.setdefault(name, set()).update(group["ranks"] or range(world_size))
    disagreeing = {
        name: finding
        for name, calls in groups.items()
        if (finding := _mismatch(calls) or _missing(calls, members=members[name]))
    }
    findings = list(disagreeing.values())
    # Who waits in another group's collective is held up itself: the end of the chain is to blame. Where it
    # has none, as two ranks wait for each other, the one that has left its own habit is.
    held_up = {rank for finding in findings for rank in finding.waiting}

    def innocence(finding: Finding) -> tuple[bool, bool]:
        rank = finding.ranks[0]
        # Groups that agree are left out: one that is used now and then would break any habit.
        used = [group for group in standings.get(rank, ()) if group["group"] in disagreeing]
        return rank in held_up, not strays(used)

    return min(findings, key=innocence, default=None)


def strays(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a rank's last collective is none that has followed the one before it so far, step by step."""
    calls = sorted(
        (time, group["group"], name, str(sizes))
        for group in groups
        for _, name, sizes, time in group["calls"]
    )
    kinds = [call[1:] for call in calls]
    usual = {after for before, after in pairwise(kinds[:-1]) if before == kinds[-2]}
    return bool(usual) and kinds[-1] not in usual


def _mismatch(calls: Mapping[int, Calls]) -> Finding | None:
    """The first number at which ranks entered collectives of different names: the fewer are to blame."""
    for number in sorted(set.intersection(*(set(own) for own in calls.values()))):
        names = Counter(own[number] for own in calls.values())
        if len(names) > 1:
            right, _ = names.most_common(1)[0]
            wrong = tuple(sorted(rank for rank, own in calls.items() if own[number] != right))
            waiting = tuple(sorted(set(calls) - set(wrong)))
            other = calls[wrong[0]][number]
            message = f"entered {other} where {_ranks(waiting)} entered {right} (collective {number})"
            return Finding(right, number, wrong, waiting=waiting, message=message)
    return None


def _missing(calls: Mapping[int, Calls], *, members: set[int]) -> Finding | None:
    last = {rank: max(own) for rank, own in calls.items()}
    number = max(last.values())
    waiting = tuple(sorted(rank for rank in last if last[rank] == number))
    missing = sorted(set(last) - set(waiting)) or sorted(members - set(last))
    if not missing:
        return None
    name = calls[waiting[0]][number]
    first = missing[0]
    stands = f"; its last was {calls[first][last[first]]} {last[first]}" if first in last else ""
    also = f", with {_ranks(missing[1:])}" if missing[1:] else ""
    message = f"missing{also} from {name} (collective {number}), in which {_ranks(waiting)} waited{stands}"
    return Finding(name, number, tuple(missing), waiting=waiting, message=message)


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1, 2`, `63 ranks`."""
    if len(ranks) > 8:
        return f"{len(ranks)} ranks"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
