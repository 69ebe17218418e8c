"""Parts of attention: each device of a ring has its share of the products, and kernels' parts merge."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hpc_parallel.models.attention import document_bias
from hpc_parallel.strategies.context.attention_kernels import (
    CPU_FLASH,
    CUDNN,
    EFFICIENT,
    FLASH,
    STRIPS,
    Attended,
    Kernel,
    accumulated,
    cuda_kernel,
    merge,
)
from hpc_parallel.strategies.context.ring import slices_of, visible

KERNELS = {"CPU flash": CPU_FLASH, "strips": STRIPS}
BOUNDS = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 4e-2}


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of 6 heads, keys and values of 2 heads at 13 positions, and a gradient of the outputs."""
    numbers = torch.Generator().manual_seed(0)
    query, grad = (torch.randn(2, 6, 7, 8, generator=numbers, dtype=torch.float64) for _ in range(2))
    kv = torch.randn(2, 2, 2, 13, 8, generator=numbers, dtype=torch.float64)
    return query.to(dtype), kv.to(dtype), grad.to(dtype)


def _formula(
    query: Tensor, kv: Tensor, grad: Tensor, starts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs, log-sums and gradients in float64; queries sit at the last positions of the keys."""
    query, kv = (tensor.double().requires_grad_() for tensor in (query, kv))
    key, value = kv.repeat_interleave(3, dim=2)
    scores = query @ key.mT / math.sqrt(8)
    scores = scores.masked_fill(torch.ones(7, 13).triu(7).bool(), -torch.inf)
    for sample, begins in enumerate([] if starts is None else starts.tolist()):
        for row, begin in enumerate(begins):
            earlier = torch.zeros(2, 1, 7, 13, dtype=torch.bool)
            earlier[sample, :, row, :begin] = True
            scores = scores.masked_fill(earlier, -torch.inf)
    output = scores.softmax(-1) @ value
    (output * grad.double()).sum().backward()
    return output.detach(), scores.detach().logsumexp(-1), query.grad, kv.grad


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", KERNELS)
def test_parts_of_the_keys_merge_to_the_formula(name: str, dtype: torch.dtype) -> None:
    kernel: Kernel = KERNELS[name]
    query, kv, grad = _inputs(dtype)
    earlier, own = kv[..., :6, :], kv[..., 6:, :]
    output, lse = accumulated(kernel.forward(query, own, causal=True))
    merge(output, lse, part=kernel.forward(query, earlier, causal=False))
    parts = [
        kernel.backward(Attended(grad, query, output.to(dtype), lse), part, causal=part is own)
        for part in (earlier, own)
    ]
    grad_query = sum(part[0].double() for part in parts)
    grad_kv = torch.cat([part[1].double() for part in parts], dim=-2)
    assert output.dtype == lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for result, wanted in zip((output, lse, grad_query, grad_kv), _formula(query, kv, grad), strict=True):
        torch.testing.assert_close(result.double(), wanted, rtol=0, atol=BOUNDS[dtype])


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", KERNELS)
def test_a_query_sees_no_key_of_another_document(name: str, dtype: torch.dtype) -> None:
    """The document of the last 4 queries begins at key 9, so that they see nothing of the earlier part.

    The document of the first sample's queries 0 to 2 begins at key 4.
    """
    kernel: Kernel = KERNELS[name]
    query, kv, grad = _inputs(dtype)
    starts = torch.tensor([[4, 4, 4, 9, 9, 9, 9], [0, 0, 0, 9, 9, 9, 9]])
    hidden = torch.finfo(dtype).min / 2
    rows, columns = torch.arange(6, 13), torch.arange(13)
    spans = slice(6, 13), slice(0, 6)
    biases = [document_bias(rows, columns[span], starts, dtype=dtype, hidden=hidden) for span in spans]
    own, earlier = (
        kernel.forward(query, kv[..., span, :], causal=False, bias=bias)
        for span, bias in zip(spans, biases, strict=True)
    )
    output, lse = accumulated(own)
    merge(output, lse, part=earlier)
    parts = [
        kernel.backward(
            Attended(grad, query, output.to(dtype), lse), kv[..., span, :], causal=False, bias=bias
        )
        for span, bias in zip(spans, biases, strict=True)
    ]
    grad_query = sum(part[0].double() for part in parts)
    grad_kv = torch.cat([part[1].double() for part in reversed(parts)], dim=-2)
    wanted = _formula(query, kv, grad, starts)
    for result, exact in zip((output, lse, grad_query, grad_kv), wanted, strict=True):
        torch.testing.assert_close(result.double(), exact, rtol=0, atol=BOUNDS[dtype])


@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability", "kernel"),
    [
        (torch.bfloat16, 128, (9, 0), CUDNN),
        (torch.bfloat16, 192, (9, 0), FLASH),
        (torch.bfloat16, 128, (8, 9), FLASH),
        (torch.float16, 256, (8, 0), FLASH),
        (torch.float16, 64, (7, 5), EFFICIENT),
        (torch.bfloat16, 64, (7, 5), STRIPS),
        (torch.bfloat16, 264, (9, 0), EFFICIENT),
        (torch.bfloat16, 20, (9, 0), STRIPS),
        (torch.float32, 128, (9, 0), EFFICIENT),
        (torch.float32, 6, (9, 0), STRIPS),
        (torch.float64, 128, (9, 0), STRIPS),
    ],
)
def test_each_type_gets_a_kernel_that_takes_it(
    dtype: torch.dtype, head_dim: int, capability: tuple[int, int], kernel: Kernel
) -> None:
    assert cuda_kernel(dtype, head_dim=head_dim, capability=capability) is kernel


def test_deterministic_runs_leave_out_the_kernel_whose_sums_have_no_order() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert cuda_kernel(torch.bfloat16, head_dim=128, capability=(9, 0)) is FLASH
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("kernel", "dtype"), [(CUDNN, torch.bfloat16), (FLASH, torch.bfloat16), (EFFICIENT, torch.float32)]
)
def test_operators_of_gpus_accept_the_arguments(kernel: Kernel, dtype: torch.dtype) -> None:
    """On tensors without memory: torch checks the schema and gives the shapes."""
    query = torch.empty(2, 6, 40, 8, dtype=dtype, device="meta")
    kv = torch.empty(2, 2, 2, 40, 8, dtype=dtype, device="meta")
    output, lse = kernel.forward(query, kv, causal=True)
    assert (output.shape, lse.shape, lse.dtype) == (query.shape, query.shape[:3], torch.float32)
    grad_query, grad_kv = kernel.backward(Attended(query, query, output, lse), kv, causal=True)
    assert (grad_query.shape, grad_kv.shape) == (query.shape, kv.shape)


def test_rows_of_log_sums_are_padded_for_the_kernel_that_reads_them_so() -> None:
    """Infinity makes the weights of rows that don't exist zero."""
    query, kv, grad = _inputs(torch.float32)
    seen: list[Tensor] = []

    def backward(*tensors: Tensor, causal: bool) -> tuple[Tensor, ...]:
        seen.append(tensors[-1])
        return tensors[1:4]

    lse = torch.arange(2 * 6 * 7.0).view(2, 6, 7)
    _, grad_kv = replace(EFFICIENT, backward_kernel=backward).backward(
        Attended(grad, query, query, lse), kv, causal=False
    )
    assert seen[0].shape == (2, 6, 32)
    assert torch.equal(seen[0][..., :7], lse)
    assert bool(seen[0][..., 7:].isposinf().all())
    torch.testing.assert_close(grad_kv, 3 * kv)  # of three query heads each


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("half", [1, 3])
def test_turns_make_the_causal_mask(degree: int, half: int) -> None:
    length = 2 * degree * half
    places = [
        torch.cat([torch.arange(length)[part] for part in slices_of(rank, degree=degree, length=length)])
        for rank in range(degree)
    ]
    assert sorted(torch.cat(places).tolist()) == list(range(length))
    done = torch.zeros(length, length, dtype=torch.int64)
    for rank in range(degree):
        own = places[rank]
        done[own[:, None], own] += torch.ones(2 * half, 2 * half, dtype=torch.int64).tril()
        for source in set(range(degree)) - {rank}:
            rows, seen = visible(source, rank=rank, half=half, causal=True)
            queries, keys = own[rows], places[source][seen]
            assert len(queries) * len(keys) == 2 * half * half  # of 4: half of them, on every device
            done[queries[:, None], keys] += 1
    assert torch.equal(done, torch.ones(length, length, dtype=torch.int64).tril())
