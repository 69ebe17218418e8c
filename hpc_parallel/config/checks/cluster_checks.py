"""Check the profiles of a cluster and of a machine."""

from __future__ import annotations

import math
import re
from typing import Any

from hpc_parallel.config import fabric_kinds
from hpc_parallel.config.node_devices import runs_on_cpus
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.script import TASK
from hpc_parallel.config.site_schema import RUNTIMES
from hpc_parallel.config.task_schema import COLLECTIVES
from hpc_parallel.problems import Problem, Problems, as_override, nearest
from hpc_parallel.record.values import integer, number

PARTITION_LIMITS = ("nodes", "time_minutes", "memory_gb", "gpus_per_node")
FITTED = ("latency_s", "bandwidth_bytes_per_s", "fit_error")  # keys of a collective in a machine profile


def find_problems(config: RunConfig) -> Problems:
    for variable, value in config.cluster.environment.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
            suggestion = re.sub(r"^(?=\d)|[^A-Za-z0-9_]", "_", variable)
            key = "cluster.environment"
            near = as_override(f"+{key}.{suggestion}", value)
            yield f"{key}.{variable} is not the name of a variable. Try {near}."
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
    return config.launcher.kind != "local" and config.nodes > 1 and runs_on_cpus(config)


def _srun_flag(flag: str, value: Any) -> Problems:
    key = f"cluster.srun.{flag}"
    if not re.fullmatch(r"[a-z][a-z0-9-]*", flag):
        yield f"{key} is not a flag of srun. Try +cluster.srun.cpu-bind=cores."
    elif isinstance(value, dict | list) or not str(value).isprintable():
        yield Problem(key, value, "must be one printable value, or true for a flag without one")


def _partition(name: str, limits: Any) -> Problems:
    """Limits of a partition are positive numbers; only the number of GPUs may be 0."""
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
    """Waiting ranks must find and report a hang before their collective times out."""
    limit_s, collective_s = config.cluster.hang_timeout_s, config.cluster.collective_timeout_s
    # All ranks notice a hang within a tenth of the limit, and write reports within a fifth of it and 5 s
    # (failure/hang_report.py:grace_s). The other 5 s are room.
    most_s = (collective_s - 10) / 1.3
    if config.task.name == TASK:  # a script sets its own time-outs
        return
    if limit_s is not None and math.isfinite(collective_s) and limit_s > most_s:
        rule = (
            "leaves the ranks no time to tell where they hang, before "
            f"cluster.collective_timeout_s = {collective_s:g} ends them"
        )
        legal = math.floor(most_s) if most_s >= 1 else None
        yield Problem("cluster.hang_timeout_s", limit_s, rule, (legal,))


def machine_problems(config: RunConfig) -> Problems:
    """Check the collectives of a machine profile, which a user copied or typed."""
    for name, group in config.machine.collectives.items():
        key = f"machine.collectives.{name}"
        if not isinstance(group, dict):
            yield Problem(key, group, "must be a table with `ranks` and a table for each collective")
            continue
        ranks = integer(group.get("ranks"))
        if ranks is None or ranks < 1:
            yield Problem(f"{key}.ranks", group.get("ranks"), "must be a whole number of at least 1")
        names = group.get("also", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            yield Problem(f"{key}.also", names, "must be a list of other names of these ranks")
        for operation, fit in group.items():
            if operation not in ("ranks", "also"):
                yield from _fit(f"{key}.{operation}", operation, fit)


def _fit(key: str, operation: Any, fit: Any) -> Problems:
    if operation not in COLLECTIVES:
        close = nearest(str(operation), COLLECTIVES)
        hint = f"Did you mean {close[0]}?" if close else f"The collectives are {', '.join(COLLECTIVES)}."
        yield f"{key} is no collective. {hint}"
    elif not isinstance(fit, dict):
        yield Problem(key, fit, f"must be a table with {', '.join(FITTED)}")
    else:
        for name in fit:
            if name not in FITTED:
                yield f"{key}.{name} is not in a machine profile. The keys are {', '.join(FITTED)}."
        latency_s, error = number(fit.get("latency_s")), number(fit.get("fit_error", 0))
        if latency_s is None or latency_s < 0:
            yield Problem(f"{key}.latency_s", fit.get("latency_s"), "must be a number of at least 0")
        rate = fit.get("bandwidth_bytes_per_s")
        if rate is not None and ((value := number(rate)) is None or value < 1):
            rule = "must be a number of at least 1, or null if the time does not grow with the size"
            yield Problem(f"{key}.bandwidth_bytes_per_s", rate, rule)
        if error is None or error < 0:
            yield Problem(f"{key}.fit_error", fit.get("fit_error"), "must be a number of at least 0")
