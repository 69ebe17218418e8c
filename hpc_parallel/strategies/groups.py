"""Every process group of a task, made in one place and in one order, before anything uses one.

All ranks of the world make the groups together, also ranks that are in none of them, because NCCL splits a
communicator with all its ranks at once. torch names a split after the number of groups that a rank has.
Therefore groups of only some ranks come last: a later split would have different names on different ranks,
and these ranks would wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.layout.axes import AVERAGED_AXES, BATCH_AXES, SAMPLE_AXES
from hpc_parallel.layout.layout import DATAPARALLEL, Layout, servers
from hpc_parallel.layout.schedules import schedule_of
from hpc_parallel.strategies.mesh import axis_of, build_mesh, joint, slicing_axis
from hpc_parallel.torch_internals import set_timeout

SAVING = "saving"  # the description of the group of saves, as the flight recorder shows it


@dataclass(frozen=True)
class Groups:
    """The groups of this rank beside the default group.

    mesh: has a group for each axis, and one for each set of axes that is used as one.
    gradients: all ranks of this rank's pipeline, for gradients between stages; None: use the axis's group.
    ends: the first and last rank of this rank's pipeline; None on ranks between them or without a pipeline.
    saving: all ranks, on the CPU, for saves; None in a task that saves nothing.
    """

    mesh: DeviceMesh
    gradients: dist.ProcessGroup | None = None
    ends: dist.ProcessGroup | None = None
    saving: dist.ProcessGroup | None = None


def backend_of(device_type: str, group: dist.ProcessGroup | None = None) -> str:
    """The backend for tensors of a device type. torch keeps `cpu:gloo,cuda:nccl` for a group of both."""
    pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return dict(pairs)[device_type]


def carries(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether `group` has a backend for tensors on devices of this type."""
    return any(pair.split(":")[0] == device_type for pair in dist.get_backend_config(group).split(","))


def make_groups(config: RunConfig, layout: Layout, *, device_type: str, saves: bool = True) -> Groups:
    """Make the groups that `config` needs. All ranks of the default process group must call it together.

    saves: whether this process may write checkpoints.
    """
    strategy, task = config.strategy, config.task.name
    saving = make_saving_group(config) if saves and task in ("train", "proof") else None
    ranks = Layout() if strategy.execution == DATAPARALLEL else layout
    mesh = build_mesh(ranks, device_type=device_type, first=servers(strategy))
    join_axes(mesh, generates=task == "generate")
    schedule = schedule_of(strategy)
    sends_back = schedule.two_way and task not in ("infer", "generate")
    gradients = gradients_group(mesh) if sends_back else None
    share_ends = task != "generate" and not schedule.v_shaped
    ends = ends_group(mesh) if share_ends else None
    set_timeout(timedelta(seconds=config.cluster.collective_timeout_s), except_group=saving)
    return Groups(mesh, gradients, ends, saving)


def make_saving_group(config: RunConfig) -> dist.ProcessGroup:
    """The group of all ranks over which they write checkpoints. All ranks must call it together.

    Its time-out is longer than that of collectives: a rank may write long after its peers.
    """
    timeout = timedelta(seconds=config.cluster.checkpoint_timeout_s)
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout, group_desc=SAVING)
    return group


def join_axes(mesh: DeviceMesh, *, generates: bool) -> None:
    """Make the groups of several axes. The mesh keeps them, so that `joint` makes no new group later."""
    slices = slicing_axis(mesh)
    slicing_axis(mesh, of_experts=True)
    joint(mesh, *BATCH_AXES, *SAMPLE_AXES)
    if generates:
        joint(mesh, "pipeline", "tensor")
    elif slices is None:
        joint(mesh, *AVERAGED_AXES)
        joint(mesh, "replicate", *SAMPLE_AXES)  # of the same experts


def ends_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The group of this pipeline's first and last rank, which share tied weights; None on other ranks."""
    if (axis := axis_of(mesh, "pipeline")) is None or axis.size() == 2:
        return None if axis is None else axis.get_group()
    return group_of_each([[ranks[0], ranks[-1]] for ranks in pipelines(mesh)], name="tied ends")


def gradients_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """A second group of this rank's pipeline, for gradients; None without a pipeline.

    Our groups are connected early. NCCL then runs the sends and receives of a group one after the other, and
    torch recommends more groups (`pointToPoint` in ProcessGroupNCCL.cpp).
    """
    if axis_of(mesh, "pipeline") is None:
        return None
    return group_of_each(pipelines(mesh), name="gradients between stages")


def pipelines(mesh: DeviceMesh) -> list[list[int]]:
    """The global ranks of each pipeline, in the order of its stages."""
    assert mesh.mesh_dim_names is not None
    dim = mesh.mesh_dim_names.index("pipeline")
    ranks: list[list[int]] = mesh.mesh.movedim(dim, -1).reshape(-1, mesh.size(dim)).tolist()
    return ranks


def group_of_each(members: Iterable[list[int]], *, name: str) -> dist.ProcessGroup | None:
    """Make a group of each list of ranks, in this order on all ranks; returns the one with this rank."""
    own_group = None
    for ranks in members:
        group = dist.new_group(ranks, group_desc=name)
        if dist.get_rank() in ranks:
            own_group = group
    return own_group
