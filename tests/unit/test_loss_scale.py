"""The loss scale against torch's GradScaler, and what it leaves of the loss and the gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hpc_parallel.config.schema import OptimizerConfig
from hpc_parallel.models.auxiliary_loss import AuxiliaryLoss
from hpc_parallel.strategies.loss_scale import LossScale
from hpc_parallel.training.nonfinite import Guard, NonFiniteError
from hpc_parallel.training.optimizer import build_optimizer

CPU = torch.device("cpu")


def test_the_factor_is_that_of_torchs_scaler() -> None:
    overflows = [bool(int(digit)) for digit in "1000010011000000010"]
    ours = LossScale(start=64.0, grow_every=3, device=CPU)
    theirs = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight])
    for overflow in overflows:
        theirs.scale(weight.sum()).backward()
        if overflow:
            weight.grad.fill_(math.inf)
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        ours.update(torch.tensor(overflow))
        assert ours.factor.item() == theirs.get_scale()


def test_it_stays_at_least_one_and_finite() -> None:
    scale = LossScale(start=4.0, grow_every=1, device=CPU)
    shrinkable = [bool(scale.update(torch.tensor(True))) for _ in range(4)]
    assert (shrinkable, scale.factor.item()) == ([True, True, False, False], 1.0)
    scale.factor.fill_(2.0**127)
    scale.update(torch.tensor(False))
    assert scale.factor.item() == 2.0**127


def test_the_loss_keeps_its_value_and_gradients_are_scaled() -> None:
    scale = LossScale(start=2.0**12, grow_every=3, device=CPU)
    output = torch.tensor([0.1, -0.7], requires_grad=True)
    loss = scale.apply(lambda output, target: (output * target).sum())(output, torch.tensor([3.0, 5.0]))
    assert loss.item() == (output * torch.tensor([3.0, 5.0])).sum().item()
    loss.backward()
    assert output.grad.tolist() == [3 * 2.0**12, 5 * 2.0**12]
    scale.unscale([output.grad])
    assert output.grad.tolist() == [3.0, 5.0]


def test_an_auxiliary_loss_is_scaled_too() -> None:
    auxiliary = AuxiliaryLoss()
    auxiliary.loss_terms, auxiliary.loss_scale = 4, torch.tensor(32.0)
    x, weight = torch.ones(2, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    auxiliary(x, 2 * weight).sum().backward()
    assert weight.grad.item() == 2 / 4 * 32
    assert x.grad.tolist() == [1, 1]


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_overflows_are_skipped_until_the_factor_is_one(policy: str) -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = build_optimizer(
        {"stem.a": weight}, OptimizerConfig(_target_="torch.optim.SGD", learning_rate=0.5)
    )
    scale = LossScale(start=4.0, grow_every=100, device=CPU)
    guard = Guard({"stem.a": weight}, optimizer=optimizer, policy=policy, buffers=[], loss_scale=scale)
    seen = []
    for step in range(1, 6):
        weight.grad = torch.full((2,), math.nan if step != 2 else 1.0)
        norm = weight.grad.norm()
        guard.note(norm=norm, norms=norm[None], loss=torch.tensor(1.0))
        optimizer.step()
        seen.append((scale.factor.item(), guard.skipped.tolist(), weight[0].item()))
    # The number of skipped steps, the steps since the last one, and the factors before and after it.
    third = [2, 0, 2.0, 1.0]
    later = {
        "stop": [[2, 1, 1.0, 1.0], [2, 2, 1.0, 1.0]], "skip": [[3, 0, 1.0, 1.0], [4, 0, 1.0, 1.0]],
    }[policy]  # fmt: skip
    skips = [[1, 0, 4.0, 2.0], [1, 1, 4.0, 2.0], third, *later]
    factors = [2.0, 2.0, 1.0, 1.0, 1.0]
    assert seen == list(zip(factors, skips, [1.0, 0.5, 0.5, 0.5, 0.5], strict=True))
    if policy == "stop":
        with pytest.raises(NonFiniteError, match=r"the gradient of stem\.a is not finite at step 4"):
            guard.raise_if_nonfinite(5, trace=lambda step: {})
    else:
        guard.raise_if_nonfinite(5, trace=lambda step: {})
