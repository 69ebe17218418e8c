"""The learning rate by its closed form, updates by their equations, rules, refusals, norm and clipping."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hpc_parallel.config.optimizer_rules import learning_rate
from hpc_parallel.config.schema import AdamWConfig, OptimizerConfig
from hpc_parallel.models.drawn_weights import own_slice
from hpc_parallel.problems import ConfigError
from hpc_parallel.strategies.gradients import GradientNorm, clip
from hpc_parallel.training import optimizer as optimizer_module
from hpc_parallel.training.optimizer import ModelOptimizer, build_optimizer
from tests.composed import prepared
from tests.oracle.fakes import fake_world

COSINE = AdamWConfig(learning_rate=2.0, warmup_steps=10, final_share=0.1)


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
    config = AdamWConfig(learning_rate=0.5, warmup_steps=2, schedule="constant")
    assert [learning_rate(step, steps=9, config=config) for step in (1, 2, 3, 9)] == [0.25, 0.5, 0.5, 0.5]


@pytest.mark.parametrize(("step", "share"), [(10, 1.0), (60, 0.55), (85, 0.325), (110, 0.1)])
def test_linear_decay(step: int, share: float) -> None:
    config = replace(COSINE, schedule="linear")
    assert learning_rate(step, steps=110, config=config) == pytest.approx(2.0 * share)


@pytest.mark.parametrize(
    ("step", "share"), [(5, 0.5), (10, 1.0), (75, 1.0), (80, 1.0), (90, 0.55), (95, 0.325), (100, 0.1)]
)
def test_warm_up_stable_and_decay(step: int, share: float) -> None:
    """The last fifth of 100 steps decays, in a straight line from step 80 to step 100."""
    config = replace(COSINE, schedule="wsd")
    assert learning_rate(step, steps=100, config=config) == pytest.approx(2.0 * share)


def test_a_gradient_of_another_order_in_memory_updates_its_own_weight() -> None:
    """Compiled convolutions give such gradients, and the fused AdamW read each number as another's."""
    weights = []
    for order in (torch.contiguous_format, torch.channels_last):
        weight = nn.Parameter(torch.zeros(3, 4, 2, 2, dtype=torch.float64))
        weight.grad = torch.arange(-24.0, 24.0, dtype=torch.float64).reshape(3, 4, 2, 2)
        weight.grad = weight.grad.contiguous(memory_format=order)
        build_optimizer({"weight": weight}, AdamWConfig()).step()
        weights.append(weight.detach())
    assert torch.equal(*weights)


def test_slices_are_updated_as_rows_of_the_whole_weight() -> None:
    """Beside a weight that is whole, a frozen one of integers, and in a slice that fully_shard moves."""
    with fake_world(1, size=2):
        mesh = init_device_mesh("cpu", (2,))

        def sliced(full: torch.Tensor) -> DTensor:
            return own_slice(full, like=distribute_tensor(full, mesh, [Shard(0)]))

        full, gradient = torch.arange(15.0).view(5, 3), torch.linspace(-1, 1, 15).view(5, 3)
        alone, whole, slices = (nn.Parameter(value) for value in (full.clone(), full.clone(), sliced(full)))
        frozen = nn.Parameter(sliced(torch.arange(4)), requires_grad=False)
        weights = {"whole": whole, "slices": slices, "frozen": frozen}
        optimizers = [build_optimizer(given, AdamWConfig()) for given in (weights, {"alone": alone})]
        for _ in range(2):
            alone.grad, whole.grad = gradient.clone(), gradient.clone()
            slices.grad = sliced(gradient.T.contiguous().T)  # of another order in memory
            slices._local_tensor = slices.to_local().detach().clone()
            for optimizer in optimizers:
                optimizer.step()
        assert torch.equal(whole, alone)
        assert torch.equal(slices.to_local(), alone[3:])
        state, expected = (optimizer.state() for optimizer in optimizers)
        kept = state["slices/exp_avg"]
        assert isinstance(kept, DTensor)
        assert (kept.shape, kept.placements) == (slices.shape, slices.placements)
        assert torch.equal(kept.to_local(), expected["alone/exp_avg"][3:])


def test_a_function_decides_every_step() -> None:
    config = replace(COSINE, schedule="tests.optimizers.triangle", warmup_steps=None)
    rates = [learning_rate(step, steps=8, config=config) for step in (1, 2, 4, 7, 8)]
    assert rates == pytest.approx([0.5, 1.0, 2.0, 0.5, 0.0])
    halved = replace(config, schedule="tests.optimizers.halved")
    assert learning_rate(3, steps=8, config=halved) == config.learning_rate / 2
    endless = replace(config, schedule="tests.optimizers.endless")
    with pytest.raises(ValueError, match="endless returned inf at step 3 of 8"):
        learning_rate(3, steps=8, config=endless)
    random = replace(config, schedule="random.uniform")
    with pytest.raises(ValueError, match=r"and then .* for step 3 of 8: it must depend on the step and"):
        learning_rate(3, steps=8, config=random)


def test_adamw_follows_its_equations() -> None:
    """Two steps of Loshchilov and Hutter's algorithm 2, written out; the vector does not decay."""
    config = AdamWConfig(learning_rate=0.1, betas=[0.8, 0.9], weight_decay=0.5, eps=1e-8)
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


def small_model() -> dict[str, nn.Parameter]:
    shapes = {
        "stem.weight": (6, 4), "blocks.0.a.weight": (3, 4), "blocks.0.a.bias": (3,),
        "blocks.0.norm.weight": (4,), "blocks.0.filter": (2, 3, 1, 1), "head.weight": (5, 4),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
        for name, shape in shapes.items()
    }


def train(optimizer: ModelOptimizer, weights: dict[str, nn.Parameter], *, steps: int = 3) -> None:
    for step in range(steps):
        for weight in weights.values():
            weight.grad = torch.sin((step + 1) * weight.detach())
        optimizer.step()
        optimizer.zero_grad()
    assert all(weight.grad is None for weight in weights.values())


def by_torch(kind: type[torch.optim.Optimizer], weight: nn.Parameter, **options: object) -> torch.Tensor:
    """The weight after the steps of `train`, updated alone."""
    weight = nn.Parameter(weight.detach().clone())
    optimizer = kind([weight], **options)  # type: ignore[call-arg]
    for step in range(3):
        weight.grad = torch.sin((step + 1) * weight.detach())
        optimizer.step()
    return weight.detach()


CLASSES = ("SGD", "Adam", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Adamax", "ASGD", "Adafactor")


@pytest.mark.parametrize("name", CLASSES)
def test_any_class_of_torch_updates_as_by_itself(name: str) -> None:
    weights = small_model()
    config = OptimizerConfig(_target_=f"torch.optim.{name}", learning_rate=0.01, weight_decay=0.1)
    kind = getattr(torch.optim, name)
    expected = {
        key: by_torch(kind, weight, lr=0.01, weight_decay=0.1 if weight.ndim > 1 else 0.0)
        for key, weight in weights.items()
    }
    train(build_optimizer(weights, config, split=True), weights)
    for key, weight in weights.items():
        torch.testing.assert_close(weight.detach(), expected[key], rtol=1e-12, atol=0)


def test_a_count_that_an_optimizer_keeps_and_does_not_use_is_no_reason_to_refuse_it() -> None:
    config = OptimizerConfig(_target_="tests.optimizers.Numbered", learning_rate=0.01)
    train(build_optimizer(weights := small_model(), config, split=True), weights)


def test_plain_numbers_of_a_class_go_on_from_a_checkpoint() -> None:
    """Steps 4 to 6 after a restart change the weights as six steps in one go do; the rate may differ."""
    config = OptimizerConfig(_target_="tests.optimizers.Counting", learning_rate=0.01)
    weights, first = small_model(), {}
    optimizer = build_optimizer(weights, config, split=True)
    for half in range(2):
        if half:
            first = {name: value.detach().clone() for name, value in weights.items()}
            state = {name: value.clone() for name, value in optimizer.state().items()}
        optimizer.begin_step(1 + 3 * half, rate=0.02)
        train(optimizer, weights)
    assert (state["stem.weight/group:steps"], state["stem.weight/number:factor"]) == (3, 0.7**3)
    again = {name: nn.Parameter(value) for name, value in first.items()}
    resumed = build_optimizer(again, config, split=True)
    resumed.create_state({name: (value.shape, value.dtype) for name, value in state.items()})
    for name, value in resumed.state().items():
        value.copy_(state[name])
    assert resumed.state().keys() == state.keys()
    resumed.begin_step(4, rate=0.02)
    train(resumed, again)
    for name, weight in weights.items():
        assert torch.equal(again[name], weight), name


def test_muon_is_for_matrices_of_blocks_only() -> None:
    config = prepared("optimizer=muon").config.optimizer
    weights = small_model()
    options: dict[str, Any] = {"lr": 0.003, "weight_decay": 0.1}
    adamw = {**options, "betas": (0.9, 0.95)}
    expected = {
        name: by_torch(torch.optim.AdamW, weight, **{**adamw, **({} if weight.ndim > 1 else NO_DECAY)})
        for name, weight in weights.items()
    }
    expected["blocks.0.a.weight"] = by_torch(
        torch.optim.Muon, weights["blocks.0.a.weight"], **options, adjust_lr_fn="match_rms_adamw"
    )
    train(build_optimizer(weights, config), weights)
    for name, weight in weights.items():
        torch.testing.assert_close(weight.detach(), expected[name], rtol=1e-12, atol=0)


NO_DECAY = {"weight_decay": 0.0}


def test_later_rules_take_precedence() -> None:
    weights = small_model()
    config = OptimizerConfig(
        _target_="torch.optim.SGD", learning_rate=0.1, weight_decay=0.2, options={"momentum": 0.5},
        groups={
            "all": {"match": ["*"], "learning_rate_scale": 0.5},
            "blocks": {"match": ["blocks.*"], "weight_decay": 0.3},
            "vectors": {"dims": [1], "_target_": "torch.optim.Adam", "options": {"eps": 0.1}},
            "norms": {"match": ["*norm*"], "learning_rate_scale": 2.0, "options": {"betas": [0.5, 0.6]}},
        },
    )  # fmt: skip
    sgd, adam = torch.optim.SGD, torch.optim.Adam
    expected = {
        "stem.weight": by_torch(sgd, weights["stem.weight"], lr=0.05, momentum=0.5, weight_decay=0.2),
        "blocks.0.a.weight": by_torch(
            sgd, weights["blocks.0.a.weight"], lr=0.05, momentum=0.5, weight_decay=0.3
        ),
        "blocks.0.a.bias": by_torch(adam, weights["blocks.0.a.bias"], lr=0.05, eps=0.1, weight_decay=0.3),
        "blocks.0.norm.weight": by_torch(
            adam, weights["blocks.0.norm.weight"], lr=0.2, eps=0.1, betas=(0.5, 0.6), weight_decay=0.3
        ),
    }
    optimizer = build_optimizer(weights, config)
    optimizer.begin_step(1, rate=0.1)
    train(optimizer, weights)
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name].detach(), weight, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"_target_": "torch.optim.LBFGS"}, "closure"),
        ({"_target_": "torch.nn.Linear"}, "is no torch.optim.Optimizer"),
        ({"options": {"betas": [0.9, 0.99]}}, "torch.optim.SGD takes no betas. Its arguments are lr, mom"),
        ({"options": {"momentum": -1}}, "torch.optim.SGD refuses stem.weight: Invalid momentum"),
        ({"_target_": "torch.optim.Rprop", "weight_decay": 0.1}, "Rprop takes no weight_decay"),
        ({"_target_": "torch.optim.Muon"}, "Muon only supports 2D parameters"),
        ({"groups": {"b": {"match": ["layers.*"]}}}, "groups.b.match = .* matches no weight of the model"),
        ({"_target_": "tests.optimizers.Noisy"}, "gives other weights in a second trial"),
        ({"_target_": "tests.optimizers.Coupled"}, "updates a weight by the gradients of others"),
        ({"_target_": "tests.optimizers.Summing"}, "updates a weight by the gradients of others"),
        ({"_target_": "tests.optimizers.Forgetful"}, "keeps parts outside of tensors"),
        ({"_target_": "tests.optimizers.Forgetful"}, "keeps norm in its groups"),
        ({"_target_": "tests.optimizers.Restless"}, "gives other weights after a restart"),
        ({"_target_": "tests.optimizers.Decaying"}, "changes its setting weight_decay"),
        ({"_target_": "tests.optimizers.Averaging"}, "has other weights after its eval()"),
    ],
)
def test_what_would_be_wrong_is_refused(
    overrides: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_module, "number_of_ranks", lambda: 2)
    config = OptimizerConfig(**{"_target_": "torch.optim.SGD", **overrides})
    with pytest.raises(ConfigError, match=message):
        build_optimizer(small_model(), config, split=True)


@pytest.mark.parametrize("kind", ["sgd", "muon", "adafactor", "adamw"])
@pytest.mark.parametrize("bad", [0, 1])
def test_a_withheld_step_changes_neither_weights_nor_state(kind: str, bad: int) -> None:
    """Even the first one, in which an optimizer creates its state."""
    skipping, other = small_model(), small_model()
    config = prepared(f"optimizer={kind}").config.optimizer
    optimizer, reference = build_optimizer(skipping, config), build_optimizer(other, config)
    flag = torch.zeros(())
    optimizer.withhold_by(flag)
    for step in range(3):
        flag.fill_(step == bad)
        for weights in (skipping, other):
            for weight in weights.values():
                weight.grad = torch.sin(weight.detach()) * (math.nan if flag else 1.0)
        optimizer.step()
        if not flag:
            reference.step()
    for name, weight in skipping.items():
        torch.testing.assert_close(weight, other[name], rtol=0, atol=0)
    assert optimizer.state().keys() == reference.state().keys()
    for name, value in optimizer.state().items():
        torch.testing.assert_close(value, reference.state()[name], rtol=0, atol=0)
