"""Check degrees, memory and shares against devices, the batch against all, and `strategy.execution`.

The axes have their own checks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hpc_parallel.config.checks import axis_checks, pipeline_checks
from hpc_parallel.config.checks.suggestions import multiples_near, near
from hpc_parallel.config.schema import RunConfig, StrategyConfig
from hpc_parallel.layout.axes import AVERAGED_AXES, AXES, DEGREE
from hpc_parallel.layout.batch_plan import batch_of, shares_batch_problems
from hpc_parallel.layout.counts import GIB, count, least_bytes, trains
from hpc_parallel.layout.layout import (
    DATAPARALLEL,
    PARAMETER_SERVER,
    SPMD,
    Layout,
    divisors,
    processes_per_node,
    servers,
)
from hpc_parallel.layout.schedules import stages_per_rank
from hpc_parallel.layout.shares import KEY, MEASURED, MOST_RATIO, divided, fits
from hpc_parallel.layout.step_facts import memory_copies
from hpc_parallel.problems import Problem, Problems

WHOLE = (DATAPARALLEL, PARAMETER_SERVER)  # the executions whose devices hold whole models
MOST_SUGGESTED = 8  # numbers in one suggestion
TRAINING_TASKS = ("train", "proof")  # `proof` is the task of the command parity


def find_problems(config: RunConfig) -> Problems:
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
    shares_problems = list(_shares(config, layout))
    yield from shares_problems
    unshared = replace(config, strategy=replace(config.strategy, shares=None)) if shares_problems else config
    yield from _batch(unshared, layout)
    yield from axis_checks.find_problems(config, layout)
    yield from _memory(config, layout)
    yield from _host_memory(config, layout)


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
    yield from shares_batch_problems(config, plan)


def execution_problems(config: RunConfig) -> Problems:
    execution = config.strategy.execution
    yield from _whole_replicas(config, execution)
    if execution == DATAPARALLEL:
        yield from _one_process(config)
    elif execution == PARAMETER_SERVER and config.devices == 1:
        rule = "leaves the server alone: it needs at least one worker"
        yield Problem("gpus_per_node", 1, rule, (2,), _all_replicas(config))


def _whole_replicas(config: RunConfig, execution: str) -> Problems:
    for axis in AXES:
        degree = getattr(config.strategy, axis)
        if axis != "replicate" and degree != 1:
            rule = f"can't be combined with strategy.execution = {execution}, whose devices hold whole models"
            yield Problem(f"strategy.{axis}", degree, rule, (1,), _all_replicas(config))


def _one_process(config: RunConfig) -> Problems:
    if config.nodes > 1:
        rule = f"is more than one node, and {DATAPARALLEL} drives the devices of one node from one process"
        yield Problem("nodes", config.nodes, rule, (1,), _all_replicas(config))
    # Both switches would run a part of one replica's forward pass without the other replicas.
    for switch, off in (("activation_checkpointing", "none"), ("compile", False)):
        if (value := getattr(config.training, switch)) != off:
            rule = f"can't be combined with strategy.execution = {DATAPARALLEL}"
            yield Problem(f"training.{switch}", value, rule, (off,))


def compression_problems(config: RunConfig) -> Problems:
    """Only DistributedDataParallel has a hook for compression."""
    strategy = config.strategy
    replicas = any(getattr(strategy, axis) != 1 for axis in AVERAGED_AXES)
    sliced = strategy.shard != 1 or strategy.tensor != 1
    if strategy.execution != SPMD or sliced or not replicas:
        rule = "needs whole replicas whose gradients DistributedDataParallel averages (strategy=data)"
        yield Problem("strategy.gradient_compression", strategy.gradient_compression, rule, ("none",))


def _all_replicas(config: RunConfig) -> tuple[str, ...]:
    return () if config.strategy.replicate == -1 else ("strategy.replicate=-1",)


def _memory(config: RunConfig, layout: Layout) -> Problems:
    """Refuse a reference decoder whose weights, gradients and optimizer state alone exceed a device's memory.

    `config/site_limits.py` compares the memory that a job requests (`launcher.memory_gb`) with the partition.
    """
    memory_gb = config.cluster.device_memory_gb
    least = None if memory_gb is None else least_bytes(config, layout)
    if memory_gb is None or least is None or least <= memory_gb * GIB:
        return
    held = "weights, gradients and optimizer state" if trains(config) else "weights"
    rule = (
        f"is less than the {least / GIB:.1f} GB of {held} that a device holds at least in this layout "
        f"({layout}). Use more devices with strategy=fsdp, or a smaller model"
    )
    yield Problem("cluster.device_memory_gb", memory_gb, rule)


def _host_memory(config: RunConfig, layout: Layout) -> Problems:
    """Refuse copies in memory for which the memory of the job on each node is too small."""
    every, memory_gb = config.training.memory_checkpoint_every, config.launcher.memory_gb
    if every is None or memory_gb is None or config.launcher.kind == "local":
        return
    if (least := least_bytes(config, layout, gradients=False)) is None:
        return
    copies = memory_copies(config)
    ranks = processes_per_node(config.strategy, gpus_per_node=config.gpus_per_node)
    if (needed := copies * ranks * least) > memory_gb * GIB:
        state = f"{copies} copies of the {least / GIB:.1f} GB of {ranks} rank{'s' * (ranks > 1)}"
        rule = (
            f"needs at least {needed / GIB:.1f} GB on each node ({state}), and the job has "
            f"launcher.memory_gb={memory_gb:g}"
        )
        yield Problem("training.memory_checkpoint_every", every, rule, (None,))


def _shares(config: RunConfig, layout: Layout) -> Problems:
    """`strategy.shares`: one speed for each part."""
    shares = config.strategy.shares
    if shares is None:
        return
    if reason := _unusable(config, layout):
        yield Problem(KEY, shares, f"can't be used: {reason}", (None,))
    elif shares != MEASURED:
        parts = divided(layout)
        what = f"{parts} {'ranks of the pipeline' if layout.pipeline > 1 else 'replicas'}"
        if rule := _broken_rule(shares, parts=parts, what=what):
            near = _near_shares(shares, parts=parts)
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


def _near_shares(shares: Any, *, parts: int) -> list[Any]:
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
    return plan.shares is None or fits(plan.data, plan.microbatch_size, plan.shares)


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
