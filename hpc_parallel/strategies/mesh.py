"""The device mesh of a layout: its used axes, outermost first, and the position of a rank on them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hpc_parallel import torch_internals
from hpc_parallel.layout.axes import SAMPLE_AXES
from hpc_parallel.layout.layout import Layout
from hpc_parallel.strategies.ranges import marked


def build_mesh(layout: Layout, *, device_type: str, first: int = 0) -> DeviceMesh:
    """Build the mesh of the ranks from `first` on. Earlier ranks call this too, but are not in the mesh.

    The mesh has one dimension for each axis of a degree above one. A shard axis of degree 1 stays if
    fully_shard holds the weights; a single device has a replicate axis of degree 1.
    """
    used = {
        axis: degree
        for axis, degree in layout.degrees.items()
        if degree > 1 or (axis == "shard" and layout.by_fully_shard)
    } or {"replicate": 1}
    ranks = torch.arange(first, first + layout.devices).reshape(tuple(used.values()))
    return DeviceMesh(device_type, ranks, mesh_dim_names=tuple(used))


def build_host_mesh(nodes: int, *, device_type: str) -> DeviceMesh:
    """Build a mesh of all ranks with the axes `across nodes` and `inside a node`."""
    ranks = torch.arange(dist.get_world_size()).reshape(nodes, -1)
    return DeviceMesh(device_type, ranks, mesh_dim_names=("across nodes", "inside a node"))


def slicing_axis(mesh: DeviceMesh, *, of_experts: bool = False) -> DeviceMesh | None:
    """The axis over which fully_shard slices weights; None if the layout has no shard axis.

    It joins `shard` with the axes whose ranks use the same weights: those that split samples and, but for
    the experts that it splits, `expert`.
    """
    others = SAMPLE_AXES if of_experts else ("expert", *SAMPLE_AXES)
    return None if axis_of(mesh, "shard") is None else joint(mesh, "shard", *others)


def data_mesh(mesh: DeviceMesh, *, of_experts: bool = False) -> DeviceMesh:
    """The mesh of fully_shard: the replicate axis, if there is one, and then the slicing axis."""
    slices, replicas = slicing_axis(mesh, of_experts=of_experts), axis_of(mesh, "replicate")
    assert slices is not None
    return slices if replicas is None else torch_internals.concatenate([replicas, slices])


def weight_axes(mesh: DeviceMesh) -> list[DeviceMesh]:
    """The axes whose ranks hold different weights or different slices of them."""
    slices = slicing_axis(mesh)  # with the expert axis, if there is one
    experts = axis_of(mesh, "expert") if slices is None else None
    axes = axis_of(mesh, "pipeline"), slices, experts, axis_of(mesh, "tensor")
    return [axis for axis in axes if axis is not None]


def joint(mesh: DeviceMesh, *names: str) -> DeviceMesh | None:
    """One axis made of the used axes among `names`; None if none is used."""
    used = tuple(name for name in names if axis_of(mesh, name) is not None)
    if not used:
        return None
    return mesh[used[0]] if len(used) == 1 else torch_internals.flatten(mesh[used])


def name_of(axis: DeviceMesh) -> str:
    """The name of a one-dimensional mesh. If it joins several axes, the name joins their names."""
    assert axis.mesh_dim_names is not None
    return axis.mesh_dim_names[0]


def all_reduce(tensor: Tensor, *, axis: DeviceMesh, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Reduce `tensor` in place over the ranks of `axis`; returns it. A profiler shows the axis."""
    with marked(f"all_reduce {name_of(axis)}"):
        dist.all_reduce(tensor, op=op, group=axis.get_group())
    return tensor


def axis_of(mesh: DeviceMesh, name: str) -> DeviceMesh | None:
    """The one-dimensional mesh of `name` with this rank; None for degree 1 or a rank outside the mesh."""
    assert mesh.mesh_dim_names is not None
    used = mesh.size() > 1 and mesh.get_coordinate() is not None
    return mesh[name] if used and name in mesh.mesh_dim_names else None
