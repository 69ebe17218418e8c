"""Check degrees against devices, the batch against both, and sizes that an axis must divide."""

from __future__ import annotations

import math

from hpc_parallel.config.checks import pipeline_checks
from hpc_parallel.config.checks.counts import count
from hpc_parallel.config.layout import AXES, Layout, divisors, plan_batch, servers
from hpc_parallel.config.schedules import schedule_of, stages_per_rank
from hpc_parallel.config.schema import RunConfig, StrategyConfig, TransformerConfig
from hpc_parallel.problems import Found, Problem


def find_problems(config: RunConfig) -> Found:
    """Yields the problems of degrees, stages and batch."""
    strategy = config.strategy
    devices = config.devices - servers(strategy)
    if config.nodes < 1 or config.gpus_per_node < 1 or devices < 1:
        return
    broken = False
    for axis in AXES:
        degree = getattr(strategy, axis)
        if degree < 1 and degree != -1:
            broken = True
            yield Problem(f"strategy.{axis}", degree, "must be at least 1, or -1 for what is left", (1, -1))
    free = [axis for axis in AXES if getattr(strategy, axis) == -1]
    if len(free) > 1:
        for axis in free[1:]:
            rule = f"leaves two axes open: strategy.{free[0]} is -1 too"
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
    yield from _positions(config, layout)


def _degrees_problem(config: RunConfig, strategy: StrategyConfig, devices: int, free: list[str]) -> Problem:
    set_axes = {axis: getattr(strategy, axis) for axis in AXES if getattr(strategy, axis) > 1}
    product = math.prod(set_axes.values())
    where = f"nodes={config.nodes} x gpus_per_node={config.gpus_per_node} = {devices} devices"
    if servers(strategy):
        where = where.replace(" = ", " without the server = ")
    if not set_axes:
        rule = f"uses one device, but there are {where}"
        if strategy.name in AXES:  # the user set its degree to 1
            return Problem(f"strategy.{strategy.name}", getattr(strategy, strategy.name), rule, (devices,))
        return Problem("strategy", strategy.name, rule, ("data", "pipeline"))
    axis, degree = max(set_axes.items(), key=lambda item: item[1])
    rest = product // degree
    if free:
        legal = [d for d in divisors(devices) if d * rest <= devices and devices % (d * rest) == 0]
        rule = f"does not divide {where}" if rest == 1 else f"times {rest} does not divide {where}"
    else:
        legal = [devices // rest] if devices % rest == 0 else []
        rule = f"makes the product of all degrees {product}, but there are {where}"
    if axis == "pipeline" and (layers := count(config, "blocks")[1]) is not None:
        legal = [d for d in legal if d * stages_per_rank(strategy) <= layers]
    legal.sort(key=lambda d: abs(d - degree))
    return Problem(f"strategy.{axis}", degree, rule, tuple(sorted(legal[:2])))


def _batch(config: RunConfig, layout: Layout) -> Found:
    """The global batch must split over replicas and microbatches without remainder."""
    training, strategy = config.training, config.strategy
    batch, size, count = training.global_batch_size, training.microbatch_size, strategy.microbatches
    if any(number is not None and number < 1 for number in (batch, size, count)):
        return
    if batch % layout.data:
        rule = f"does not divide by the {layout.data} replicas: each needs the same number of samples"
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
            rule = f"contradicts strategy.microbatches = {count}, with {samples} samples per replica"
            yield Problem("training.microbatch_size", size, rule, (samples // count, None))
        else:
            rule = f"does not divide the {samples} samples per step of each of {layout.data} replicas"
            near = sorted(divisors(samples), key=lambda d: abs(d - value))[:2]
            yield Problem(key, value, rule, tuple(sorted(near)))
        return
    yield from pipeline_checks.batch_problems(config, layout, plan)


def _splits(config: RunConfig, layout: Layout) -> Found:
    """The tensor degree must divide what the axis splits: heads, columns, vocabulary."""
    degree = layout.tensor
    if degree == 1:
        return
    heads, kv_heads = count(config, "heads")[1], count(config, "kv_heads")[1]
    if heads and kv_heads:
        if math.gcd(heads, kv_heads) % degree:
            yield _heads_problem(config, layout, heads=heads, kv_heads=kv_heads)
            return
        for split, what in (("columns", "columns"), ("vocabulary", "rows of the embedding")):
            key, size = count(config, split)
            if size and size % degree:
                rule = f"does not divide by strategy.tensor = {degree}: devices have equal numbers of {what}"
                above = -(-size // degree) * degree  # a smaller vocabulary would lose tokens
                yield Problem(key, size, rule, (above,))


def _positions(config: RunConfig, layout: Layout) -> Found:
    """The axes must divide a sequence: `context` takes two slices per device, then `tensor` takes one."""
    length = config.data.get("sequence_length") if isinstance(config.data, dict) else None
    if not isinstance(length, int) or length < 1:
        return
    tensor = layout.tensor if config.strategy.sequence_parallel else 1
    slices = 2 if layout.context > 1 else 1
    unit = layout.context * math.lcm(slices, tensor)
    if length % unit:
        degrees = {"context": layout.context, "tensor": tensor}
        splits = [f"strategy.{axis} = {degree}" for axis, degree in degrees.items() if degree > 1]
        what = "two slices of the same length" if layout.context > 1 else "the same number of positions"
        rule = f"does not divide by {unit} for {' and '.join(splits)}: each device keeps {what}"
        yield Problem("data.sequence_length", length, rule, _multiples_near(length, unit))


def _heads_problem(config: RunConfig, layout: Layout, *, heads: int, kv_heads: int) -> Problem:
    others = {axis: getattr(config.strategy, axis) for axis in AXES if axis != "tensor"}
    along = along_with_less_of("tensor", config.strategy)
    fixed = [d for axis, d in others.items() if d > 1 and (not along or axis != "replicate")]
    legal = divisors(math.gcd(heads, kv_heads, layout.devices // math.prod(fixed)))
    near = sorted(legal, key=lambda d: abs(d - layout.tensor))[:2]
    keys = [count(config, what)[0] for what in ("heads", "kv_heads")]
    counts = f"{keys[0]} = {heads} and {keys[1]} = {kv_heads}"
    rule = f"does not divide {counts}: each device needs whole heads"
    return Problem("strategy.tensor", layout.tensor, rule, tuple(sorted(near)), along)


def along_with_less_of(axis: str, strategy: StrategyConfig) -> tuple[str, ...]:
    """Overrides that must accompany a smaller degree of `axis`: none if another axis has degree -1."""
    free = any(getattr(strategy, other) == -1 for other in AXES if other != axis)
    return () if free else ("strategy.replicate=-1",)


def _multiples_near(value: int, unit: int) -> tuple[int, ...]:
    below = value // unit * unit
    return (below, below + unit) if below else (unit,)


def is_transformer(config: RunConfig) -> bool:
    return isinstance(config.model, dict) and config.model.get("_target_") == TransformerConfig._target_
