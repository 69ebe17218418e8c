"""The learning rate by its closed form, decay on matrices only, the norm and clipping against torch's own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hpc_parallel.config.schema import OptimizerConfig
from hpc_parallel.training.optimizer import GradientNorm, build_optimizer, clip, learning_rate

COSINE = OptimizerConfig(learning_rate=2.0, warmup_steps=10, final_share=0.1)


@pytest.mark.parametrize(
    ("step", "share"),
    [
        (1, 0.1),
        (5, 0.5),
        (10, 1.0),
        (60, 0.55),  # half way down from 1 to 0.1
        (110, 0.1),
        (35, 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2),
    ],
)
def test_warm_up_and_cosine(step: int, share: float) -> None:
    assert learning_rate(step, steps=110, config=COSINE) == pytest.approx(2.0 * share)


def test_constant_after_warm_up() -> None:
    config = OptimizerConfig(learning_rate=0.5, warmup_steps=2, schedule="constant")
    assert [learning_rate(step, steps=9, config=config) for step in (1, 2, 3, 9)] == [0.25, 0.5, 0.5, 0.5]


def test_adamw_follows_its_equations() -> None:
    """Two steps of Loshchilov and Hutter's algorithm 2, written out; the vector does not decay."""
    config = OptimizerConfig(learning_rate=0.1, betas=[0.8, 0.9], weight_decay=0.5, eps=1e-8)
    weights = {
        "matrix": nn.Parameter(torch.tensor([[1.0, -2.0]])),
        "vector": nn.Parameter(torch.tensor([3.0])),
    }
    optimizer = build_optimizer(weights, config)
    expected = {name: weight.detach().double() for name, weight in weights.items()}
    moments = dict.fromkeys(weights, (0.0, 0.0))
    for step, scale in ((1, 1.0), (2, -0.5)):
        for name, weight in weights.items():
            gradient = torch.full_like(weight, scale)
            weight.grad = gradient
            first, second = moments[name]
            first = 0.8 * first + 0.2 * gradient.double()
            second = 0.9 * second + 0.1 * gradient.double() ** 2
            moments[name] = (first, second)
            decay = 0.5 if name == "matrix" else 0.0
            update = (first / (1 - 0.8**step)) / ((second / (1 - 0.9**step)).sqrt() + 1e-8)
            expected[name] = expected[name] * (1 - 0.1 * decay) - 0.1 * update
        optimizer.step()
    for name, weight in weights.items():
        torch.testing.assert_close(weight.detach().double(), expected[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("most", [0.5, 100.0])
def test_norm_and_clipping_are_torchs(most: float) -> None:
    generator = torch.Generator().manual_seed(3)
    ours = [
        nn.Parameter(torch.randn(4, 5, generator=generator)),
        nn.Parameter(torch.randn(7, generator=generator)),
    ]
    for parameter in ours:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    for mine, other in zip(ours, theirs, strict=True):
        other.grad = mine.grad.clone()
    norm, norms = GradientNorm(ours, axes=[])()
    torch.testing.assert_close(norms, torch.stack([weight.grad.norm() for weight in ours]))
    clip(ours, norm=norm, max_norm=most)
    expected = nn.utils.clip_grad_norm_(theirs, most)
    torch.testing.assert_close(norm, expected)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
