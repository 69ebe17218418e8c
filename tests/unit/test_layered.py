"""Cutting and filling a model: a stage has the whole model's names and bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpc_parallel.models.drawn_weights import tensor_seed
from hpc_parallel.models.layered import LayeredModel, PartFlops, keep, materialise
from hpc_parallel.models.transformer import Transformer

CUTS: list[dict[str, Any]] = [
    {"blocks": range(2), "stem": True, "head": False},
    {"blocks": range(2, 4), "stem": False, "head": True},
]


def build(*, tied: bool) -> Transformer:
    with torch.device("meta"):
        return Transformer(layers=4, dim=16, heads=4, kv_heads=2, ffn_dim=24, vocab_size=11, tied_head=tied)


def fill(model: LayeredModel, *, seed: int = 3, dtype: torch.dtype = torch.float32) -> LayeredModel:
    return materialise(model, seed=seed, device="cpu", dtype=dtype)


@pytest.mark.parametrize("tied", [True, False])
def test_stages_in_sequence_equal_the_model(tied: bool) -> None:
    whole = fill(build(tied=tied))
    stages = [fill(keep(build(tied=tied), **cut)) for cut in CUTS]
    tokens = torch.randint(11, (2, 7), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(stages[1](stages[0](tokens)), whole(tokens), rtol=0, atol=0)

    own = [dict(stage.named_parameters(remove_duplicate=False)) for stage in stages]
    expected = dict(whole.named_parameters(remove_duplicate=False))
    assert sorted([*own[0], *own[1]]) == sorted(expected)
    for name, parameter in (own[0] | own[1]).items():
        assert torch.equal(parameter, expected[name]), name


def test_a_tied_pair_is_one_parameter_until_it_is_cut() -> None:
    whole = fill(build(tied=True))
    assert whole.head.output.weight is whole.stem.weight
    assert "head.output.weight" not in dict(whole.named_parameters())
    assert "head.output.weight" in dict(keep(build(tied=True), **CUTS[1]).named_parameters())
    both_ends = fill(keep(build(tied=True), blocks=[0, 3], stem=True, head=True))
    assert both_ends.head.output.weight is both_ends.stem.weight


def test_values_depend_on_seed_and_name_alone() -> None:
    one, same, other = (dict(fill(build(tied=False), seed=seed).named_parameters()) for seed in (3, 3, 4))
    drawn = [name for name, parameter in one.items() if parameter.dim() > 1]
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in drawn)
    assert not torch.equal(one["blocks.0.attention.query.weight"], one["blocks.1.attention.query.weight"])
    # sha256 of "3:stem.weight", computed apart: a change of the rule changes every published curve.
    assert tensor_seed(3, "stem.weight") == 0xA5224B04B4FF2E9F


def test_float64_starts_from_the_numbers_of_float32() -> None:
    single, double = (
        fill(build(tied=True), dtype=dtype).state_dict() for dtype in (torch.float32, torch.float64)
    )
    for name, values in double.items():
        assert values.dtype == torch.float64
        assert torch.equal(values, single[name].double()), name


class Normed(LayeredModel):
    """A user's own model: biases, running statistics, a block of another shape, a real buffer."""

    def __init__(self) -> None:
        super().__init__(
            stem=nn.Linear(3, 5), blocks=[nn.BatchNorm1d(5), nn.Linear(5, 5)], head=nn.Linear(5, 2)
        )

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().sum()


def test_defaults_serve_a_model_of_ones_own() -> None:
    with torch.device("meta"):
        model = Normed()
    fill(model, dtype=torch.float64)
    norm = model.blocks["0"]
    assert torch.equal(norm.weight, torch.ones(5, dtype=torch.float64))
    assert torch.equal(norm.running_var, torch.ones(5, dtype=torch.float64))
    assert torch.equal(norm.running_mean, torch.zeros(5, dtype=torch.float64))
    assert norm.num_batches_tracked.dtype == torch.int64
    assert norm.num_batches_tracked == 0
    assert torch.equal(model.stem.bias, torch.zeros(5, dtype=torch.float64))
    assert model.loss_terms(torch.zeros(4, 2)) == 8
    assert model.forward_flops((1,)) == PartFlops(stem=30, blocks=(0, 50), head=20)
    assert model(torch.ones(4, 3, dtype=torch.float64)).shape == (4, 2)


def test_initial_spread_is_the_published_one() -> None:
    with torch.device("meta"):
        model = Transformer(layers=8, dim=256, heads=4, kv_heads=2, ffn_dim=512, vocab_size=512)
    weights = dict(fill(model).named_parameters())
    for name, expected in {
        "stem.weight": 0.02,
        "blocks.7.attention.query.weight": 0.02,
        "blocks.7.attention.output.weight": 0.005,  # 0.02 / sqrt(2 * 8)
        "blocks.0.feed_forward.down.weight": 0.005,
    }.items():
        assert weights[name].std().item() == pytest.approx(expected, rel=0.02), name
        assert abs(weights[name].mean().item()) < 5 * expected / weights[name].numel() ** 0.5
    assert torch.equal(weights["head.norm.weight"], torch.ones(256))


def test_an_absent_part_cannot_be_kept() -> None:
    stage = keep(build(tied=True), **CUTS[0])
    with pytest.raises(ValueError, match="no block 3 among 0, 1"):
        keep(stage, blocks=[1, 3], stem=True, head=False)
    with pytest.raises(ValueError, match="cut away"):
        keep(stage, blocks=[1], stem=True, head=True)


def test_other_names_are_free_for_models_of_users() -> None:
    """A new public name could be a method or a part of somebody's model."""
    public = {name for name in dir(LayeredModel) if not name.startswith("_")} - set(dir(nn.Module))
    assert public == {
        "channels_last", "distinct_blocks", "forward_flops", "ignore_index", "initialise", "loss",
        "loss_terms", "metrics", "pixelwise", "small", "tensor_roles", "tied",
    }  # fmt: skip
