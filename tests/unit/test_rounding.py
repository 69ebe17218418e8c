"""Stochastic rounding to bfloat16: unbiased, the same for any part of a weight, and why it is needed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from hpc_parallel.config.schema import AdamWConfig, OptimizerConfig
from hpc_parallel.problems import ConfigError
from hpc_parallel.training import optimizer as optimizer_module
from hpc_parallel.training.optimizer import build_optimizer
from hpc_parallel.training.rounding import Noise, RandomRounding, coordinates_of, round_to_bfloat16
from tests.composed import prepared

BOTH = RandomRounding(seed=5, weights=True, state=True)


def noise_of(name: str, shape: tuple[int, ...], *, index: int = 0, step: int = 1) -> Tensor:
    return Noise(name, coordinates_of(torch.empty(shape)), seed=5, step=step)(index)


@pytest.mark.parametrize("value", [1.001, -3.14159, 7e-41, -2.5e20, 0.999999])
def test_the_mean_over_all_noise_is_the_number_itself(value: float) -> None:
    """Each of the 2^16 values of the noise once: the only two results are the neighbours."""
    exact = torch.tensor(value, dtype=torch.float32)
    rounded = round_to_bfloat16(exact.expand(2**16), torch.arange(2**16, dtype=torch.int32))
    assert rounded.double().mean() == exact.double()
    below, above = rounded.unique().tolist()
    assert rounded.bfloat16().float().equal(rounded)
    assert below < exact < above
    assert torch.nextafter(torch.tensor(below).bfloat16(), torch.tensor(math.inf).bfloat16()) == above


def test_what_is_a_bfloat16_or_not_finite_stays() -> None:
    kept = torch.tensor([0.0, 1.0, -1.5, 3e38, math.inf, -math.inf, math.nan]).bfloat16().float()
    of_a_gpu = torch.tensor([2**31 - 1, -1], dtype=torch.int32).view(torch.float32)  # NaN, all bits set
    kept = torch.cat((kept, of_a_gpu))
    for noise in (0, 1, 2**16 - 1):
        rounded = round_to_bfloat16(kept, torch.full((9,), noise, dtype=torch.int32))
        torch.testing.assert_close(rounded, kept, rtol=0, atol=0, equal_nan=True)


def test_drawn_noise_is_uniform_and_independent() -> None:
    """Over elements, over steps, and between the tensors of a weight: means and correlations of 10^6 draws.

    Bounds are five standard errors.
    """
    count = 1000 * 1000
    draws = [
        noise_of("a", (1000, 1000)), noise_of("a", (1000, 1000), index=1),
        noise_of("a", (1000, 1000), index=2), noise_of("a", (1000, 1000), step=2),
        noise_of("b", (1000, 1000)),
    ]  # fmt: skip
    centred = [(draw.double() + 0.5) / 2**16 - 0.5 for draw in draws]
    for index, draw in enumerate(centred):
        assert abs(float(draw.mean())) < 5 / math.sqrt(12 * count)
        assert abs(float(draw.mean(0).square().mean()) * 12 * 1000 - 1) < 0.25
        neighbours = float((draw[:, 1:] * draw[:, :-1]).mean()), float((draw[1:] * draw[:-1]).mean())
        others = (float((draw * other).mean()) for other in centred[index + 1 :])
        assert max(map(abs, (*neighbours, *others))) < 5 / (12 * math.sqrt(count * 0.999))
    bits = torch.stack([(draws[0] >> bit) & 1 for bit in range(16)]).double().mean((1, 2))
    assert float((bits - 0.5).abs().max()) < 5 * 0.5 / math.sqrt(count)


@pytest.mark.parametrize("shape", [(6, 5), (4, 3, 2), (7,), ()])
def test_the_noise_of_rows_is_that_of_the_whole_weight(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updated row by row, weights and state are the same as if updated at once."""

    def trained() -> tuple[Tensor, dict[str, Tensor]]:
        weight = Parameter(torch.linspace(-2, 2, math.prod(shape)).view(shape).bfloat16())
        optimizer = build_optimizer({"a": weight}, AdamWConfig(learning_rate=0.01), rounding=BOTH)
        for step in (1, 2, 3):
            optimizer.begin_step(step, rate=0.01)
            weight.grad = torch.cos(step + weight.detach().float()).bfloat16()
            optimizer.step()
        return weight.detach(), optimizer.state()

    weight, state = trained()
    monkeypatch.setattr(optimizer_module, "UPDATED_AT_ONCE", {"cpu": 1})
    by_rows, state_by_rows = trained()
    assert torch.equal(weight, by_rows)
    assert {key: value.dtype for key, value in state.items()} == {
        "a/exp_avg": torch.bfloat16, "a/exp_avg_sq": torch.bfloat16, "a/step": torch.float32
    }  # fmt: skip
    for key, value in state.items():
        assert value.shape == (() if key == "a/step" else shape)
        assert torch.equal(value, state_by_rows[key])


@pytest.mark.parametrize("shape", [(), (0, 3)])  # a scalar, and the slice of a rank that has no rows
def test_steps_are_counted_exactly(shape: tuple[int, ...]) -> None:
    """After a restart too: a bfloat16 can't count beyond 256."""
    weight = Parameter(torch.ones(shape).bfloat16())
    optimizer = build_optimizer({"a": weight}, AdamWConfig(), rounding=BOTH)
    full, count = (weight.shape, torch.bfloat16), (torch.Size(), torch.float32)
    optimizer.create_state({"a/exp_avg": full, "a/exp_avg_sq": full, "a/step": count})
    optimizer.state()["a/step"].fill_(1000)
    for step in range(1001, 1004):
        optimizer.begin_step(step, rate=0.01)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert optimizer.state()["a/step"].item() == 1003


def test_an_update_is_that_of_torch_before_it_is_rounded() -> None:
    """Each number is one of the two neighbours of what float32 gives from the same weights and state."""
    weight = Parameter(torch.linspace(-2, 2, 3000).view(60, 50).bfloat16())
    optimizer = build_optimizer({"a": weight}, AdamWConfig(weight_decay=0.3), rounding=BOTH)
    for step in (1, 2, 3):
        wide = Parameter(weight.detach().float())
        reference = torch.optim.AdamW([wide], lr=0.01, betas=(0.9, 0.95), weight_decay=0.3)
        reference.state[wide] = {
            key.partition("/")[2]: value.float().clone() for key, value in optimizer.state().items()
        }
        weight.grad = (2 + torch.sin(step + weight.detach().float())).bfloat16()
        wide.grad = weight.grad.float()
        optimizer.begin_step(step, rate=0.01)
        optimizer.step()
        reference.step()
        exact = {"weight": wide.detach(), **reference.state[wide]}
        rounded = {"weight": weight.detach(), **{key[2:]: value for key, value in optimizer.state().items()}}
        assert exact.pop("step") == rounded.pop("step") == step
        for key, value in rounded.items():
            distance = (value.float() - exact[key]) / exact[key].abs()
            assert float(distance.abs().max()) < 2**-7 + 1e-6
            assert float(distance.abs().max()) > 2**-8  # nearest rounding stays below
            assert abs(float(distance.mean())) < 5 * 2**-8 / math.sqrt(3000)


def regression(*, dtype: torch.dtype, rounding: RandomRounding | None) -> list[float]:
    """The losses of 400 steps whose updates are below half the distance of two neighbours in bfloat16."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(256, 32, generator=generator)
    targets = inputs @ (1 + 0.05 * torch.randn(32, 1, generator=generator))
    weight = Parameter(torch.ones(1, 32, dtype=dtype))
    config = OptimizerConfig(_target_="torch.optim.SGD")
    optimizer = build_optimizer({"a": weight}, config, rounding=rounding)
    losses = []
    for step in range(1, 401):
        optimizer.begin_step(step, rate=0.01)
        loss = (inputs @ weight.float().T - targets).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_rounding_to_the_nearest_stalls_where_random_rounding_follows_float32() -> None:
    exact = regression(dtype=torch.float32, rounding=None)
    nearest = regression(dtype=torch.bfloat16, rounding=None)
    drawn = regression(dtype=torch.bfloat16, rounding=RandomRounding(seed=0, weights=True, state=False))
    assert exact[-1] < 0.01 * exact[0]
    assert nearest[-1] > 0.5 * nearest[0]
    half = next(step for step, loss in enumerate(exact) if loss < exact[0] / 2)
    assert drawn[half] == pytest.approx(exact[half], rel=0.25)
    assert drawn[-1] < 0.1 * drawn[0]  # what is left is the noise of the last steps


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_withheld_step_changes_nothing(kind: str) -> None:
    weights = [Parameter(torch.linspace(-1, 1, 12).bfloat16()) for _ in range(2)]
    config = prepared(f"optimizer={kind}").config.optimizer
    skipping, other = (build_optimizer({"a": weight}, config, rounding=BOTH) for weight in weights)
    flag = torch.zeros(())
    skipping.withhold_by(flag)
    for step, bad in enumerate((True, False, True, False), start=1):
        flag.fill_(bad)
        for optimizer, weight in zip((skipping, other), weights, strict=True):
            optimizer.begin_step(step, rate=0.1)
            weight.grad = torch.full_like(weight, math.nan if bad else step)
        skipping.step()
        if not bad:
            other.step()
    assert torch.equal(*weights)
    for key, value in skipping.state().items():
        assert torch.equal(value, other.state()[key])


def test_a_class_that_needs_whole_weights_is_refused() -> None:
    weights = {"a": Parameter(torch.ones(2, 2))}
    with pytest.raises(ConfigError, match=r"torch.optim.Muon keeps nothing in bfloat16. Try optimizer=adamw"):
        build_optimizer(weights, OptimizerConfig(_target_="torch.optim.Muon"), rounding=BOTH)


HALF = "training.weights=bfloat16"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            (HALF, "training.precision=float32"),
            "training.precision = float32 can't be combined with training",
        ),
        (
            (HALF, "training.precision=float16"),
            "training.precision = float16 can't be combined with training",
        ),
        (
            (HALF, "optimizer=muon"),
            "training.weights = bfloat16 is for classes that update each number alone",
        ),
        (("optimizer.state=bfloat16", "optimizer=adafactor"), "not for torch.optim.Adafactor. Try opt"),
        ((HALF, "strategy=parameter_server", "nodes=3"), "with strategy.execution = parameter_server"),
        ((HALF, "training.global_batch_size=130", "training.microbatch_size=1"), "adds up 130 microbatches"),
    ],
)
def test_what_can_not_be_rounded_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        prepared("launcher=local", "device=cpu", "training.precision=bfloat16", *words)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ((HALF, "training.precision=bfloat16"), "weights"),
        (("optimizer.state=bfloat16",), "optimizer state"),
        (("optimizer.state=bfloat16", "task=infer"), None),
        ((), None),
    ],
)
def test_what_is_rounded_is_said_before_the_start(words: tuple[str, ...], parts: str | None) -> None:
    line = f"warning     {parts} in bfloat16, rounded at random: other losses than with float32"
    notes = [note for note in prepared(*words).notes if "in bfloat16" in note]
    assert notes == ([line] if parts else [])
