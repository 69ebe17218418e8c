"""Warn before a run starts if it asks for more than the partition or this machine has.

The warnings are about nodes, GPUs, memory and time, and about paths that the container of the job would not
see, because nothing mounts them. Slurm decides: depending on the site's settings,
`sbatch` refuses such a job, or queues it and it never starts. sinfo may not show this user all nodes, and a
profile may be old, so this module warns. It refuses only local
runs with more processes than this machine could ever hold.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hpc_parallel.config.checks import allocation_checks
from hpc_parallel.config.job_python import find_environment
from hpc_parallel.config.node_devices import visible_gpus
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.script import TASK
from hpc_parallel.layout.counts import GIB, MIB, least_bytes
from hpc_parallel.layout.layout import divisors, layout_of, processes_per_node
from hpc_parallel.problems import Problem, Problems, as_override
from hpc_parallel.record.values import flatten
from hpc_parallel.slurm.allocation import ALLOCATION
from hpc_parallel.slurm.limits import Limits, limits

# Apptainer mounts the home, the current folder and these, unless an argument says otherwise.
_OF_APPTAINER = ("/tmp", "/var/tmp", "/proc", "/sys", "/dev")
MEMORY_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # of this machine
# The least memory that a local process has to itself: with torch (115 MiB measured); beside a script (18).
_OF_A_PROCESS = {False: 64 * MIB, True: 16 * MIB}
_CONTAINED = ("-c", "--contain", "-C", "--containall", "--no-mount")


def site_warnings(config: RunConfig) -> list[str]:
    """One line for each resource that exceeds the partition's limit; empty if the limits are unknown."""
    launcher = config.launcher
    if launcher.kind == "local":
        return local_warnings(config, memory_bytes=MEMORY_BYTES, environment=os.environ)
    if launcher.kind == ALLOCATION:
        return [f"warning     {line}" for line in allocation_checks.warnings(config)]
    most = limits_of(config)
    where = f"partition {launcher.partition}" if launcher.partition else "the default partition"
    warnings = [*_of_the_job(config, most, where), *_of_a_node(config, most, where)]
    return [f"warning     {line}" for line in warnings]


def _of_the_job(config: RunConfig, most: Limits, where: str) -> Iterator[str]:
    """Warnings about nodes and time."""
    launcher = config.launcher
    if most.nodes is not None and most.nodes < config.nodes + launcher.spares:
        plural, spares = "s" * (most.nodes > 1), launcher.spares
        key = f"nodes={config.nodes}" + (f" and launcher.spares={spares}" if spares else "")
        legal = f"nodes={most.nodes}" + " launcher.spares=0" * bool(spares)
        if most.nodes > spares:
            legal = f"nodes={most.nodes - spares}"
        yield f"{key}: {where} has {most.nodes} node{plural}. Try {legal}."
    if most.time_minutes is not None and most.time_minutes < launcher.time_minutes:
        key = f"launcher.time_minutes={launcher.time_minutes}"
        legal = f"Try launcher.time_minutes={most.time_minutes}."
        yield f"{key}: {where} allows {most.time_minutes} minutes. {legal}"


def _of_a_node(config: RunConfig, most: Limits, where: str) -> Iterator[str]:
    """Warnings about memory, GPUs and CPUs."""
    launcher, devices = config.launcher, config.gpus_per_node
    if (launcher.memory_gb or 0) * 1024 > (most.memory_mb or math.inf):
        assert most.memory_mb is not None
        most_gb = most.memory_mb // 1024 or math.floor(most.memory_mb / 1024 * 1000) / 1000
        largest = f"the largest node of {where} has {most.memory_mb / 1024:.1f} GB"
        key = f"launcher.memory_gb={launcher.memory_gb:g}"
        yield f"{key}: {largest}. Try launcher.memory_gb={most_gb:g}."
    if most.gpus_per_node is not None and most.gpus_per_node < devices:
        advice = f"{most.gpus_per_node}. Try gpus_per_node={most.gpus_per_node}."
        if not most.gpus_per_node:
            advice = "no GPU, and others have. Try another launcher.partition, or cluster.gpus=false."
        yield f"gpus_per_node={devices}: nodes of {where} have {advice}"
    needed = launcher.cpus_per_device * devices
    if most.cpus is not None and most.cpus < needed:
        key = f"launcher.cpus_per_device={launcher.cpus_per_device}"
        largest = f"the largest node of {where} has {most.cpus}"
        fewer = f"gpus_per_node={most.cpus} launcher.cpus_per_device=1"
        legal = f"launcher.cpus_per_device={most.cpus // devices}" if devices <= most.cpus else fewer
        yield f"{key}: a node needs {needed} CPUs, and {largest}. Try {legal}."


def limits_of(config: RunConfig) -> Limits:
    """The limits of the run's partition: those of the cluster profile, else those that sinfo lists."""
    partition = config.launcher.partition
    written = config.cluster.partitions.get(partition or "")
    if written is None:
        cluster = config.cluster
        return limits(partition=partition, gpus=cluster.gpus, gpu_type=cluster.gpu_type)
    memory_gb = written.get("memory_gb")
    return Limits(
        nodes=written.get("nodes"),
        memory_mb=memory_gb and 1024 * memory_gb,
        time_minutes=written.get("time_minutes"),
        gpus_per_node=written.get("gpus_per_node") if config.cluster.gpus else None,
    )


def local_problems(config: RunConfig, *, memory_bytes: int = MEMORY_BYTES) -> Problems:
    """More processes than this machine could hold even if they did nothing."""
    each, devices = _OF_A_PROCESS[config.task.name == TASK], config.gpus_per_node
    if config.launcher.kind != "local" or config.nodes * devices * each <= memory_bytes:
        return
    per_node = processes_per_node(config.strategy, gpus_per_node=devices)
    rule = f"starts {config.nodes * per_node} processes here, each with {each // MIB} MB or more"
    rule += f", and this machine has {memory_bytes / GIB:.1f} GB"
    key, count, most = "nodes", config.nodes, memory_bytes // each // per_node
    if not most:
        key, count, most = "gpus_per_node", devices, max(1, memory_bytes // each // config.nodes)
    if most < count:
        yield Problem(key, count, rule, (max(number for number in divisors(count) if number <= most),))


def local_warnings(config: RunConfig, *, memory_bytes: int, environment: Mapping[str, str]) -> list[str]:
    """A line if the weights and their training state exceed this machine's memory; empty with a GPU.

    Only our decoders are counted (`layout/counts.py`).
    """
    if config.device == "cuda" or (config.device == "auto" and visible_gpus(environment)):
        return []
    least = least_bytes(config, layout_of(config.strategy, devices=config.devices))
    per_node = processes_per_node(config.strategy, gpus_per_node=config.gpus_per_node)
    needed = (least or 0) * config.nodes * per_node
    if needed <= memory_bytes:
        return []
    return [
        f"warning     the processes of this run need at least {needed / GIB:.1f} GB together, and this "
        f"machine has {memory_bytes / GIB:.1f} GB. Try a smaller model or fewer processes."
    ]


def container_warnings(config: RunConfig, *, run_folder: Path, source: Iterable[Path] = ()) -> Iterator[str]:
    """One line that names the user's paths outside of all mounts; no line without a container.

    run_folder: it is always mounted; source: folders from which the job imports.
    """
    launcher = config.launcher
    if launcher.container is None or launcher.kind == "local":
        return
    mounted = [run_folder, *_mounted(config)]
    paths = [*_paths(config), *(("PYTHONPATH", path) for path in source)]
    hidden = [(key, place) for key, path in paths if (place := _hidden(path, mounted)) is not None]
    if hidden:
        named = ", ".join(f"{place} ({key})" for key, place in hidden)
        mounts = [*launcher.container_mounts, *dict.fromkeys(str(place) for _, place in hidden)]
        yield f"the container does not see {named}. Try {as_override('launcher.container_mounts', mounts)}."


def _mounted(config: RunConfig) -> Iterator[Path]:
    """The folders of the host that the container has under the same path."""
    for mount in config.launcher.container_mounts:
        source, _, target = mount.partition(":")
        if target.partition(":")[0] in ("", source):
            yield Path(source)
    arguments = config.cluster.container_arguments or []
    if config.cluster.container == "apptainer" and not any(word in _CONTAINED for word in arguments):
        yield from map(Path, _OF_APPTAINER)
        if "--no-home" not in arguments:
            yield from (Path.home(), Path.cwd())


def _paths(config: RunConfig) -> Iterator[tuple[str, Path]]:
    """Yields (key, path) for each path outside of the run folder that the ranks read."""
    launcher = config.launcher
    environment = find_environment(launcher.conda) if launcher.conda is not None else None
    texts: dict[str, Any] = {"weights": config.weights, "launcher.venv": launcher.venv}
    texts |= {"launcher.conda": None if environment is None else str(environment.folder)}
    texts |= {f"data.{key}": value for key, value in flatten(dict(config.data)).items()}
    texts["task.storage"] = getattr(config.task, "storage", None)
    for key, text in texts.items():
        if isinstance(text, str) and (os.sep in text or key.endswith("path")):
            path = Path(os.path.expanduser(text)).absolute()
            if path.exists():
                yield key, path


def _hidden(path: Path, mounted: Iterable[Path]) -> Path | None:
    """The path, or the target of its links, if no mount contains it; None if mounts contain both."""
    places = (path, path.resolve())
    return next((place for place in places if not any(place.is_relative_to(root) for root in mounted)), None)
