"""Experts split over devices against one device, and the mixture against a sum over all experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.models.auxiliary_loss import AuxiliaryLoss
from hpc_parallel.models.experts import Experts, grouped_product
from hpc_parallel.models.moe import MixtureOfExperts, imbalance
from tests.composed import prepared
from tests.parity import LONG, Alone, follow_one_device, in_full
from tests.workers import Workers

MODEL = ("model=moe_tiny", "model.layers=2", "model.ffn_dim=48", "model.balance=0.1")
LAYOUTS = {
    "expert over 2": ("strategy=expert", "nodes=2", *LONG),
    "expert over 4, accumulating 4": ("strategy=expert", "nodes=4", "training.microbatch_size=1"),
    "expert over 2, one expert a token": ("strategy=expert", "nodes=2", "model.experts_per_token=1"),
    "replicate 2 x expert 2": (
        "strategy=expert", "nodes=2", "gpus_per_node=2", "strategy.expert=2", "strategy.replicate=2",
        "training.microbatch_size=2",
    ),
    "pipeline 2 x expert 2": (
        "strategy=pipeline", "nodes=2", "gpus_per_node=2", "strategy.pipeline=2", "strategy.expert=2",
        "strategy.microbatches=4",
    ),
    "pipeline 2 x expert 2, zero bubble": (
        "strategy=pipeline", "nodes=2", "gpus_per_node=2", "strategy.pipeline=2", "strategy.expert=2",
        "strategy.microbatches=4", "strategy.schedule=interleaved_zero_bubble", "model.layers=4",
    ),
    "checkpointed": ("strategy=expert", "nodes=2", "training.activation_checkpointing=full"),
    "experts on each replica": ("strategy=data", "nodes=2", "training.microbatch_size=4"),
    "experts in slices": ("strategy=fsdp", "nodes=2"),
    "experts in stages": ("strategy=pipeline", "nodes=2", "strategy.microbatches=4"),
    "dataparallel": ("strategy=dataparallel", "gpus_per_node=2"),
    "parameter server": ("strategy=parameter_server", "nodes=3"),
    "replicate 2 x pipeline 2 x expert 2, zero bubble": (
        "strategy=pipeline", "nodes=2", "gpus_per_node=4", "strategy.pipeline=2", "strategy.expert=2",
        "strategy.replicate=2", "strategy.microbatches=4", "strategy.schedule=interleaved_zero_bubble",
        "model.layers=4",
    ),
}  # fmt: skip
SLOW = (
    "replicate 2 x pipeline 2 x expert 2, zero bubble", "parameter server", "dataparallel",
    "experts in stages", "expert over 2, one expert a token", "pipeline 2 x expert 2", "experts in slices",
)  # fmt: skip
CASES = [
    *((layout, "float64") for layout in LAYOUTS if layout not in SLOW),
    *in_full((layout, "float64") for layout in SLOW),
    *in_full([("expert over 2", "float64, untied head")]),
]


@pytest.mark.parametrize(("layout", "exactness"), CASES)
def test_layout_follows_one_device(workers: Workers, alone: Alone, layout: str, exactness: str) -> None:
    follow_one_device(workers, alone, (*MODEL, *LAYOUTS[layout]), exactness=exactness)


def _mixture(*, per_token: int, dtype: torch.dtype) -> tuple[MixtureOfExperts, Tensor]:
    torch.manual_seed(0)
    mixture = MixtureOfExperts(Experts(4, dim=16, hidden=24), per_token=per_token, balance=0.5)
    for weight in mixture.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return mixture.to(dtype), torch.randn(3, 5, 16, dtype=dtype, requires_grad=True)


def _sum_over_all_experts(mixture: MixtureOfExperts, x: Tensor) -> Tensor:
    """Every expert computes every token; the gates of experts that are not chosen are 0."""
    probabilities = F.softmax(x @ mixture.router.weight.T, dim=-1)
    smallest = probabilities.topk(mixture.per_token).values[..., -1:]
    gates = torch.where(probabilities >= smallest, probabilities, 0)
    experts = mixture.experts
    outputs = [
        (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
        for gate, up, down in zip(experts.gate, experts.up, experts.down, strict=True)
    ]
    return torch.einsum("bse,ebsd->bsd", gates, torch.stack(outputs))


@pytest.mark.parametrize("per_token", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_a_mixture_is_the_sum_over_its_experts(per_token: int, dtype: torch.dtype, tolerance: float) -> None:
    mixture, x = _mixture(per_token=per_token, dtype=dtype)
    mixture.balance = 0.0
    reference = _sum_over_all_experts(mixture, x)
    output = mixture(x)
    torch.testing.assert_close(output, reference, rtol=tolerance, atol=tolerance)
    direction = torch.randn_like(output)
    tensors = [x, *mixture.parameters()]
    for gradient, wanted in zip(
        torch.autograd.grad(output, tensors, direction),
        torch.autograd.grad(reference, tensors, direction),
        strict=True,
    ):
        torch.testing.assert_close(gradient, wanted, rtol=tolerance, atol=tolerance)


def test_groups_without_rows_have_gradients_of_zero() -> None:
    for dtype in (torch.float32, torch.float64):
        weights = torch.randn(3, 8, 16, dtype=dtype, requires_grad=True)
        rows = torch.randn(4, 16, dtype=dtype)
        products = grouped_product(rows, weights, torch.tensor([4, 4, 4], dtype=torch.int32))
        torch.testing.assert_close(products, rows @ weights[0].T)
        (gradient,) = torch.autograd.grad(products, weights, torch.ones_like(products))
        torch.testing.assert_close(gradient[0], rows.sum(0).expand(8, 16))
        assert not gradient[1:].any()


def test_the_balancing_loss_is_1_for_each_position_if_experts_are_used_equally() -> None:
    even = torch.full((2, 6, 3), 1 / 3)
    in_turn = torch.arange(6).remainder(3).expand(2, 6).unsqueeze(-1)
    assert float(imbalance(even, in_turn)) == pytest.approx(2 * 6)
    one = F.one_hot(torch.zeros(2, 6, dtype=torch.int64), 3).float()
    assert float(imbalance(one, torch.zeros(2, 6, 1, dtype=torch.int64))) == pytest.approx(3 * 2 * 6)


def test_the_gradient_of_the_balancing_loss_is_as_if_the_loss_had_added_it() -> None:
    mixture, x = _mixture(per_token=2, dtype=torch.float64)
    mixture.auxiliary.loss_terms = 7
    router = mixture.router.weight
    (gradient,) = torch.autograd.grad(mixture(x).sum() / 7, router)
    probabilities = F.softmax(x @ router.T, dim=-1)
    chosen = probabilities.topk(2).indices
    loss = _sum_over_all_experts(mixture, x).sum() + 0.5 * imbalance(probabilities, chosen)
    (wanted,) = torch.autograd.grad(loss / 7, router)
    torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-12)


def test_an_auxiliary_loss_changes_no_value() -> None:
    x = torch.randn(3, requires_grad=True)
    term = torch.ones((), requires_grad=True)
    assert torch.equal(AuxiliaryLoss()(x, term), x)


def _shapes(config: RunConfig) -> dict[str, tuple[int, ...]]:
    from hpc_parallel.worker.session import Session

    (part,) = Session.open(config, device=torch.device("cpu")).assembled.parts
    return {
        name: tuple((weight.to_local() if isinstance(weight, DTensor) else weight).shape)
        for name, weight in part.named_parameters()
    }


def test_a_device_holds_its_experts_only(workers: Workers) -> None:
    config = prepared(*MODEL, "data.max_bytes=200000", "strategy=expert", "nodes=4").config
    for shapes in workers.run(4, _shapes, config):
        assert shapes["blocks.0.feed_forward.experts.gate"] == (8 // 4, 48, 128)
        assert shapes["blocks.0.feed_forward.experts.down"] == (8 // 4, 128, 48)
        assert shapes["blocks.0.feed_forward.router.weight"] == (8, 128)
