"""Check degrees against devices, and the batch against both. The axes have their own checks."""

from __future__ import annotations

import math

from hpc_parallel.config.checks import axis_checks, device_memory_checks, pipeline_checks, shares_checks
from hpc_parallel.config.checks.suggestions import multiples_near, near
from hpc_parallel.config.schema import RunConfig, StrategyConfig
from hpc_parallel.layout.axes import AXES, DEGREE
from hpc_parallel.layout.batch_plan import batch_of
from hpc_parallel.layout.counts import count
from hpc_parallel.layout.layout import Layout, divisors, servers
from hpc_parallel.layout.schedules import stages_per_rank
from hpc_parallel.problems import Problem, Problems


def find_problems(config: RunConfig) -> Problems:
    """Yields the problems of degrees, stages and batch."""
    strategy = config.strategy
    devices = config.devices - servers(strategy)
    if config.nodes < 1 or config.gpus_per_node < 1 or devices < 1:
        return
    degrees = {axis: getattr(strategy, axis) for axis in AXES}
    free = [axis for axis, degree in degrees.items() if degree == -1]
    for axis in free[1:]:
        rule = f"leaves two axes open: strategy.{free[0]} is -1 too"
        yield Problem(f"strategy.{axis}", -1, rule, (1,))
    if len(free) > 1 or not all(map(DEGREE.allows, degrees.values())):
        return
    try:
        layout = Layout.resolve(strategy, devices=devices)
    except ValueError:
        yield _degrees_problem(config, strategy, devices, free)
        return
    shares_problems = list(shares_checks.find_problems(config, layout))
    yield from shares_problems
    unshared = shares_checks.without_shares(config) if shares_problems else config
    yield from _batch(unshared, layout)
    yield from axis_checks.find_problems(config, layout)
    yield from device_memory_checks.find_problems(config, layout)


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
    return Problem(f"strategy.{axis}", degree, rule, near(degree, legal))


def _batch(config: RunConfig, layout: Layout) -> Problems:
    """The global batch must split over replicas and microbatches without remainder."""
    training, strategy = config.training, config.strategy
    batch, size, count = training.global_batch_size, training.microbatch_size, strategy.microbatches
    if any(number is not None and number < 1 for number in (batch, size, count)):
        return
    if batch % layout.data:
        rule = f"does not divide by the {layout.data} replicas: each needs the same number of samples"
        unit = layout.data * (size or 1) * (count or 1)
        yield Problem("training.global_batch_size", batch, rule, multiples_near(batch, unit))
        return
    samples = batch // layout.data
    key, value = ("strategy.microbatches", count) if count else ("training.microbatch_size", size)
    try:
        plan = batch_of(config, layout)
    except ValueError:
        assert value is not None
        if count and size and samples % count == 0:
            rule = f"contradicts strategy.microbatches = {count}, with {samples} samples per replica"
            yield Problem("training.microbatch_size", size, rule, (samples // count, None))
        else:
            rule = f"does not divide the {samples} samples per step of each of {layout.data} replicas"
            yield Problem(key, value, rule, near(value, divisors(samples)))
        return
    yield from pipeline_checks.batch_problems(config, layout, plan)
    yield from shares_checks.batch_problems(config, plan)
