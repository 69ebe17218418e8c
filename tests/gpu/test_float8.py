"""Products in float8 by a GPU's own operator, against float64 of the same rounded numbers."""

from __future__ import annotations

import pytest
import torch

from hpc_parallel.strategies.float8 import (
    LayerSplits,
    groups_problem,
    product,
    product_of_groups,
    quantise,
)
from hpc_parallel.torch_internals import scaled_product
from tests.gpu.test_strategies import DEVICE, pytestmark  # noqa: F401

ROWS, INNER, COLUMNS = 64, 128, 96
ROUNDING = 2**-8  # of bfloat16, of the largest value


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("fast", [False, True])
def test_a_product_is_that_of_the_rounded_numbers(by_rows: bool, fast: bool) -> None:
    numbers = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, INNER, generator=numbers).to(DEVICE) for rows in (ROWS, COLUMNS))
    dim = -1 if by_rows else None
    (a8, of_a), (b8, of_b) = (quantise(x.bfloat16(), torch.float8_e4m3fn, dim=dim) for x in (a, b))
    product = scaled_product(a8, b8.t(), scales=(of_a, of_b.t()), fast=fast)
    exact = (a8.double() * of_a) @ (b8.double() * of_b).t()
    assert float((product.double() - exact).abs().max() / exact.abs().max()) <= ROUNDING


@pytest.mark.parametrize("by_rows", [False, True])
def test_a_gpu_gives_the_gradients_of_a_cpu(by_rows: bool) -> None:
    """Both round the same numbers to the same float8; the sums differ in their order."""
    numbers = torch.Generator().manual_seed(1)
    x, weight, gradient = (
        torch.randn(*shape, generator=numbers).bfloat16()
        for shape in ((ROWS, INNER), (COLUMNS, INNER), (ROWS, COLUMNS))
    )
    found = []
    for device in ("cpu", DEVICE):
        factors = [factor.detach().to(device).requires_grad_() for factor in (x, weight)]
        product(*factors, by_rows=by_rows, splits=LayerSplits()).backward(gradient.to(device))
        found.append([factor.grad.cpu().double() for factor in factors if factor.grad is not None])
    for of_cpu, of_device in zip(*found, strict=True):
        assert float((of_cpu - of_device).abs().max() / of_cpu.abs().max()) <= 2 * ROUNDING


def test_experts_of_a_gpu_give_the_gradients_of_a_cpu() -> None:
    """Groups of uneven sizes, one without rows."""
    assert groups_problem("rowwise", torch.device(DEVICE)) is None
    numbers = torch.Generator().manual_seed(2)
    rows, weights, gradient = (
        torch.randn(*shape, generator=numbers).bfloat16()
        for shape in ((ROWS, INNER), (3, COLUMNS, INNER), (ROWS, COLUMNS))
    )
    ends, found = torch.tensor([13, 13, ROWS], dtype=torch.int32), []
    for device in ("cpu", DEVICE):
        factors = [factor.detach().to(device).requires_grad_() for factor in (rows, weights)]
        output = product_of_groups(*factors, ends.to(device), splits=LayerSplits())
        output.backward(gradient.to(device))
        found.append([x.detach().cpu().double() for x in (output, *(factor.grad for factor in factors))])
    for of_cpu, of_device in zip(*found, strict=True):
        assert float((of_cpu - of_device).abs().max() / of_cpu.abs().max()) <= 2 * ROUNDING
