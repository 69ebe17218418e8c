"""Check a run against the allocation that its shell is in."""

from __future__ import annotations

import os
from collections.abc import Iterator

from hpc_parallel.config.node_devices import gpus_of_allocation
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.layout.layout import processes_per_node
from hpc_parallel.problems import Problem, Problems
from hpc_parallel.slurm.allocation import ALLOCATION, surroundings

_SIMULATE = "launcher=local simulates {} on this machine, and launcher=slurm submits a job of its own"


def find_problems(config: RunConfig) -> Problems:
    """The run must fit: it can't get more nodes, or devices of a node, than the allocation has."""
    allocation, reason, _ = surroundings(os.environ)
    if allocation is None:
        yield Problem("launcher.kind", ALLOCATION, f"needs an allocation: {reason}", ("auto", "local"))
        return
    count = len(allocation.hosts)
    if config.nodes > count:
        rule = f"is more than the {count} node{'s' * (count > 1)} of {allocation}"
        rule += f". {_SIMULATE.format(f'{config.nodes} nodes')}"
        yield Problem("nodes", config.nodes, rule, (count,))
    gpus = gpus_of_allocation({"gpus": config.cluster.gpus, "gpu_flag": config.cluster.gpu_flag})
    if gpus and config.device != "cpu" and config.gpus_per_node > gpus:
        rule = f"is more than the {gpus} GPU{'s' * (gpus > 1)} on each node of {allocation}"
        rule += f". {_SIMULATE.format(f'{config.gpus_per_node} devices')}"
        yield Problem("gpus_per_node", config.gpus_per_node, rule, (gpus,))


def warnings(config: RunConfig) -> Iterator[str]:
    """What the run does not get from the allocation."""
    allocation = surroundings(os.environ).allocation
    if allocation is None:
        return
    if not config.cluster.gpus and not allocation.gpus and config.device == "auto":
        yield f"{allocation} has no GPU, so this run uses CPUs"
    processes = processes_per_node(config.strategy, gpus_per_node=config.gpus_per_node)
    needed = config.gpus_per_node * config.launcher.cpus_per_device
    if needed > allocation.cpus:
        given = f"{allocation.cpus} CPU{'s' * (allocation.cpus > 1)}"
        yield (
            f"launcher.cpus_per_device={config.launcher.cpus_per_device}: a node of {allocation} has {given} "
            f"for {processes} process{'es' * (processes > 1)}, not {needed}"
        )
