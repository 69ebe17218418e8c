"""Check what `strategy.execution` requires: one node, a worker, whole replicas."""

from __future__ import annotations

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.layout.axes import AVERAGED_AXES, AXES
from hpc_parallel.layout.layout import DATAPARALLEL, PARAMETER_SERVER, SPMD
from hpc_parallel.problems import Problem, Problems

WHOLE = (DATAPARALLEL, PARAMETER_SERVER)  # the executions whose devices hold whole models


def find_problems(config: RunConfig) -> Problems:
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
