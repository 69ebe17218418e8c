"""Check a pipeline: its stages, cuts, schedule and microbatches must fit together."""

from __future__ import annotations

import os
from dataclasses import replace

from hpc_parallel.config.checks.suggestions import along_with_less_of, near, schedules_near
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.layout.batch_plan import BatchPlan, batch_of
from hpc_parallel.layout.counts import count
from hpc_parallel.layout.layout import Layout, divisors
from hpc_parallel.layout.schedules import file_of, schedule_of, stages_per_rank, unfit, version_problem
from hpc_parallel.layout.stage_cuts import cuts_problem
from hpc_parallel.problems import Problem, Problems


def find_problems(config: RunConfig, layout: Layout) -> Problems:
    """Every stage needs a block, and the schedule limits the number of stages per rank."""
    strategy = config.strategy
    file = schedule_of(strategy).file
    if file is not None and file.problems:
        path = file_of(strategy.schedule)
        close = () if path is None or os.path.exists(path) else schedules_near(strategy.schedule)
        for rule in file.problems:
            yield Problem("strategy.schedule", strategy.schedule, rule, close or ("1f1b",))
        return
    if layout.pipeline == 1:
        if strategy.cuts is not None:
            rule = "cuts a pipeline, but there is one stage"
            yield Problem("strategy.cuts", strategy.cuts, rule, (None,))
        return
    if strategy.static_graph:
        rule = "can't be used in a pipeline, which accumulates gradients from its first step on"
        yield Problem("strategy.static_graph", True, rule, (False,))
    if file is not None and len(file.ranks) != layout.pipeline:
        rule = f"is not the number of ranks in {strategy.schedule}, {len(file.ranks)}"
        yield Problem("strategy.pipeline", layout.pipeline, rule, (len(file.ranks),))
        return
    per_rank = stages_per_rank(strategy)
    fewest, most, usual = schedule_of(strategy).stages_per_rank
    if per_rank < fewest or (most is not None and per_rank > most):
        rule = f"does not fit strategy.schedule = {strategy.schedule}"
        yield Problem("strategy.stages_per_rank", per_rank, rule, (usual,))
        return
    yield from _runnable(config, layout)
    stages = layout.pipeline * per_rank
    key, blocks = count(config, "blocks")
    if blocks is not None and stages > blocks:
        degree = max((d for d in divisors(layout.devices) if d * per_rank <= blocks), default=1)
        along = along_with_less_of("pipeline", strategy) if degree < layout.pipeline else ()
        detail = f" ({layout.pipeline} ranks x {per_rank})" if per_rank > 1 else ""
        rule = f"gives {stages} stages{detail}, more than {key} = {blocks}: each needs a block"
        yield Problem("strategy.pipeline", layout.pipeline, rule, (degree,), along)
    elif strategy.cuts is not None and (problem := cuts_problem(strategy.cuts, stages=stages, blocks=blocks)):
        yield problem


def _runnable(config: RunConfig, layout: Layout) -> Problems:
    """Yields the settings that torch can't combine with the schedule."""
    strategy = config.strategy
    if problem := version_problem(strategy.schedule):
        yield replace(problem, legal=_whole_backward(config, layout))
    if not schedule_of(strategy).splits_backward:
        return
    what = f"strategy.schedule = {strategy.schedule} splits the backward pass"
    if config.training.compile:  # torch raises for "stage modules that have used torch.compile"
        rule = f"can't be used: {what}, which torch can't do with a compiled model"
        yield Problem("training.compile", True, rule, (False,))
    averages = layout.averaged > 1 and not layout.by_fully_shard
    if averages and strategy.gradient_compression != "none":
        rule = f"can't be used: {what}, and DistributedDataParallel, which compresses, does not see it"
        yield Problem("strategy.gradient_compression", strategy.gradient_compression, rule, ("none",))
    if layout.by_fully_shard and strategy.reshard:
        # torch looks for the weights when the backward pass starts. Weights that were resharded after the
        # forward pass are missing then, and torch silently omits their gradients: after 20 steps the weights
        # are off by 0.84 of their norm (torch 2.13, float64), and by 2e-14 if they stay gathered.
        rule = f"can't be used: {what}, which needs weights that stay gathered after the forward pass"
        yield Problem("strategy.reshard", True, rule, (False,))


def _whole_backward(config: RunConfig, layout: Layout) -> tuple[str, ...]:
    """The nearest schedule of the same stages that does not split the backward pass."""
    per_rank = stages_per_rank(config.strategy)
    nearest, any_count = ("interleaved", "looped_bfs") if per_rank > 1 else ("1f1b", "gpipe")
    try:
        microbatches = batch_of(config, layout).microbatches
    except ValueError:  # reported by the checks of the batch
        return (any_count,)
    strategy = replace(config.strategy, schedule=nearest, stages_per_rank=per_rank)
    fits = unfit(strategy, microbatches=microbatches, ranks=layout.pipeline) is None
    return (nearest if fits else any_count,)


def batch_problems(config: RunConfig, layout: Layout, plan: BatchPlan) -> Problems:
    """Each schedule limits the number of microbatches."""
    strategy, ranks = config.strategy, layout.pipeline
    rule = unfit(strategy, microbatches=plan.microbatches, ranks=ranks)
    if ranks == 1 or rule is None:
        return
    samples = plan.samples_per_replica
    fitting = [n for n in divisors(samples) if unfit(strategy, microbatches=n, ranks=ranks) is None]
    if fitting:
        yield _microbatches_problem(config, plan, rule, near(plan.microbatches, fitting))
    else:
        file = schedule_of(strategy).file
        least = ranks * stages_per_rank(strategy) if file is None else file.microbatches
        rule = f"gives a replica {samples} samples, too few for {least} microbatches of {strategy.schedule}"
        batch = config.training.global_batch_size
        yield Problem("training.global_batch_size", batch, rule, (least * layout.data,))


def _microbatches_problem(config: RunConfig, plan: BatchPlan, rule: str, legal: tuple[int, ...]) -> Problem:
    """Name the key that decides the count: `training.microbatch_size` if the user set it."""
    size = config.training.microbatch_size
    if size is None:
        return Problem("strategy.microbatches", plan.microbatches, rule, legal)
    sizes = tuple(plan.samples_per_replica // count for count in legal)
    along = () if config.strategy.microbatches is None else ("strategy.microbatches=null",)
    rule = f"makes {plan.microbatches} microbatches, which {rule}"
    return Problem("training.microbatch_size", size, rule, sizes, along)
