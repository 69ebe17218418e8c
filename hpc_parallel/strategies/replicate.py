"""Data parallelism: full replicas with averaged gradients (PyTorch Distributed; Li et al. 2020)."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hpc_parallel import torch_internals
from hpc_parallel.config.schema import StrategyConfig
from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.strategies.gradients import local_gradients
from hpc_parallel.strategies.mesh import name_of
from hpc_parallel.strategies.ranges import marked

# Running statistics cover all ranks' samples, so they need no sync. torch 2.13 renamed the option for it.
_OPTIONS = inspect.signature(DistributedDataParallel).parameters
_RENAMED = "forward_sync_buffers" in _OPTIONS
NO_BUFFER_SYNC: dict[str, Any] = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}
# Gradients are None before each step, so torch copies each gradient into its bucket. With this option it
# copies all gradients of a bucket at once.
BATCHED_COPY: dict[str, Any] = {"batched_grad_copy": True} if "batched_grad_copy" in _OPTIONS else {}


def apply(
    model: LayeredModel, *, axis: DeviceMesh, options: StrategyConfig, finds_unused: bool = False
) -> DistributedDataParallel:
    """Average gradients over `axis` during the backward pass, one bucket at a time.

    Weights come from (seed, name), so all ranks start with the same ones. torch's broadcast at the start is
    off: it would only hide a difference. Distributed weights are left to the technique that split them.

    finds_unused: look in each step for weights that the loss does not depend on. They get no gradient.
    """
    torch_internals.leave_out_of_replicas(model, distributed_weights(model))
    replica = DistributedDataParallel(
        model,
        process_group=axis.get_group(),
        bucket_cap_mb=options.bucket_mb,
        static_graph=options.static_graph,
        find_unused_parameters=finds_unused and not options.static_graph,
        gradient_as_bucket_view=True,
        **NO_BUFFER_SYNC,
        **BATCHED_COPY,
        init_sync=False,
    )
    if (dtype := message_dtype(model, options=options)) is not None:
        # A lambda, because torch rejects string annotations (`from __future__ import annotations`).
        name = name_of(axis)
        replica.register_comm_hook(
            axis.get_group(), lambda group, bucket: average_in(dtype, group, bucket, axis=name)
        )
    return replica


def message_dtype(model: LayeredModel, *, options: StrategyConfig) -> torch.dtype | None:
    """The type in which gradients are averaged; None if it is that of the weights, so torch averages."""
    if options.gradient_compression == "bfloat16":
        return torch.bfloat16
    half = any(weight.dtype == torch.bfloat16 for weight in model.parameters())
    return torch.float32 if half else None


def distributed_weights(model: LayeredModel) -> list[str]:
    return [name for name, weight in model.named_parameters() if isinstance(weight, DTensor)]


def average_in(
    dtype: torch.dtype, group: dist.ProcessGroup, bucket: dist.GradBucket, *, axis: str
) -> torch.futures.Future[Tensor]:
    """Average a bucket in `dtype`: float32 for gradients in bfloat16, as fully_shard does, or bfloat16.

    bfloat16 halves the bytes of float32, as torch's bf16_compress_hook, which torch allows over NCCL only.
    """
    gradients = bucket.buffer()
    message = gradients.to(dtype, copy=True).div_(group.size())
    with marked(f"all_reduce {axis}"):
        work = dist.all_reduce(message, group=group, async_op=True)
    averaged: torch.futures.Future[Tensor] = work.get_future().then(
        lambda done: gradients.copy_(done.value()[0])
    )
    return averaged


class Average:
    """Averages the gradients of a stage over `axis` if DistributedDataParallel can't.

    As there, distributed weights are left to the technique that split them.

    A split backward pass computes the gradients of weights separately (torch.autograd.grad), so the hooks of
    DistributedDataParallel never run.
    """

    def __init__(self, stage: LayeredModel, *, axis: DeviceMesh) -> None:
        self._parameters = [weight for weight in stage.parameters() if not isinstance(weight, DTensor)]
        self._group, self._axis = axis.get_group(), name_of(axis)
        self._started: tuple[dist.Work, Tensor, list[Tensor]] | None = None

    @torch.no_grad()
    def start(self) -> None:
        """Start one all-reduce of all gradients while other stages of this rank still compute."""
        gradients = local_gradients(self._parameters)
        if gradients:
            # A message of bfloat16 is summed in float32.
            flat = torch.cat(
                [g.to(torch.promote_types(g.dtype, torch.float32)).reshape(-1) for g in gradients]
            )
            with marked(f"all_reduce {self._axis}"):
                work = dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=self._group, async_op=True)
            assert work is not None
            self._started = work, flat, gradients

    @torch.no_grad()
    def finish(self) -> None:
        if self._started is not None:
            work, flat, gradients = self._started
            work.wait()
            pieces = flat.split([gradient.numel() for gradient in gradients])
            for gradient, piece in zip(gradients, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))
            self._started = None
