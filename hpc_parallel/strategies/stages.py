"""The blocks of each pipeline stage: by explicit cuts, or balanced over contiguous stages."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module

from hpc_parallel.config.schema import StrategyConfig
from hpc_parallel.layout.schedules import schedule_of, stages_of, stages_per_rank
from hpc_parallel.layout.stage_cuts import PartCosts, divide_blocks
from hpc_parallel.models.layered import LayeredModel, keep, part_of
from hpc_parallel.problems import ConfigError, Problem, Problems
from hpc_parallel.strategies.dropout.dropout_shapes import dry_pass
from hpc_parallel.strategies.pipeline import ENDS, contiguous_ends
from hpc_parallel.strategies.replace_forward import replace_forward


def cut(
    model: LayeredModel, *, axis: DeviceMesh, sample_shape: tuple[int, ...], options: StrategyConfig
) -> dict[int, LayeredModel]:
    """This rank's stages of the whole `model`, by their index in the pipeline, in ascending order.

    Parameters keep the names of the whole model.

    Raises ConfigError as `divide` does.
    """
    per_rank = stages_per_rank(options)
    count = axis.size() * per_rank
    blocks = divide(model, stages=count, sample_shape=sample_shape, options=options)
    local_indices = stages_of(
        axis.get_local_rank(),
        degree=axis.size(),
        per_rank=per_rank,
        v_shaped=schedule_of(options).v_shaped,
    )
    stages = {
        i: keep(deepcopy(model), blocks=blocks[i], stem=i == 0, head=i == count - 1) for i in local_indices
    }
    for stage in stages.values():
        replace_forward(stage, contiguous_ends, technique="Stage")
    return stages


def find_problems(
    model: LayeredModel, *, stages: int, sample_shape: tuple[int, ...] | None, options: StrategyConfig
) -> Problems:
    """Returns why the whole `model` can't be cut into `stages`.

    Without a `sample_shape` stages are balanced by parameters.
    """
    if schedule_of(options).splits_backward and (name := _used_again(model, sample_shape)):
        rule = (
            f"can't be used: it splits the backward pass, and {type(model).__name__} uses {name} several "
            "times in a forward pass, which torch can't split"
        )
        yield Problem("strategy.schedule", options.schedule, rule, ("1f1b", "interleaved"))
    if sample_shape is None:
        options = replace(options, balance="parameters")
    try:
        divide(model, stages=stages, sample_shape=sample_shape or (), options=options)
    except ConfigError as error:
        yield from error.problems


def _used_again(model: LayeredModel, sample_shape: tuple[int, ...] | None) -> str | None:
    """A weight with several names, or a module with weights that runs several times; None if there is none.

    Such a module is found only if the shape of the samples is known and the model runs on meta.
    """
    if pairs := _tied_inside(model):
        return pairs[0][1]
    calls = {} if sample_shape is None else dry_pass(model, sample_shape=sample_shape).inputs
    name: str
    for name, module in model.named_modules():
        if len(calls.get(name, [])) > 1 and any(True for _ in module.parameters(recurse=False)):
            return str(name)
    return None


def divide(
    model: LayeredModel, *, stages: int, sample_shape: tuple[int, ...], options: StrategyConfig
) -> list[range]:
    """The blocks of each stage, in order, by `strategy.cuts`, or by `strategy.balance` and `strategy.shares`.

    Parts that share a weight are in one stage, except for stem and head, which have a copy each.

    Raises ConfigError if the model has too few blocks, or if shared weights leave too few places to cut. This
    is known only after the model is built.
    """
    between = separable(model)
    if _tied_inside(model):
        cuts = options.cuts
        if cuts is not None and not between.issuperset(cuts):
            raise ConfigError([_shared_problem(model, Problem("strategy.cuts", list(cuts), ""), between)])
        if cuts is None and len(between) < stages - 1 <= len(model.blocks) - 1:
            raise ConfigError(
                [_shared_problem(model, Problem("strategy.pipeline", stages, "", (1,)), between)]
            )
    by_parameters = options.balance == "parameters"
    costs = parameters(model) if by_parameters else model.forward_flops(sample_shape)
    return divide_blocks(costs, stages=stages, options=options, between=between)


def separable(model: LayeredModel) -> set[int]:
    """The blocks before which the whole `model` can be cut, so that no two stages share a weight.

    Stem and head may share a weight (`pipeline.TiedEnds`).
    """
    count = len(model.blocks)
    places = {"stem": 0, "head": count - 1, **{f"blocks.{i}": i for i in range(count)}}
    spans = [sorted((places[part_of(alias)], places[part_of(name)])) for alias, name in _tied_inside(model)]
    return {cut for cut in range(1, count) if not any(first < cut <= last for first, last in spans)}


def _tied_inside(model: LayeredModel) -> list[tuple[str, str]]:
    """The shared weights that must stay in one stage."""
    return [pair for pair in model.tied.items() if {*map(part_of, pair)} != ENDS]


def _shared_problem(model: LayeredModel, problem: Problem, between: set[int]) -> Problem:
    alias, name = _tied_inside(model)[0]
    cuts = f"before block {', '.join(map(str, sorted(between)))} only" if between else "nowhere"
    rule = (
        f"can't be used: {alias} of {type(model).__name__} is {name}, and stages share no weights. This "
        f"model can be cut {cuts}"
    )
    return replace(problem, rule=rule)


def parameters(model: LayeredModel) -> PartCosts:
    """Parameters of each part. A weight that stem and head share counts twice: each end has a copy."""

    def count(part: Module | None) -> int:
        return 0 if part is None else sum(weight.numel() for weight in part.parameters())

    return PartCosts(
        stem=count(model.stem),
        blocks=tuple(count(block) for block in model.blocks.values()),
        head=count(model.head),
    )
