"""The rank, node and world size of a process, from the variables of its launcher.

Everything about launchers is in the table below. Its variables were captured from real starts of Slurm
22.05, Open MPI, MPICH and torchrun. The names of MVAPICH and Cray PALS are untested.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from hpc_parallel.slurm.short_forms import expand_hosts, expand_tasks


class WorldError(RuntimeError):
    """The launcher's variables are incomplete or contradict each other."""


@dataclass(frozen=True)
class RankVariables:
    """The variables of one launcher; the first name that is set is used.

    `node` and `nodes` are empty if the launcher does not set them. `attempt` identifies the start: it
    differs at every start and is the same on all ranks, if the launcher offers this.
    """

    name: str
    marks: tuple[str, ...]  # if one of them is set, this launcher started the process
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...]
    node: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    attempt: tuple[str, ...] = ()
    required: tuple[str, ...] = ()


def _torchrun(*marks: str) -> RankVariables:
    return RankVariables(
        name="torchrun",
        marks=marks,
        rank=("RANK",),
        world_size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_world_size=("LOCAL_WORLD_SIZE",),
        node=("GROUP_RANK",),
        nodes=("GROUP_WORLD_SIZE",),
        attempt=("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
        required=("TORCHELASTIC_RUN_ID",),
    )


def _pmi(*marks: str) -> RankVariables:
    return RankVariables(
        name="mpi",
        marks=marks,
        rank=("PMI_RANK",),
        world_size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),  # Hydra (MPICH, Intel MPI); Cray PALS
        local_world_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        attempt=("PMI_JOBID",),
    )


# Innermost first: torchrun may run inside srun, and mpirun inside an allocation, but never the reverse.
# Variables inherited from the outer launcher describe its own processes.
LAUNCHERS = (
    _torchrun("TORCHELASTIC_RUN_ID"),
    RankVariables(
        name="openmpi",
        marks=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        rank=("OMPI_COMM_WORLD_RANK",),
        world_size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        # OMPI_COMM_WORLD_NODE_RANK is a rank within the node, not the index of the node.
        attempt=("PMIX_NAMESPACE",),
    ),
    RankVariables(
        name="mpi",
        marks=("MV2_COMM_WORLD_RANK",),
        rank=("MV2_COMM_WORLD_RANK",),
        world_size=("MV2_COMM_WORLD_SIZE",),
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
        local_world_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    _pmi("MPI_LOCALRANKID"),  # only Hydra sets it, and its proxies are themselves tasks of srun
    RankVariables(
        name="slurm",
        # The batch shell, which is no step, has SLURM_PROCID too.
        marks=("SLURM_STEP_ID",),
        rank=("SLURM_PROCID",),
        world_size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        local_world_size=("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),  # for all nodes: 2(x2),1
        node=("SLURM_NODEID",),
        nodes=("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
        attempt=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
        required=("SLURM_JOB_ID",),
    ),
    _pmi("PMI_RANK", "PMI_SIZE"),  # after Slurm, whose PMI plugins set these with the same meaning
    _torchrun("RANK", "WORLD_SIZE", "LOCAL_RANK"),  # set by hand: reported as incomplete, not ignored
)


@dataclass(frozen=True)
class World:
    """The position of this process: rank of world_size, local_rank on host, node of nodes.

    launcher: slurm, torchrun, openmpi, mpi or alone; attempt: identifies this start on all ranks, valid
    as a file name. MPICH and MVAPICH set nothing unique, so a file of that name may belong to an earlier
    start. hosts, tasks: the name and the number of ranks of each node, by node index; () if unknown.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    nodes: int
    host: str
    launcher: str
    attempt: str
    hosts: tuple[str, ...] = ()
    tasks: tuple[int, ...] = ()

    @classmethod
    def discover(cls, environment: Mapping[str, str]) -> World:
        """Read the innermost launcher's variables; without a launcher the process is rank 0 of 1.

        Raises WorldError that names every variable that is missing or invalid.
        """
        started = set(environment)
        if environment.get("SLURM_STEP_ID", "").startswith("-"):
            started.remove("SLURM_STEP_ID")  # of the batch shell of Slurm 26.05, which is no step
        launcher = next((row for row in LAUNCHERS if not started.isdisjoint(row.marks)), None)
        if launcher is None:
            return cls(0, 1, 0, 1, 0, 1, host=socket.gethostname(), launcher="alone", attempt="alone")
        values = _values(launcher, environment)
        if launcher.name == "slurm":
            world = _slurm_world(launcher, values, environment)
        else:
            world = _counted_world(launcher, values, environment)
        _check(world)
        return world

    @property
    def one_machine(self) -> bool:
        """Whether all ranks run on this machine, which may simulate several nodes."""
        return self.local_world_size == self.world_size

    def where(self, rank: int) -> str:
        """The host of a rank. If the host is unknown, a text that says what is known."""
        if rank == self.rank or self.one_machine:
            return self.host
        if self.hosts and self.tasks:
            ends = accumulate(self.tasks)
            return self.hosts[next(node for node, end in enumerate(ends) if rank < end)]
        if self.launcher == "slurm":  # the ranks are not placed in blocks
            return f"one of {', '.join(self.hosts)}" if self.hosts else "an unknown host"
        node = rank // self.local_world_size
        return self.host if node == self.node else f"node {node}"


def _values(launcher: RankVariables, environment: Mapping[str, str]) -> dict[str, str]:
    """The values that the launcher set, by field of `RankVariables`."""
    values: dict[str, str] = {}
    missing = [name for name in launcher.required if not environment.get(name)]
    for field in ("rank", "world_size", "local_rank", "local_world_size", "node", "nodes"):
        names: tuple[str, ...] = getattr(launcher, field)
        value = next((environment[name] for name in names if environment.get(name)), None)
        if value is not None:
            values[field] = value
        elif names:
            missing.append(" or ".join(names))
    if missing:
        marks = ", ".join(name for name in launcher.marks if name in environment)
        raise WorldError(
            f"{marks} is set, so {launcher.name} should have started this process, but there is no "
            f"{', no '.join(missing)}. Start all ranks with one launcher, or unset {marks}."
        )
    return values


def _integer(launcher: RankVariables, field: str, text: str) -> int:
    if not re.fullmatch(r"\d+", text, re.ASCII):
        names: tuple[str, ...] = getattr(launcher, field)
        raise WorldError(f"{launcher.name} says {' or '.join(names)}={text!r}, which is no number.")
    return int(text)


def _slurm_world(launcher: RankVariables, values: dict[str, str], environment: Mapping[str, str]) -> World:
    try:
        tasks = expand_tasks(values["local_world_size"])
    except ValueError:
        name = " or ".join(launcher.local_world_size)
        raise WorldError(f"slurm says {name}={values['local_world_size']!r}; 2(x2),1 was expected.") from None
    node, nodes, rank, world_size, local_rank = (
        _integer(launcher, field, values[field])
        for field in ("node", "nodes", "rank", "world_size", "local_rank")
    )
    if len(tasks) != nodes or sum(tasks) != world_size or node >= nodes:
        raise WorldError(
            f"slurm says SLURM_NODEID={node} of {nodes} nodes with {values['local_world_size']} tasks on "
            f"them, {world_size} in all, which contradicts itself."
        )
    try:
        hosts = expand_hosts(environment.get("SLURM_STEP_NODELIST", ""))
    except ValueError:
        hosts = ()
    if len(hosts) != nodes:
        hosts = ()  # only messages use the names, so a list of another length is no error
    in_blocks = (
        environment.get("SLURM_DISTRIBUTION", "block").startswith("block")
        and rank == sum(tasks[:node]) + local_rank
    )
    host = environment.get("SLURMD_NODENAME") or (hosts[node] if hosts else socket.gethostname())
    return World(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=tasks[node],
        node=node,
        nodes=nodes,
        host=host,
        launcher="slurm",
        attempt=_attempt(launcher, environment),
        hosts=hosts,
        tasks=tasks if in_blocks else (),
    )


def _counted_world(launcher: RankVariables, values: dict[str, str], environment: Mapping[str, str]) -> World:
    """The world from torchrun, which sets the node, or from MPI, where the node follows from the rank.

    With MPI every node must have the same number of ranks.
    """
    numbers: dict[str, Any] = {field: _integer(launcher, field, text) for field, text in values.items()}
    if not launcher.node:
        rank, world_size = numbers["rank"], numbers["world_size"]
        local_rank, local_world_size = numbers["local_rank"], numbers["local_world_size"]
        if not local_world_size or world_size % local_world_size or rank % local_world_size != local_rank:
            raise WorldError(
                f"{launcher.name} says rank {rank} of {world_size} is local rank {local_rank} of "
                f"{local_world_size}: every node must have as many ranks, in blocks. Try mpirun with "
                "--map-by slot (Open MPI) or -ppn (MPICH, Intel MPI)."
            )
        numbers["node"] = rank // local_world_size
        numbers["nodes"] = world_size // local_world_size
    return World(
        **numbers,
        host=socket.gethostname(),
        launcher=launcher.name,
        attempt=_attempt(launcher, environment),
    )


def _attempt(launcher: RankVariables, environment: Mapping[str, str]) -> str:
    parts = [launcher.name]
    for name in launcher.attempt:
        default = "0" if name.endswith("RESTART_COUNT") else ""  # Slurm sets it only after the first requeue
        parts.append(environment.get(name, default))
    return re.sub(r"[^A-Za-z0-9._-]", "_", "-".join(filter(None, parts)))[:120]


def _check(world: World) -> None:
    bounds = (
        ("rank", world.rank, world.world_size),
        ("local rank", world.local_rank, world.local_world_size),
        ("node", world.node, world.nodes),
    )
    problems = [f"{name} {value} of {size}" for name, value, size in bounds if not 0 <= value < size]
    if world.local_world_size > world.world_size:
        problems.append(f"{world.local_world_size} ranks on a node of {world.world_size} in all")
    if problems:
        raise WorldError(f"{world.launcher} says {', '.join(problems)}, which can't be.")
