"""Check `strategy.shares`: one speed for each part, and a batch that can be split by these speeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.layout.batch_plan import BatchPlan, batch_of
from hpc_parallel.layout.layout import DATAPARALLEL, Layout, divisors
from hpc_parallel.layout.shares import MEASURED, apportion, divided, slowdown
from hpc_parallel.problems import Problem, Problems, spell

MOST_SLOWDOWN = 1.25  # of a batch split into whole samples, against an exact split
MOST_SUGGESTED = 8  # numbers in one suggestion
MOST_RATIO = 100  # of the fastest to the slowest device: a slower one only delays the others
KEY = "strategy.shares"
TRAINING_TASKS = ("train", "proof")  # `proof` is the task of the command parity


def find_problems(config: RunConfig, layout: Layout) -> Problems:
    shares = config.strategy.shares
    if shares is None:
        return
    if reason := _unusable(config, layout):
        yield Problem(KEY, shares, f"can't be used: {reason}", (None,))
    elif shares != MEASURED:
        parts = divided(layout)
        what = f"{parts} {'ranks of the pipeline' if layout.pipeline > 1 else 'replicas'}"
        if rule := _broken_rule(shares, parts=parts, what=what):
            near = _near(shares, parts=parts)
            usable = parts <= MOST_SUGGESTED and _split_batch(config, layout, near)
            yield Problem(KEY, shares, rule, (near, MEASURED) if usable else (MEASURED,))


def _broken_rule(shares: Any, *, parts: int, what: str) -> str | None:
    if not isinstance(shares, list) or not shares or not all(map(_is_speed, shares)):
        return f"must be a list of numbers above 0, one for each of the {what}, or {MEASURED}"
    if len(shares) != parts:
        return f"has {len(shares)} numbers, but there are {what}"
    if max(shares) > MOST_RATIO * min(shares):
        return f"has numbers that differ by more than a factor {MOST_RATIO}: leave so slow a device out"
    return None


def _near(shares: Any, *, parts: int) -> list[Any]:
    """Legal shares that keep the legal numbers of `shares`."""
    given = [share if _is_speed(share) else 1 for share in shares] if isinstance(shares, list) else []
    least = math.ceil(max(given, default=1) / MOST_RATIO)
    kept = [*given, *[1] * parts][:parts]
    return [share if share * MOST_RATIO >= max(kept) else least for share in kept]


def _split_batch(config: RunConfig, layout: Layout, shares: Sequence[float]) -> bool:
    """Whether the global batch can be split by these shares."""
    try:
        plan = batch_of(replace(config, strategy=replace(config.strategy, shares=shares)), layout)
    except ValueError:
        return False
    return plan.shares is None or _fits(plan.data, plan.microbatch_size, plan.shares)


def _is_speed(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _unusable(config: RunConfig, layout: Layout) -> str | None:
    """Why no shares can be used with this configuration; None if they can."""
    strategy = config.strategy
    if config.task.name not in TRAINING_TASKS:
        return f"only a training is split by shares, not task={config.task.name}"
    if strategy.execution == DATAPARALLEL:
        return "torch splits the batch of nn.DataParallel into equal parts"
    if layout.expert > 1:
        return f"with strategy.expert = {layout.expert} it is not proven"
    if layout.pipeline > 1 and layout.data > 1:
        return f"they could be those of {layout.data} replicas or of {layout.pipeline} ranks of a pipeline"
    if layout.pipeline > 1 and strategy.cuts is not None:
        return "strategy.cuts already says which blocks each rank has"
    if divided(layout) == 1:
        return f"{layout} has neither replicas nor pipeline stages, which shares divide"
    return None


def batch_problems(config: RunConfig, plan: BatchPlan) -> Problems:
    """A microbatch is split into whole samples, which must come near the shares."""
    shares, training = plan.shares, config.training
    if shares is None or _fits(plan.data, plan.microbatch_size, shares):
        return
    rule = (
        f"is split by {KEY} = {spell(config.strategy.shares)} into {plan}, which takes "
        f"{slowdown(plan.sizes, shares):.2f} times as long as an exact split"
    )
    if training.microbatch_size is not None:
        sizes = [size for size in divisors(plan.samples_per_replica) if _fits(plan.data, size, shares)]
        if sizes:
            yield Problem("training.microbatch_size", training.microbatch_size, rule, (sizes[0],))
            return
    microbatches = plan.microbatches if training.microbatch_size is None else 1
    size = next(size for size in count(plan.samples_per_replica) if _fits(plan.data, size, shares))
    along = () if training.microbatch_size is None else ("training.microbatch_size=null",)
    batch = plan.data * microbatches * size
    yield Problem("training.global_batch_size", training.global_batch_size, rule, (batch,), along)


def _fits(replicas: int, size: int, shares: Sequence[float]) -> bool:
    return slowdown(apportion(replicas * size, shares), shares) <= MOST_SLOWDOWN


def without_shares(config: RunConfig) -> RunConfig:
    """The configuration with equal parts, for the checks that follow."""
    return replace(config, strategy=replace(config.strategy, shares=None))
