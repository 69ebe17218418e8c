"""Degrees against devices, the batch against both, and what an axis must divide."""

from __future__ import annotations

import math
from pathlib import Path

from hpc_parallel.config import pipeline_checks
from hpc_parallel.config.layout import AXES, Layout, divisors, plan_batch
from hpc_parallel.config.problems import Found, Problem
from hpc_parallel.config.schedules import schedule_of, stages_per_rank
from hpc_parallel.config.schema import RunConfig, StrategyConfig, TransformerConfig

# An axis can be used once the file of its technique is there: strategies/<axis>.py.
TECHNIQUES = {file.stem for file in (Path(__file__).parents[1] / "strategies").glob("*.py")}


def find_problems(config: RunConfig) -> Found:
    """Degrees against devices, stages against blocks, batch against both."""
    strategy = config.strategy
    if config.nodes < 1 or config.gpus_per_node < 1:
        return
    devices = config.nodes * config.gpus_per_node
    broken = False
    for axis in AXES:
        degree = getattr(strategy, axis)
        if degree < 1 and degree != -1:
            broken = True
            yield Problem(f"strategy.{axis}", degree, "must be at least 1, or -1 for what is left", (1, -1))
        elif degree != 1 and axis not in TECHNIQUES:
            broken = True
            yield Problem(f"strategy.{axis}", degree, "asks for an axis that has no technique yet", (1,))
    free = [axis for axis in AXES if getattr(strategy, axis) == -1]
    if len(free) > 1:
        for axis in free[1:]:
            rule = f"leaves two axes open, as strategy.{free[0]} is -1 too"
            yield Problem(f"strategy.{axis}", -1, rule, (1,))
    if broken or len(free) > 1:
        return
    try:
        layout = Layout.resolve(strategy, devices=devices)
    except ValueError:
        yield _degrees_problem(config, strategy, devices, free)
        return
    yield from pipeline_checks.find_problems(config, layout)
    yield from _batch(config, layout)
    yield from _splits(config, layout)


def _degrees_problem(config: RunConfig, strategy: StrategyConfig, devices: int, free: list[str]) -> Problem:
    set_axes = {axis: getattr(strategy, axis) for axis in AXES if getattr(strategy, axis) > 1}
    product = math.prod(set_axes.values())
    where = f"nodes={config.nodes} x gpus_per_node={config.gpus_per_node} = {devices} devices"
    if not set_axes:
        rule = f"uses one device, but there are {where}"
        return Problem("strategy", strategy.name, rule, ("data", "pipeline"))
    axis, degree = max(set_axes.items(), key=lambda item: item[1])
    rest = product // degree
    if free:
        legal = [d for d in divisors(devices) if d * rest <= devices and devices % (d * rest) == 0]
        rule = f"does not divide {where}" if rest == 1 else f"times {rest} does not divide {where}"
    else:
        legal = [devices // rest] if devices % rest == 0 else []
        rule = f"makes {product} of the axes together, but there are {where}"
    if axis == "pipeline" and (layers := pipeline_checks.blocks(config)[1]) is not None:
        legal = [d for d in legal if d * stages_per_rank(strategy) <= layers]
    legal.sort(key=lambda d: abs(d - degree))
    return Problem(f"strategy.{axis}", degree, rule, tuple(sorted(legal[:2])))


def _batch(config: RunConfig, layout: Layout) -> Found:
    """The global batch splits over replicas and microbatches without remainder."""
    training, strategy = config.training, config.strategy
    batch, size, count = training.global_batch_size, training.microbatch_size, strategy.microbatches
    if any(number is not None and number < 1 for number in (batch, size, count)):
        return
    if batch % layout.data:
        rule = f"does not divide by the {layout.data} replicas: each needs as many samples"
        unit = layout.data * (size or 1) * (count or 1)
        yield Problem("training.global_batch_size", batch, rule, _multiples_near(batch, unit))
        return
    samples = batch // layout.data
    key, value = ("strategy.microbatches", count) if count else ("training.microbatch_size", size)
    try:
        plan = plan_batch(
            batch, layout=layout, microbatch_size=size, microbatches=count,
            in_turn=schedule_of(strategy).in_turn,
        )  # fmt: skip
    except ValueError:
        assert value is not None
        if count and size and samples % count == 0:
            rule = f"contradicts strategy.microbatches = {count}, with {samples} samples a replica"
            yield Problem("training.microbatch_size", size, rule, (samples // count, None))
        else:
            rule = f"does not divide the {samples} samples that each of {layout.data} replicas has a step"
            near = sorted(divisors(samples), key=lambda d: abs(d - value))[:2]
            yield Problem(key, value, rule, tuple(sorted(near)))
        return
    yield from pipeline_checks.batch_problems(config, layout, plan)


def _splits(config: RunConfig, layout: Layout) -> Found:
    """What the tensor axis splits divides by its degree: heads, columns, vocabulary, sequence."""
    degree = layout.tensor
    if degree == 1:
        return
    if is_transformer(config):
        sizes = {name: config.model[name] for name in ("heads", "kv_heads", "ffn_dim", "vocab_size")}
        if min(sizes.values()) < 1:
            return
        if math.gcd(sizes["heads"], sizes["kv_heads"]) % degree:
            yield _heads_problem(config, layout, heads=sizes["heads"], kv_heads=sizes["kv_heads"])
            return
        for name, what in (("ffn_dim", "columns"), ("vocab_size", "rows of the embedding")):
            if sizes[name] % degree:
                rule = f"does not divide by strategy.tensor = {degree}: each device has as many {what}"
                above = -(-sizes[name] // degree) * degree  # below, a vocabulary would lose tokens
                yield Problem(f"model.{name}", sizes[name], rule, (above,))
    length = config.data.get("sequence_length") if isinstance(config.data, dict) else None
    if config.strategy.sequence_parallel and isinstance(length, int) and length >= 1 and length % degree:
        rule = f"does not divide by strategy.tensor = {degree}: each device keeps as many positions"
        yield Problem("data.sequence_length", length, rule, _multiples_near(length, degree))


def _heads_problem(config: RunConfig, layout: Layout, *, heads: int, kv_heads: int) -> Problem:
    others = {axis: getattr(config.strategy, axis) for axis in AXES if axis != "tensor"}
    free = -1 in others.values()  # else replicate takes what a smaller degree leaves
    fixed = [d for axis, d in others.items() if d > 1 and (free or axis != "replicate")]
    legal = divisors(math.gcd(heads, kv_heads, layout.devices // math.prod(fixed)))
    near = sorted(legal, key=lambda d: abs(d - layout.tensor))[:2]
    along = () if free else ("strategy.replicate=-1",)
    counts = f"model.heads = {heads} and model.kv_heads = {kv_heads}"
    rule = f"does not divide {counts}: each device needs whole heads"
    return Problem("strategy.tensor", layout.tensor, rule, tuple(sorted(near)), along)


def _multiples_near(value: int, unit: int) -> tuple[int, ...]:
    below = value // unit * unit
    return (below, below + unit) if below else (unit,)


def is_transformer(config: RunConfig) -> bool:
    return isinstance(config.model, dict) and config.model.get("_target_") == TransformerConfig._target_
