"""The pipeline schedules and their rules for stages and microbatches.

torch.distributed.pipelining raises errors by the same rules; the login node reads them here without torch.
`strategies/pipeline.py` names the class of each schedule, and `planning/pipeline_orders.py` has the order of
its actions. A user's schedule is a file of actions (`action_file.py`).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_parallel.problems import Problem

if TYPE_CHECKING:  # schema.py reads the names of the schedules
    from hpc_parallel.config.schema import StrategyConfig
    from hpc_parallel.layout.action_file import ActionFile

version = cache(metadata.version)  # it parses all that a package says about itself


@dataclass(frozen=True)
class Schedule:
    """The rules of a schedule; `stages_per_rank`: minimum, maximum (None: no limit), default."""

    stages_per_rank: tuple[int, int | None, int] = (1, 1, 1)
    v_shaped: bool = False  # a rank has the n-th stage from the start and the n-th from the end
    full: bool = False  # needs at least as many microbatches as stages
    rounds: bool = False  # runs microbatches in equal rounds of about one microbatch per rank
    splits_backward: bool = False  # computes gradients of weights later than those of inputs
    in_turn: bool = False  # a microbatch starts after the previous one has finished
    two_way: bool = False  # sends activations and gradients at the same time, in separate calls
    file: ActionFile | None = None  # a user's schedule
    known: bool = True


SUFFIX = ".csv"  # of a user's file
_ROUND = (2, None, 2)
_PAIR = (2, 2, 2)
SCHEDULES = {
    "naive": Schedule(in_turn=True),
    "gpipe": Schedule(),
    "1f1b": Schedule(full=True),
    "interleaved": Schedule(_ROUND, rounds=True, two_way=True),
    "looped_bfs": Schedule(_ROUND, two_way=True),
    "interleaved_zero_bubble": Schedule((1, None, 2), rounds=True, splits_backward=True, two_way=True),
    "zbv": Schedule(_PAIR, v_shaped=True, splits_backward=True, two_way=True),
    "dualpipev": Schedule(_PAIR, v_shaped=True, full=True, splits_backward=True, two_way=True),
}


def file_of(name: str) -> Path | None:
    """The file that `strategy.schedule` names; None if it is the name of a schedule."""
    return Path(os.path.expanduser(name)).absolute() if name.endswith(SUFFIX) else None


def schedule_named(name: str) -> Schedule:
    """The rules of a schedule or of a user's file; defaults for an unknown name, which the checks report."""
    if name in SCHEDULES or (path := file_of(name)) is None:
        return SCHEDULES.get(name, Schedule(known=False))
    from hpc_parallel.layout import action_file

    file = action_file.read(path)
    return Schedule(
        (file.per_rank,) * 3, v_shaped=file.v_shaped, splits_backward=file.splits_backward, two_way=True,
        file=file, known=not file.problems,
    )  # fmt: skip


def schedule_of(strategy: StrategyConfig) -> Schedule:
    return schedule_named(strategy.schedule)


def version_problem(name: str, *, legal: tuple[str, ...] = ()) -> Problem | None:
    """Returns a problem if the installed torch is too old for the schedule.

    Before 2.13, the second half of a split backward pass counts gradients twice where several paths lead
    to a weight, and misses autograd functions written in Python, such as our loss: torch frees them.
    """
    rule = too_old((2, 13)) if schedule_named(name).splits_backward else None
    return None if rule is None else Problem("strategy.schedule", name, rule, legal)


def too_old(needed: tuple[int, int]) -> str | None:
    """Returns the broken rule if the installed torch, which the job uses too, is older than `needed`.

    Returns None also if no torch is installed.
    """
    try:
        match = re.match(r"(\d+)\.(\d+)", version("torch"))
    except metadata.PackageNotFoundError:
        return None
    if match is None or (installed := (int(match[1]), int(match[2]))) >= needed:
        return None
    oldest, current = (".".join(map(str, release)) for release in (needed, installed))
    return f"needs torch {oldest} or newer, and torch {current} is installed here"


def stages_per_rank(strategy: StrategyConfig) -> int:
    return strategy.stages_per_rank or schedule_of(strategy).stages_per_rank[2]


def unfit(strategy: StrategyConfig, *, microbatches: int, ranks: int) -> str | None:
    """Why the schedule can't run this number of microbatches; None if it can."""
    schedule, stages = schedule_of(strategy), ranks * stages_per_rank(strategy)
    if schedule.file is not None and microbatches != schedule.file.microbatches:
        return f"is not the number of {strategy.schedule}, {schedule.file.microbatches}"
    if schedule.full and microbatches < stages:
        return f"leaves stages idle: {strategy.schedule} needs at least as many as its {stages} stages"
    rounds = max(1, microbatches // ranks)
    if schedule.rounds and microbatches % rounds:
        return f"does not split into {rounds} equal rounds of about one microbatch for each of {ranks} ranks"
    return None


def stages_of(rank: int, *, degree: int, per_rank: int, v_shaped: bool) -> list[int]:
    """Indices of a rank's stages in ascending order.

    Stages loop over the ranks `per_rank` times (Narayanan et al. 2021). A V-shaped schedule goes forth and
    back, so the first and the last stage share a rank (Qi et al. 2024, zero bubble; DeepSeek-AI 2024,
    DualPipe).
    """
    if v_shaped:
        return [rank, 2 * degree - 1 - rank]
    return [rank + turn * degree for turn in range(per_rank)]
