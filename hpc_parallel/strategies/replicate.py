"""Data parallelism: a whole replica a device, gradients averaged (Li et al. 2020, PyTorch Distributed)."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from hpc_parallel.config.schema import StrategyConfig
from hpc_parallel.models.layered import LayeredModel


def apply(model: LayeredModel, *, axis: DeviceMesh, options: StrategyConfig) -> DistributedDataParallel:
    """Average gradients over `axis` while the backward pass still runs, a bucket at a time.

    Weights are equal already, since they come from (seed, name); the broadcast at the start is left
    out, and so is that of buffers before every forward pass.
    """
    return DistributedDataParallel(
        model,
        process_group=axis.get_group(),
        bucket_cap_mb=options.bucket_mb,
        static_graph=options.static_graph,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
        init_sync=False,
    )
