"""Every process group has `cluster.collective_timeout_s`, also those that a device mesh makes."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from hpc_parallel.config.layout import Layout
from hpc_parallel.strategies.mesh import build_mesh, joint
from hpc_parallel.torch_internals import set_default_timeout
from tests.workers import Workers


def timeouts_s() -> dict[str, float]:
    """Of the groups of this rank in a layout of two axes and in both axes made one, by their names."""
    module = dist.distributed_c10d
    earlier = module.default_pg_timeout, module.default_pg_nccl_timeout
    try:
        set_default_timeout(timedelta(seconds=77))
        mesh = build_mesh(Layout(replicate=2, shard=2, tensor=2), device_type="cpu")
        both = joint(mesh, "replicate", "shard")
    finally:
        module.default_pg_timeout, module.default_pg_nccl_timeout = earlier
    assert both is not None
    groups = {name: mesh.get_group(name) for name in mesh.mesh_dim_names or ()} | {"both": both.get_group()}
    device = torch.device("cpu")
    options = {name: group._get_backend(device).options for name, group in groups.items()}
    return {name: option._timeout.total_seconds() for name, option in options.items()}


def test_groups_of_a_mesh_have_the_default(workers: Workers) -> None:
    expected = {"replicate": 77.0, "shard": 77.0, "tensor": 77.0, "both": 77.0}
    assert workers.run(8, timeouts_s) == [expected] * 8
