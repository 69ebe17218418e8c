"""Which blocks each pipeline stage has: by cuts that were chosen, or as even as contiguous cuts can be."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from itertools import accumulate, pairwise

from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module

from hpc_parallel.config.checks.pipeline_checks import cuts_problem
from hpc_parallel.config.schedules import schedule_of, stages_of, stages_per_rank
from hpc_parallel.config.schema import StrategyConfig
from hpc_parallel.models.layered import LayeredModel, PartCosts, keep
from hpc_parallel.problems import ConfigError, Problem


def cut(
    model: LayeredModel, *, axis: DeviceMesh, sample_shape: tuple[int, ...], options: StrategyConfig
) -> dict[int, LayeredModel]:
    """The stages of the whole `model` that this rank of `axis` has, rising, by their place in the pipeline.

    Names stay the whole model's. Raises what `divide` raises.
    """
    per_rank = stages_per_rank(options)
    count = axis.size() * per_rank
    blocks = divide(model, stages=count, sample_shape=sample_shape, options=options)
    mine = stages_of(
        axis.get_local_rank(),
        degree=axis.size(),
        per_rank=per_rank,
        v_shaped=schedule_of(options).v_shaped,
    )
    return {i: keep(deepcopy(model), blocks=blocks[i], stem=i == 0, head=i == count - 1) for i in mine}


def divide(
    model: LayeredModel, *, stages: int, sample_shape: tuple[int, ...], options: StrategyConfig
) -> list[range]:
    """The blocks of each of `stages`, in order, as `strategy.cuts` or `strategy.balance` says.

    Raises ConfigError where the model's blocks don't allow it, which only a look at them shows.
    """
    count = len(model.blocks)
    if options.cuts is not None:
        if problem := cuts_problem(options.cuts, stages=stages, blocks=count):
            raise ConfigError([problem])
        return [range(start, end) for start, end in pairwise((0, *options.cuts, count))]
    by_weight = options.balance == "parameters"
    return balance(parameters(model) if by_weight else model.forward_flops(sample_shape), stages=stages)


def balance(costs: PartCosts, *, stages: int) -> list[range]:
    """The blocks of each stage, in order, so that the heaviest stage is as light as it can be.

    The stem and the head count where they stand. Raises ConfigError where there are more stages than blocks.
    """
    count = len(costs.blocks)
    if stages > count:
        rule = f"stages are more than the model's {count} blocks: each needs one"
        raise ConfigError([Problem("strategy.pipeline", stages, rule, (count,))])
    before = [0.0, *accumulate(costs.blocks)]

    def weight(start: int, end: int) -> float:
        ends = costs.stem * (start == 0) + costs.head * (end == count)
        return before[end] - before[start] + ends

    @cache
    def best(start: int, left: int) -> tuple[float, tuple[int, ...]]:
        """The lightest heaviest stage of blocks start.. in `left` stages, and where those end."""
        if left == 1:
            return weight(start, count), (count,)
        options = []
        for end in range(start + 1, count - left + 2):
            rest, cuts = best(end, left - 1)
            options.append((max(weight(start, end), rest), (end, *cuts)))
        return min(options)

    return [range(start, end) for start, end in pairwise((0, *best(0, stages)[1]))]


def parameters(model: LayeredModel) -> PartCosts:
    """Weights of each part; one that stem and head share counts in both, as each end holds a copy."""

    def count(part: Module | None) -> int:
        return 0 if part is None else sum(weight.numel() for weight in part.parameters())

    return PartCosts(
        stem=count(model.stem),
        blocks=tuple(count(block) for block in model.blocks.values()),
        head=count(model.head),
    )
