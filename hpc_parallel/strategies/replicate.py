"""Data parallelism: a whole replica a device, gradients averaged (Li et al. 2020, PyTorch Distributed)."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from hpc_parallel.config.schema import StrategyConfig
from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.strategies.mesh import local_gradients

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


def compress(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket in bfloat16, in which its bytes are half of float32's.

    torch's own bf16_compress_hook, which it lets run over NCCL only.
    """
    gradients = bucket.buffer()
    message = gradients.to(torch.bfloat16).div_(group.size())
    sent = dist.all_reduce(message, group=group, async_op=True)
    averaged: torch.futures.Future[Tensor] = sent.get_future().then(
        lambda done: gradients.copy_(done.value()[0])
    )
    return averaged


class Average:
    """Averages the gradients of one pipeline stage over `axis` where DistributedDataParallel can't.

    A split backward pass takes the gradients of weights by themselves (torch.autograd.grad), so the hooks
    by which DistributedDataParallel learns that they are there never run.
    """

    def __init__(self, stage: LayeredModel, *, axis: DeviceMesh) -> None:
        self._stage = stage
        self._group = axis.get_group()
        self._started: tuple[dist.Work, Tensor, list[Tensor]] | None = None

    @torch.no_grad()
    def start(self) -> None:
        """All of them in one piece, while other stages of this rank still work."""
        gradients = local_gradients(self._stage.parameters())
        if gradients:
            together = torch.cat([gradient.reshape(-1) for gradient in gradients])
            work = dist.all_reduce(together, op=dist.ReduceOp.AVG, group=self._group, async_op=True)
            assert work is not None
            self._started = work, together, gradients

    @torch.no_grad()
    def finish(self) -> None:
        if self._started is not None:
            work, together, gradients = self._started
            work.wait()
            pieces = together.split([gradient.numel() for gradient in gradients])
            for gradient, piece in zip(gradients, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))
            self._started = None
