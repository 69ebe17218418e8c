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
    return DistributedDataParallel(
        model,
        process_group=axis.get_group(),
        bucket_cap_mb=options.bucket_mb,
        static_graph=options.static_graph,
        gradient_as_bucket_view=True,
        **QUIET,
        init_sync=False,
    )


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
