"""Values that are not finite, against a loop that leaves the step out by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from hpc_parallel.config.schema import AdamWConfig
from hpc_parallel.strategies.gradients import GradientNorm
from hpc_parallel.strategies.loss import propagate_nonfinite
from hpc_parallel.training.nonfinite import Guard, NonFiniteError, blame, order
from hpc_parallel.training.optimizer import build_optimizer

BAD = (3, 4)


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    found = [torch.randn(4, 3, generator=generator), torch.randn(5, generator=generator)]
    if step in BAD:
        found[1][2] = math.inf if step == 3 else math.nan
    return found


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(5))]


def guarded(policy: str, *, steps: int = 6) -> tuple[list[nn.Parameter], Guard, list[float]]:
    ours = weights()
    names = dict(zip(("stem.weight", "blocks.0.bias"), ours, strict=True))
    optimizer = build_optimizer(names, AdamWConfig(learning_rate=0.1, betas=[0.9, 0.999], weight_decay=0.0))
    guard = Guard(names, optimizer=optimizer, policy=policy, buffers=[])
    norm = GradientNorm(ours, axes=[])
    counts = []
    for step in range(1, steps + 1):
        for weight, gradient in zip(ours, gradients(step), strict=True):
            weight.grad = gradient
        guard.remember_buffers()
        total, each = norm()
        guard.note(norm=total, norms=each, loss=torch.tensor(2.5))
        optimizer.step()
        counts.append(0.0 if guard.skipped is None else guard.skipped[0].item())
    return ours, guard, counts


def by_hand(steps: range) -> list[nn.Parameter]:
    theirs = weights()
    optimizer = torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.0, foreach=False, fused=False)
    for step in steps:
        for weight, gradient in zip(theirs, gradients(step), strict=True):
            weight.grad = gradient
        if step not in BAD:
            optimizer.step()
    return theirs


@pytest.fixture(params=[torch.float32, torch.float64], ids=str)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    """A model's file may set another one."""
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("default_dtype")
def test_a_skipped_step_is_as_if_it_had_not_been() -> None:
    ours, guard, counts = guarded("skip")
    assert counts == [0, 0, 1, 2, 2, 2]
    torch.testing.assert_close(ours, by_hand(range(1, 7)))
    guard.raise_if_nonfinite(6, trace=lambda step: {})


@pytest.mark.parametrize("policy", ["stop", "rollback"])
def test_nothing_is_learnt_from_the_first_bad_step_on(policy: str) -> None:
    ours, guard, _ = guarded(policy)
    torch.testing.assert_close(ours, by_hand(range(1, 3)))
    with pytest.raises(
        NonFiniteError, match=r"the gradient of blocks\.0\.bias is not finite at step 3"
    ) as raised:
        guard.raise_if_nonfinite(6, trace=lambda step: {})
    assert raised.value.details == {"step": 3, "parameter": "blocks.0.bias", "layer": None}


def test_running_statistics_skip_the_step_too() -> None:
    norm = nn.BatchNorm1d(2)
    parameters = dict(norm.named_parameters())
    optimizer = build_optimizer(parameters, AdamWConfig())
    guard = Guard(parameters, optimizer=optimizer, policy="skip", buffers=list(norm.buffers()))
    seen = nn.BatchNorm1d(2)
    for value in (1.0, math.nan, 2.0):
        batch = torch.tensor([[value, 1.0], [0.0, 3.0]])
        guard.remember_buffers()
        loss = norm(batch).sum().detach()
        guard.note(norm=loss.abs(), norms=torch.zeros(2), loss=loss)
        if math.isfinite(value):
            seen(batch)
    torch.testing.assert_close(list(norm.buffers()), list(seen.buffers()))


def test_an_infinite_loss_tells_by_its_gradients() -> None:
    """The derivative of -log(0) by softmax is finite: alone it would go unseen."""
    logits = torch.tensor([0.0, -math.inf], requires_grad=True)
    nn.functional.cross_entropy(logits, torch.tensor(1)).backward()
    assert logits.grad.isfinite().all()
    logits.grad = None
    propagate_nonfinite(nn.functional.cross_entropy(logits, torch.tensor(1))).backward()
    assert logits.grad.isnan().all()


def test_a_finite_loss_is_untouched() -> None:
    value = torch.tensor(0.1, requires_grad=True)
    other = torch.tensor(0.1, requires_grad=True)
    assert propagate_nonfinite(value * 0.3) == value * 0.3
    propagate_nonfinite(value * 0.3).backward()
    (other * 0.3).backward()
    assert value.grad == other.grad


def test_names_sort_as_a_batch_passes_the_model() -> None:
    names = ["head.weight", "blocks.10.a", "stem.weight", "blocks.2.b"]
    assert sorted(names, key=order) == ["stem.weight", "blocks.2.b", "blocks.10.a", "head.weight"]


def found(*, loss: float = 1.0, gradient: str | None = None, weight: str | None = None) -> dict[str, object]:
    return {"loss": loss, "gradient": gradient, "weight": weight}


def test_whom_to_blame() -> None:
    later, earlier = found(gradient="blocks.3.a"), found(gradient="blocks.2.b")
    assert blame([later, earlier], step=7)[0] == 1
    assert blame([earlier, found(gradient="blocks.3.a", loss=math.nan)], step=7) == (
        1,
        "the loss of step 7 is nan; the first gradient that is not finite is that of blocks.2.b",
        "blocks.2.b",
    )  # fmt: skip
    broken = found(weight="blocks.5.a", loss=math.nan)
    assert blame([earlier, broken], step=7) == (
        1, "the weight blocks.5.a is not finite at step 7", "blocks.5.a",
    )  # fmt: skip
    assert "overflow" in blame([found(), found()], step=7)[1]
