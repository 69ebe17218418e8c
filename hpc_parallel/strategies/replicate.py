"""Data parallelism: a whole replica a device, gradients averaged (Li et al. 2020, PyTorch Distributed)."""

from __future__ import annotations

import inspect
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from hpc_parallel.config.schema import StrategyConfig
from hpc_parallel.models.layered import LayeredModel

# Running statistics are of all ranks' samples, so equal already; the word for leaving them changed in 2.13.
_NEWER = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
QUIET: dict[str, Any] = {"forward_sync_buffers" if _NEWER else "broadcast_buffers": False}


def apply(model: LayeredModel, *, axis: DeviceMesh, options: StrategyConfig) -> DistributedDataParallel:
    """Average gradients over `axis` while the backward pass still runs, a bucket at a time.

    Weights are equal already, since they come from (seed, name): torch's broadcast at the start, which
    would only hide it if they were not, is left out.
    """
    return DistributedDataParallel(
        model,
        process_group=axis.get_group(),
        bucket_cap_mb=options.bucket_mb,
        static_graph=options.static_graph,
        gradient_as_bucket_view=True,
        **QUIET,
        init_sync=False,
    )
