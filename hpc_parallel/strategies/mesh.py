"""The device mesh of a layout: the axes that are used, outermost first, and where a rank stands on them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from hpc_parallel import torch_internals
from hpc_parallel.config.layout import Layout


def build_mesh(layout: Layout, *, device_type: str, first: int = 0) -> DeviceMesh:
    """The ranks from `first` on; those before it make the mesh too, and stand outside of it.

    One mesh dimension for each axis of a degree above one; a lone device keeps a replicate axis of 1.

    What fully_shard has keeps a shard axis, of 1 where it must be.
    """
    used = {
        axis: degree
        for axis, degree in layout.degrees.items()
        if degree > 1 or (axis == "shard" and layout.by_fully_shard)
    } or {"replicate": 1}
    ranks = torch.arange(first, first + layout.devices).reshape(tuple(used.values()))
    return DeviceMesh(device_type, ranks, mesh_dim_names=tuple(used))


def slicing_axis(mesh: DeviceMesh) -> DeviceMesh | None:
    """Over which fully_shard slices weights: the shard axis, and `context`, whose ranks have the same ones.

    None where the layout has no shard axis.
    """
    return None if axis_of(mesh, "shard") is None else joint(mesh, "shard", "context")


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Over which fully_shard works: the slicing axis, and before it the replicas of what it slices."""
    slices, replicas = slicing_axis(mesh), axis_of(mesh, "replicate")
    assert slices is not None
    return slices if replicas is None else torch_internals.concatenate([replicas, slices])


def weight_axes(mesh: DeviceMesh) -> list[DeviceMesh]:
    """The axes whose ranks hold different weights, or parts of them."""
    axes = (axis_of(mesh, "pipeline"), slicing_axis(mesh), axis_of(mesh, "tensor"))
    return [axis for axis in axes if axis is not None]


def joint(mesh: DeviceMesh, *names: str) -> DeviceMesh | None:
    """One axis made of those of `names` that are used; None where none is."""
    used = tuple(name for name in names if axis_of(mesh, name) is not None)
    return None if not used else mesh[used[0]] if len(used) == 1 else torch_internals.flatten(mesh[used])


def axis_of(mesh: DeviceMesh, name: str) -> DeviceMesh | None:
    """The one-dimensional mesh of `name` with this rank; None where the degree is 1 or the rank outside."""
    assert mesh.mesh_dim_names is not None
    used = mesh.size() > 1 and mesh.get_coordinate() is not None
    return mesh[name] if used and name in mesh.mesh_dim_names else None


def local_gradients(parameters: Iterable[Parameter]) -> list[Tensor]:
    """What this rank has of their gradients, as plain tensors that share its memory.

    A distributed gradient is placed as its weight first: autograd leaves that of a norm's weight as parts
    of a sum over the tensor axis, and fully_shard alone would sum them.
    """
    found: list[Tensor] = []
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            if gradient.placements != parameter.placements:
                gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
            gradient = gradient.to_local()
        if gradient is not None:
            found.append(gradient)
    return found


def holders(parameter: Parameter, *, axes: Iterable[DeviceMesh]) -> int:
    """How many ranks of the `axes` have the very slice of `parameter` that this one has."""
    placed = parameter.placements if isinstance(parameter, DTensor) else ()
    names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else ()
    split = {
        name for name, placement in zip(names or (), placed, strict=True) if not placement.is_replicate()
    }
    count = 1
    for axis in axes:
        assert axis.mesh_dim_names is not None
        count *= 1 if axis.mesh_dim_names[0] in {*split, "pipeline"} else axis.size()
    return count
