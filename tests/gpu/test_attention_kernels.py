"""The attention kernels of a GPU that return log-sums: parts merge to the formula, forward and backward."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hpc_parallel.strategies.context.attention_kernels import (
    CUDNN,
    EFFICIENT,
    FLASH,
    Attended,
    Kernel,
    accumulated,
    kernel_for,
    merge,
)
from tests.gpu.test_strategies import DEVICE, pytestmark  # noqa: F401

BATCH, HEADS, KV_HEADS, OWN, EARLIER, WIDTH = 2, 6, 2, 64, 96, 64
KERNELS = {
    "cuDNN": (CUDNN, torch.bfloat16),
    "flash": (FLASH, torch.bfloat16),
    "efficient": (EFFICIENT, torch.float32),
}
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of the largest value


def drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, and a gradient of outputs; queries stand at the last of the keys."""
    numbers = torch.Generator().manual_seed(0)
    query, grad = (torch.randn(BATCH, HEADS, OWN, WIDTH, generator=numbers) for _ in range(2))
    kv = torch.randn(2, BATCH, KV_HEADS, EARLIER + OWN, WIDTH, generator=numbers)
    return query.to(DEVICE, dtype), kv.to(DEVICE, dtype), grad.to(DEVICE, dtype)


def formula(query: Tensor, kv: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs, log-sums and gradients in float64."""
    query, kv = (tensor.double().requires_grad_() for tensor in (query, kv))
    key, value = kv.repeat_interleave(HEADS // KV_HEADS, dim=2)
    scores = query @ key.mT / math.sqrt(WIDTH)
    hidden = torch.ones(OWN, EARLIER + OWN, device=query.device).triu(EARLIER + 1).bool()
    scores = scores.masked_fill(hidden, -torch.inf)
    output = scores.softmax(-1) @ value
    (output * grad.double()).sum().backward()
    assert query.grad is not None
    assert kv.grad is not None
    return output.detach(), scores.detach().logsumexp(-1), query.grad, kv.grad


@pytest.mark.skipif(DEVICE != "cuda", reason="kernels of a GPU alone")
@pytest.mark.parametrize("name", KERNELS)
def test_parts_of_the_keys_merge_to_the_formula(name: str) -> None:
    kernel, dtype = KERNELS[name]
    if kernel is CUDNN and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("cuDNN's attention is used from Hopper on")
    query, kv, grad = drawn(dtype)
    for result, wanted in zip(by_parts(kernel, query, kv, grad), formula(query, kv, grad), strict=True):
        off = (result.double() - wanted).abs().max() / wanted.abs().max()
        assert float(off) <= BOUNDS[dtype]


def by_parts(kernel: Kernel, query: Tensor, kv: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    earlier, own = kv[..., :EARLIER, :].contiguous(), kv[..., EARLIER:, :].contiguous()
    output, lse = accumulated(kernel.forward(query, own, causal=True))
    merge(output, lse, part=kernel.forward(query, earlier, causal=False))
    parts = [
        kernel.backward(Attended(grad, query, output.to(query.dtype), lse), part, causal=part is own)
        for part in (earlier, own)
    ]
    grad_query = parts[0][0].double() + parts[1][0].double()
    return output, lse, grad_query, torch.cat([part[1].double() for part in parts], dim=-2)


@pytest.mark.skipif(DEVICE != "cuda", reason="of a GPU alone")
def test_hopper_gets_the_kernel_of_cudnn() -> None:
    query = torch.empty(1, 8, 128, 128, dtype=torch.bfloat16, device="cuda")
    assert (kernel_for(query) is CUDNN) == (torch.cuda.get_device_capability() >= (9, 0))
