"""The device mesh of a layout: the axes that are used, outermost first, and where a rank stands on them."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hpc_parallel.config.layout import Layout


def build_mesh(layout: Layout, *, device_type: str) -> DeviceMesh:
    """One mesh dimension for each axis of a degree above one; a lone device keeps a replicate axis of 1."""
    used = {axis: degree for axis, degree in layout.degrees.items() if degree > 1} or {"replicate": 1}
    return init_device_mesh(device_type, tuple(used.values()), mesh_dim_names=tuple(used))


def joint(mesh: DeviceMesh, *names: str) -> DeviceMesh | None:
    """One axis made of those of `names` that are used; None where none is."""
    used = tuple(name for name in names if axis_of(mesh, name) is not None)
    return None if not used else mesh[used[0]] if len(used) == 1 else mesh[used]._flatten()


def axis_of(mesh: DeviceMesh, name: str) -> DeviceMesh | None:
    """The one-dimensional mesh of `name` that this rank is on; None where the axis has degree 1."""
    assert mesh.mesh_dim_names is not None
    return mesh[name] if name in mesh.mesh_dim_names and mesh.size() > 1 else None
