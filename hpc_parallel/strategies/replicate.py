"""Data parallelism: a whole replica a device, gradients averaged (Li et al. 2020, PyTorch Distributed)."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
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
    replica = DistributedDataParallel(
        model,
        process_group=axis.get_group(),
        bucket_cap_mb=options.bucket_mb,
        static_graph=options.static_graph,
        gradient_as_bucket_view=True,
        **QUIET,
        init_sync=False,
    )
    if options.gradient_compression == "bfloat16":
        # Through a lambda, since torch refuses annotations that are strings, as ours are.
        replica.register_comm_hook(axis.get_group(), lambda group, bucket: compress(group, bucket))
    return replica


def compress(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in bfloat16, in which its bytes are half of float32's.

    torch's own bf16_compress_hook, which it lets run over NCCL only.
    """
    gradients = bucket.buffer()
    message = gradients.to(torch.bfloat16).div_(group.size())
    sent = dist.all_reduce(message, group=group, async_op=True)
    averaged: torch.futures.Future[torch.Tensor] = sent.get_future().then(
        lambda done: gradients.copy_(done.value()[0])
    )
    return averaged
