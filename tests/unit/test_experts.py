"""Products of experts of any width, in every type that a GPU trains in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_parallel.config.checks.all_checks import find_problems
from hpc_parallel.config.resolve import resolve
from hpc_parallel.layout import schedules
from hpc_parallel.models.experts import Reorder, grouped_product, product_of_groups
from hpc_parallel.models.layered import materialise
from hpc_parallel.strategies import precision
from hpc_parallel.strategies.whole_model import build_model
from tests.composed import composed

ENDS = torch.tensor([3, 3, 10], dtype=torch.int32)  # the second expert has no token
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def one_by_one(rows: Tensor, weights: Tensor) -> Tensor:
    return torch.cat([F.linear(rows[:3], weights[0]), F.linear(rows[3:], weights[2])])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 172), (172, 64), (5, 3), (64, 64)])
@pytest.mark.parametrize("product", [grouped_product, product_of_groups])
def test_a_grouped_product_of_any_width(
    dtype: torch.dtype, inputs: int, outputs: int, product: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> None:
    draw = torch.Generator().manual_seed(0)
    rows, weights = (
        torch.randn(*size, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
        for size in ((10, inputs), (3, outputs, inputs))
    )
    factors = torch.randn(10, outputs, generator=draw, dtype=torch.float64)
    (product(rows, weights, ENDS).double() * factors).sum().backward()
    precise = [x.detach().double().requires_grad_() for x in (rows, weights)]
    (one_by_one(*precise) * factors).sum().backward()
    with torch.no_grad():
        outcome = product(rows, weights, ENDS)
        assert outcome.shape == (10, outputs)
        for found, expected in ((outcome, one_by_one(*precise)), (rows.grad, precise[0].grad),
                                (weights.grad, precise[1].grad)):  # fmt: skip
            assert found.dtype == dtype
            difference = (found.double() - expected).norm() / expected.norm()
            assert difference < TOLERANCE[dtype]


def test_the_model_of_experts_trains_in_the_default_precision_of_gpus() -> None:
    config = resolve(composed("model=moe_tiny", "strategy=single", "device=cpu", "launcher=local"))[0]
    model = build_model(config)
    precision.apply(model, precision="bfloat16", device_type="cpu")
    materialise(model, seed=0, device="cpu", dtype=torch.float32)
    tokens = torch.arange(64).reshape(2, 32)
    model.loss(model(tokens), tokens).backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())


def test_rows_are_reordered_without_a_sort_in_the_backward_pass() -> None:
    """The reference is indexing, whose backward pass is an index_put; some rows appear in several copies."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(6, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    order = torch.randperm(12, generator=generator)
    weight = torch.randn(12, 4, generator=generator, dtype=torch.float64)
    called: list[str] = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(str(function))
            return function(*args, **(kwargs or {}))

    with Noting():
        reordered = Reorder.apply(rows, order, order.argsort(), 2)
        (gradient,) = torch.autograd.grad((reordered * weight).sum(), rows)
    indexed = rows[order // 2]
    assert reordered.equal(indexed)
    torch.testing.assert_close(gradient, torch.autograd.grad((indexed * weight).sum(), rows)[0])
    assert not any("index_put" in name for name in called)


FSDP_EP = ("strategy=fsdp", "model=moe_tiny", "nodes=2", "gpus_per_node=6", "strategy.expert=2")


def test_slices_must_divide_the_width_of_experts() -> None:
    words = (*FSDP_EP, "training.global_batch_size=12")
    assert list(map(str, find_problems(resolve(composed(*words))[0]))) == [
        "strategy.shard = 6 makes 6 slices of each expert's weights, which don't divide their width, 128. "
        "Try strategy.shard=1 strategy.replicate=-1 or strategy.shard=2 strategy.replicate=-1."
    ]
    assert find_problems(resolve(composed(*words, "strategy.shard=2", "strategy.replicate=-1"))[0]) == []
    assert find_problems(resolve(composed(*words, "model.dim=96", "model.heads=4"))[0]) == []


def test_a_torch_that_is_too_old_to_slice_experts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "version", lambda package: "2.12.1+cu130")
    words = (*FSDP_EP, "strategy.shard=2", "strategy.replicate=-1", "training.global_batch_size=12")
    assert list(map(str, find_problems(resolve(composed(*words))[0]))) == [
        "strategy.expert = 2 in slices (strategy.shard or strategy.tensor) needs torch 2.13 or newer, and "
        "torch 2.12 is installed here. Try strategy.expert=1."
    ]
