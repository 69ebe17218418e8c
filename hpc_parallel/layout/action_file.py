"""A pipeline schedule of one's own: a CSV file with the actions of each rank, in torch's format.

Each line has the actions of one rank in its order: `1F0` is the forward pass of stage 1 for microbatch 0, `B`
its backward pass, `I` and `W` the two halves of it, for the gradients of inputs and of weights. An empty
field is a pause, which changes nothing: a rank waits for its inputs by itself. torch writes such files with
`PipelineScheduleMulti._dump_csv`.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from hpc_parallel.record.safe_read import read_text

SHOWN = 4  # problems of one file
Action = tuple[int, str, int]  # stage, kind, microbatch
_ACTION = re.compile(r"(\d{1,5})([FBIW])(\d{1,5})", re.ASCII)
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


@dataclass(frozen=True)
class ActionFile:
    """The actions of each rank. `problems`: what is wrong with them, clauses that begin with a verb."""

    text: str
    ranks: tuple[tuple[Action, ...], ...]
    problems: tuple[str, ...] = ()

    @cached_property
    def stages_of(self) -> list[list[int]]:
        """The stages of each rank in ascending order."""
        return [sorted({stage for stage, _, _ in actions}) for actions in self.ranks]

    @property
    def per_rank(self) -> int:
        return max(map(len, self.stages_of), default=1)

    @property
    def v_shaped(self) -> bool:
        return self.per_rank == 2 and 2 * len(self.ranks) - 1 in self.stages_of[0]

    @property
    def microbatches(self) -> int:
        return 1 + max((microbatch for actions in self.ranks for *_, microbatch in actions), default=0)

    @cached_property
    def splits_backward(self) -> bool:
        return any(kind in "IW" for actions in self.ranks for _, kind, _ in actions)

    def named(self, stem: str) -> str:
        """A file name that tells the contents apart: `stem` and the start of their hash."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()[:8]
        return (stem if stem.endswith(f"-{digest}") else f"{stem}-{digest}") + ".csv"


def read(path: Path) -> ActionFile:
    """The actions in a file; a file that can't be read has no actions and one problem."""
    try:
        status = path.stat()
    except OSError as error:
        return ActionFile("", (), (f"can't be read: {error.strerror}",))
    return _read(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=8)
def _read(path: Path, changed_ns: int, size: int) -> ActionFile:
    """The contents of one version of a file: a search asks for them for each layout."""
    try:
        return parse(read_text(path, follow=True))
    except (OSError, ValueError) as error:
        return ActionFile("", (), (f"can't be read: {getattr(error, 'strerror', None) or error}",))


def parse(text: str) -> ActionFile:
    """The actions in a text, with all its problems."""
    problems: list[str] = []
    ranks = []
    for number, line in enumerate(text.splitlines(), 1):
        actions: list[Action] = []
        for field in filter(None, map(str.strip, line.split(","))):
            both = _OVERLAPPED.fullmatch(field)  # torch runs the two one after the other
            for word in map(str.strip, both[1].split(";") if both else [field]):
                match = _ACTION.fullmatch(word)
                if match is None:
                    problems.append(f"has {word[:30]!r} in line {number}, which is not an action such as 1F0")
                else:
                    actions.append((int(match[1]), match[2], int(match[3])))
        ranks.append(tuple(actions))
    file = ActionFile(text, tuple(ranks))
    if not problems:
        problems = [*_missing(file)] or [*_misplaced(file)] or [*_waiting(file)]
    more = [f"has {len(problems) - SHOWN} more problems of this kind"] * (len(problems) > SHOWN)
    return ActionFile(text, tuple(ranks), (*problems[:SHOWN], *more))


def _missing(file: ActionFile) -> Iterator[str]:
    """Each stage runs each microbatch forwards once, and backwards once: whole or in two halves."""
    times = Counter(action for actions in file.ranks for action in actions)
    if not times:
        yield "has no actions"
        return
    yield from (f"has {_word(action)} {count} times" for action, count in times.items() if count > 1)
    stages = 1 + max(stage for stage, _, _ in times)
    if stages * file.microbatches > len(times):  # before a table of these numbers is made
        yield f"lacks actions: it names stage {stages - 1} and microbatch {file.microbatches - 1}"
        return
    for stage in range(stages):
        for microbatch in range(file.microbatches):
            kinds = "".join(kind for kind in "FBIW" if (stage, kind, microbatch) in times)
            if kinds not in ("FB", "FIW"):
                yield (
                    f"has {kinds or 'nothing'} for microbatch {microbatch} of stage {stage}, not F and B, "
                    "or F, I and W"
                )


def _misplaced(file: ActionFile) -> Iterator[str]:
    """Stages loop over the ranks, or go forth and back (`schedules.stages_of`)."""
    count = len(file.ranks)
    loops = [[rank + turn * count for turn in range(file.per_rank)] for rank in range(count)]
    forth_and_back = [[rank, 2 * count - 1 - rank] for rank in range(count)]
    if file.stages_of not in (loops, forth_and_back):
        rank = next(rank for rank in range(count) if file.stages_of[rank] != loops[rank])
        yield (
            f"gives rank {rank} the stages {file.stages_of[rank]}, not {loops[rank]}"
            + f" or {forth_and_back[rank]}" * (file.per_rank == 2)
        )


def _waiting(file: ActionFile) -> Iterator[str]:
    """Run all actions as soon as their inputs exist; what is left then waits for ever."""
    left, done = [deque(actions) for actions in file.ranks], set[Action]()
    last = sum(map(len, file.stages_of)) - 1
    moved = True
    while moved:
        moved = False
        for queue in left:
            while queue and _needs(queue[0], last=last, done=done) is None:
                done.add(queue.popleft())
                moved = True
    forward = [m for actions in file.ranks for stage, kind, m in actions if (stage, kind) == (last, "F")]
    if forward != sorted(forward):  # torch looks for the loss of microbatch n in the n-th place
        yield f"does not run the microbatches in the last stage in order: {forward}"
    for rank, queue in enumerate(left):
        if queue and (needed := _needs(queue[0], last=last, done=done)):
            yield f"lets rank {rank} wait for ever: its {_word(queue[0])} needs {needed}, which comes later"


def _needs(action: Action, *, last: int, done: set[Action]) -> str | None:
    """The first missing input of an action; None if it can run."""
    stage, kind, microbatch = action
    if kind == "W":
        inputs = [(stage, "I")]
    elif kind == "F":
        inputs = [(stage - 1, "F")] if stage else []
    else:
        inputs = [(stage, "F"), *([(stage + 1, "IB")] if stage < last else [])]
    for source, kinds in inputs:
        if not any((source, kind, microbatch) in done for kind in kinds):
            return _word((source, kinds[-1], microbatch))
    return None


def _word(action: Action) -> str:
    return "{}{}{}".format(*action)
