"""The device mesh of a layout: its used axes, outermost first, and the position of a rank on them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import Parameter

from hpc_parallel import torch_internals
from hpc_parallel.config.axes import SAMPLE_AXES
from hpc_parallel.config.layout import Layout
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


def slicing_axis(mesh: DeviceMesh) -> DeviceMesh | None:
    """The axis over which fully_shard slices weights; None if the layout has no shard axis.

    The axes that split samples join `shard` in it, because their ranks use the same weights.
    """
    return None if axis_of(mesh, "shard") is None else joint(mesh, "shard", *SAMPLE_AXES)


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of fully_shard: the slicing axis, preceded by its replicas."""
    slices, replicas = slicing_axis(mesh), axis_of(mesh, "replicate")
    assert slices is not None
    return slices if replicas is None else torch_internals.concatenate([replicas, slices])


def weight_axes(mesh: DeviceMesh) -> list[DeviceMesh]:
    """The axes whose ranks hold different weights or different slices of them."""
    axes = (
        axis_of(mesh, "pipeline"), slicing_axis(mesh), axis_of(mesh, "expert"), axis_of(mesh, "tensor"),
    )  # fmt: skip
    return [axis for axis in axes if axis is not None]


def joint(mesh: DeviceMesh, *names: str) -> DeviceMesh | None:
    """One axis made of the used axes among `names`; None if none is used."""
    used = tuple(name for name in names if axis_of(mesh, name) is not None)
    if not used:
        return None
    return mesh[used[0]] if len(used) == 1 else torch_internals.flatten(mesh[used])


def name_of(axis: DeviceMesh) -> str:
    """The name of a one-dimensional mesh; of several axes made one, their names joined."""
    assert axis.mesh_dim_names is not None
    return axis.mesh_dim_names[0]


def axis_of(mesh: DeviceMesh, name: str) -> DeviceMesh | None:
    """The one-dimensional mesh of `name` with this rank; None for degree 1 or a rank outside the mesh."""
    assert mesh.mesh_dim_names is not None
    used = mesh.size() > 1 and mesh.get_coordinate() is not None
    return mesh[name] if used and name in mesh.mesh_dim_names else None


def local_gradients(parameters: Iterable[Parameter]) -> list[Tensor]:
    """This rank's slices of the gradients, as plain tensors that share their memory.

    A distributed gradient is first redistributed to its weight's placements: autograd leaves the gradient
    of a norm's weight as partial sums over the tensor axis, and only fully_shard would add them up. All of
    these are added up at once, because each is small.
    """
    parameters = list(parameters)
    _sum_replicated(parameters)
    gradients: list[Tensor] = []
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            if gradient.placements != parameter.placements:
                gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
            gradient = gradient.to_local()
        if gradient is not None:
            gradients.append(gradient)
    return gradients


@torch.no_grad()
def _sum_replicated(parameters: Iterable[Parameter]) -> None:
    """Add up the gradients that are partial sums of whole weights on one axis, in one flat buffer a type."""
    groups: defaultdict[tuple[DeviceMesh, torch.dtype], list[Parameter]] = defaultdict(list)
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            whole = parameter.placements == (Replicate(),)
            if whole and gradient.placements == (Partial(),):
                groups[gradient.device_mesh, gradient.dtype].append(parameter)
    for (axis, _), owners in groups.items():
        partial = [owner.grad.to_local() for owner in owners]  # type: ignore[union-attr]
        flat = torch.cat([gradient.reshape(-1) for gradient in partial])
        with marked(f"all_reduce {name_of(axis)}"):
            dist.all_reduce(flat, group=axis.get_group())
        sums = flat.split([gradient.numel() for gradient in partial])
        for owner, gradient, total in zip(owners, partial, sums, strict=True):
            owner.grad = DTensor.from_local(total.view_as(gradient), axis, [Replicate()], run_check=False)


def holders(parameter: Parameter, *, axes: Iterable[DeviceMesh]) -> int:
    """Number of ranks of the `axes` that have the same slice of `parameter` as this rank."""
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else ()
    split = {
        name for name, placement in zip(names or (), placements, strict=True) if not placement.is_replicate()
    }
    count = 1
    for axis in axes:
        count *= 1 if name_of(axis) in {*split, "pipeline"} else axis.size()
    return count
