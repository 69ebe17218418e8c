"""Check what a cluster profile says of its site."""

from __future__ import annotations

import math
import re
from typing import Any

from hpc_parallel.config import fabric_kinds
from hpc_parallel.config.node_devices import launcher_kind, runs_on_cpus
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.script import TASK
from hpc_parallel.config.site_schema import RUNTIMES
from hpc_parallel.problems import Problem, Problems

PARTITION_LIMITS = ("nodes", "time_minutes", "memory_gb", "gpus_per_node")


def find_problems(config: RunConfig) -> Problems:
    for variable, value in config.cluster.environment.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
            suggestion = re.sub(r"^(?=\d)|[^A-Za-z0-9_]", "_", variable)
            key = "cluster.environment"
            yield f"{key}.{variable} is not the name of a variable. Try +{key}.{suggestion}={value}."
    for flag, value in config.cluster.srun.items():
        yield from _srun_flag(flag, value)
    for name, limits in config.cluster.partitions.items():
        yield from _partition(name, limits)
    if config.fabric.require and config.cluster.fabric == fabric_kinds.TCP:
        rule = "can't be with fabric.require=true, which stops a run whose data goes through sockets"
        yield Problem("cluster.fabric", fabric_kinds.TCP, rule, (fabric_kinds.AUTO,))
    elif config.fabric.require and _meets_on_cpus(config):
        yield Problem("fabric.require", True, "needs GPUs: on CPUs, gloo always uses sockets", (False,))
    yield from _container(config)
    yield from _start(config)
    yield from _hang_timeout(config)


def _meets_on_cpus(config: RunConfig) -> bool:
    """Whether the data between several hosts will certainly go through gloo."""
    is_job = launcher_kind(config.launcher.kind) != "local"
    return is_job and config.nodes > 1 and runs_on_cpus(config)


def _srun_flag(flag: str, value: Any) -> Problems:
    key = f"cluster.srun.{flag}"
    if not re.fullmatch(r"[a-z][a-z0-9-]*", flag):
        yield f"{key} is not a flag of srun. Try +cluster.srun.cpu-bind=cores."
    elif isinstance(value, dict | list) or not str(value).isprintable():
        yield Problem(key, value, "must be one printable value, or true for a flag without one")


def _partition(name: str, limits: Any) -> Problems:
    """Limits of a partition: positive numbers, or no GPU at all."""
    key = f"cluster.partitions.{name}"
    if not isinstance(limits, dict):
        yield Problem(key, limits, f"must be a table with any of {', '.join(PARTITION_LIMITS)}")
        return
    for limit, value in limits.items():
        if limit not in PARTITION_LIMITS:
            yield f"{key}.{limit} is no limit of a partition. The limits are {', '.join(PARTITION_LIMITS)}."
        elif type(value) is int and value == 0 and limit == "gpus_per_node":
            continue
        elif value is not None and (type(value) not in (int, float) or value <= 0):
            yield Problem(f"{key}.{limit}", value, "must be a positive number, or null for no limit", (None,))


def _container(config: RunConfig) -> Problems:
    cluster, launcher = config.cluster, config.launcher
    texts = {"container": launcher.container} if launcher.container is not None else {}
    texts |= {f"container_mounts[{at}]": mount for at, mount in enumerate(launcher.container_mounts)}
    scratch = cluster.scratch or ""
    if launcher.container is not None and set(scratch) & set(",:"):
        rule = "is mounted into the container, so it can't have a comma or a colon"
        yield Problem("cluster.scratch", scratch, rule, (None,))
    for key, value in texts.items():
        if not value.strip() or not value.isprintable() or "," in value:
            yield Problem(f"launcher.{key}", value, "must be one printable line without a comma")
    if launcher.container is None:
        if launcher.container_mounts:
            rule = "needs an image: launcher.container=IMAGE"
            yield Problem("launcher.container_mounts", launcher.container_mounts, rule, ([],))
    elif cluster.container is None:
        rule = "does not say what runs launcher.container"
        yield Problem("cluster.container", None, rule, RUNTIMES)
    elif cluster.container == "pyxis" and cluster.start == "mpirun":
        rule = "can't be with cluster.start=mpirun: pyxis is a plugin of srun"
        yield Problem("cluster.container", "pyxis", rule, ("apptainer",))


def _start(config: RunConfig) -> Problems:
    binding = str(config.cluster.srun.get("cpu-bind", ""))
    if config.cluster.start == "torchrun" and re.search("mask_|map_", binding):
        rule = "is for one task a device, and cluster.start=torchrun starts one a node"
        yield Problem("cluster.srun.cpu-bind", binding, rule, ("cores",))


def _hang_timeout(config: RunConfig) -> Problems:
    """Ranks that wait must find a hang, and tell of it, before their collective gives up."""
    limit_s, collective_s = config.cluster.hang_timeout_s, config.cluster.collective_timeout_s
    # A tenth for all to look, a fifth and 5 s for all to write (supervise/hang_report.py), some room.
    most_s = (collective_s - 10) / 1.3
    if config.task.name == TASK:  # its time-outs are its own
        return
    if limit_s is not None and math.isfinite(collective_s) and limit_s > most_s:
        rule = (
            "leaves the ranks no time to tell where they hang, before "
            f"cluster.collective_timeout_s = {collective_s:g} ends them"
        )
        legal = math.floor(most_s) if most_s >= 1 else None
        yield Problem("cluster.hang_timeout_s", limit_s, rule, (legal,))
