"""What a model's hints and code show before it is split: missing and contradicting roles, own positions."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from hpc_parallel.layout.layout import Layout
from hpc_parallel.models.attention import CausalAttention
from hpc_parallel.models.convnet import ConvNet
from hpc_parallel.models.layered import Column, LayeredModel, with_ties
from hpc_parallel.models.moe import MoeTransformer
from hpc_parallel.models.transformer import Transformer
from hpc_parallel.problems import ConfigError
from hpc_parallel.strategies.dry_forward import find_local_positions
from hpc_parallel.strategies.model_checks import find_problems
from hpc_parallel.strategies.stages import divide
from hpc_parallel.strategies.tensor.tensor_roles import find_fused_dropouts
from hpc_parallel.strategies.whole_model import build_model
from tests.composed import composed, prepared
from tests.dropout_models import Tokens
from tests.random_models import RIGHT, RandomModel

CONTEXT, TENSOR = Layout(context=2), Layout(tensor=2)


def problems(model: LayeredModel, layout: Layout, *, length: int = 32, **strategy: Any) -> list[str]:
    config = prepared("strategy=data", "launcher=local").config
    config = replace(config, strategy=replace(config.strategy, **strategy))
    return [str(p) for p in find_problems(model, config=config, layout=layout, sample_shape=(length,))]


def random_model(**spec: Any) -> RandomModel:
    with torch.device("meta"):
        return with_ties(RandomModel(spec={**RIGHT, **spec}, vocab_size=64, dim=16))


WRONG = {
    "positions counted in the stem": (
        {"positions": "arange"}, CONTEXT, "RandomModel.stem counts positions from the length of its input"
    ),
    "a table cut in the stem": ({"positions": "slice"}, CONTEXT, "stem cuts a table of positions"),
    "a kernel of its own": (
        {"attention": "kernel"}, CONTEXT, "RandomModel.blocks.0.attention mixes positions outside"
    ),
    "attention by hand": (
        {"attention": "by_hand"}, CONTEXT, "RandomModel.blocks.0.attention mixes positions outside"
    ),
    "alike beside position": (
        {"roles": "alike"}, TENSOR, "has the role alike for blocks.0.feed, which needs the full sequence"
    ),
    "fused columns that are cut": (
        {"attention": "fused", "roles": "fused_column"}, TENSOR,
        "blocks.0.attention cuts the outputs of blocks.0.attention.qkv into 3. Give it the role Column(parts",
    ),
    "column layers that get slices": ({"roles": "no_whole"}, TENSOR, "in no module of the role whole"),
    "no roles": (
        {"roles": "none"}, TENSOR, "has no role for stem.tokens.weight, stem.table.weight, blocks.0."
        "attention.query.weight. stem.tokens may have the role vocabulary, or position_table if"
    ),
    "one block as all blocks": (
        {"shared": "blocks"}, Layout(pipeline=2),
        "strategy.pipeline = 2 can't be used: blocks.1.attention.query.weight of RandomModel is blocks.0."
        "attention.query.weight, and stages share no weights. This model can be cut nowhere. Try "
        "strategy.pipeline=1."
    ),
    "two blocks with one layer": (
        {"shared": "linear", "layers": 4}, Layout(pipeline=2),
        "blocks.3.feed.up.weight of RandomModel is blocks.0."
    ),
    "two blocks with one weight": (
        {"shared": "weight", "layers": 4}, Layout(pipeline=2),
        "blocks.3.feed.up.weight of RandomModel is blocks.0."
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_model_is_refused_by_name(case: str) -> None:
    spec, layout, reason = WRONG[case]
    assert any(reason in problem for problem in problems(random_model(**spec), layout))


@pytest.mark.parametrize("spec", [{}, {"attention": "fused"}, {"positions": "rotary", "feed": "gated"}])
def test_a_right_model_has_no_problem(spec: dict[str, Any]) -> None:
    model = random_model(**spec)
    assert problems(model, CONTEXT) == problems(model, TENSOR) == []


def test_without_sequence_parallelism_a_full_input_is_allowed() -> None:
    assert problems(random_model(roles="alike"), TENSOR, sequence_parallel=False) == []


@pytest.mark.parametrize("name", ["tiny", "moe_tiny"])
def test_the_models_of_the_package_count_no_positions(name: str) -> None:
    from hydra.utils import instantiate

    with torch.device("meta"):
        assert find_local_positions(instantiate(composed(f"model={name}").model)) is None


def test_a_column_without_a_row_and_parts_that_do_not_divide() -> None:
    model = random_model(attention="fused")
    roles = dict(model.tensor_roles)
    del roles["blocks.*.attention.output"], roles["blocks.*.feed.down"]
    model.tensor_roles = roles | {"blocks.*.attention.qkv": Column(parts=5), "head.logits": "logit"}
    assert "has the unknown role 'logit'" in problems(model, TENSOR)[0]
    model.tensor_roles = roles | {"blocks.*.attention.qkv": Column(parts=5)}
    found = problems(model, TENSOR)
    assert any("has no role for blocks.0.attention.output.weight" in problem for problem in found)
    assert any("splits columns in blocks.0 without a row layer" in problem for problem in found)
    assert any("whose 48 outputs do not divide by 10" in problem for problem in found)


def test_dropout_that_depends_on_the_layout_is_refused_on_several_devices() -> None:
    model = random_model()
    model.blocks["1"].drop = nn.AlphaDropout(0.1)
    own = ("~model", "+model={_target_: tests.random_models.RandomModel}", "launcher.check_imports=false")
    config = prepared("strategy=data", "nodes=2", "launcher=local", *own).config
    (found,) = find_problems(model, config=config, layout=Layout(replicate=2), sample_shape=(32,))
    assert "RandomModel.blocks.1.drop is AlphaDropout(p=0.1" in str(found)
    assert problems(model, Layout()) == []


def test_a_dropout_of_fused_projections_is_refused() -> None:
    """A device's columns are some of each projection, so they are not next to each other."""
    with torch.device("meta"):
        model = Tokens(layers=1, width=8, rate=0.1)
    model.tensor_roles = dict(model.tensor_roles) | {"blocks.*.feed.up": Column(parts=2)}
    (found,) = map(str, find_fused_dropouts(model, degree=2, sample_shape=(20,)))
    assert "splits the columns of blocks.0.feed.up, and blocks.0.feed.hidden drops all its" in found
    model.tensor_roles = dict(model.tensor_roles) | {"blocks.*.feed.up": "column"}
    assert list(find_fused_dropouts(model, degree=2, sample_shape=(20,))) == []


@pytest.mark.processes  # imports the class as the job would
@pytest.mark.parametrize("target", ["models.NeedsNumbers", "plain_models.made_layers"])
def test_a_constructor_that_needs_numbers_is_told_what_to_do(target: str) -> None:
    own = ("~model", f"+model={{_target_: tests.{target}}}")
    config = prepared("launcher=local", *own).config
    told = r"on meta tensors \(models.py:\d+\), raised by .* under `with torch.device\(.cpu.\):`"
    with pytest.raises(ConfigError, match=told):
        build_model(config)


class Sliding(CausalAttention):
    """Another attention."""


@pytest.mark.parametrize(
    ("case", "rule"),
    [
        ("no attention", "can't be used: ConvNet has no CausalAttention or FullAttention to split"),
        ("its own", "can't be used: this package's attention can be split, but not its subclass Sliding"),
        ("its length", "does not split samples of shape [10] into two slices a device"),
    ],
)
def test_a_sequence_that_can_not_be_split(case: str, rule: str) -> None:
    with torch.device("meta"):
        model: LayeredModel = Transformer(layers=1, dim=8, heads=2, kv_heads=2, ffn_dim=8, vocab_size=8)
        if case == "no attention":
            model = ConvNet(channels=[4], classes=2, in_channels=1, kernel_size=3)
        elif case == "its own":
            model.blocks["0"].attention.mix = Sliding()
    length = 10 if case == "its length" else 8
    assert problems(model, CONTEXT, length=length) == [
        f"strategy.context = 2 {rule}. Try strategy.context=1."
    ]


def test_more_stages_than_blocks() -> None:
    (found,) = problems(random_model(), Layout(pipeline=3))
    assert "strategy.pipeline = 3 stages are more than the model's 2 blocks" in found


def test_a_weight_without_a_role_is_refused() -> None:
    class Forgetful(Transformer):
        tensor_roles = MappingProxyType({**Transformer.tensor_roles, "head.norm": "whole"})

    with torch.device("meta"):
        model = Forgetful(layers=1, dim=8, heads=2, kv_heads=2, ffn_dim=8, vocab_size=8)
    assert problems(model, TENSOR) == [
        "strategy.tensor = 2 can't be used: Forgetful.tensor_roles has no role for head.norm.weight. "
        "head.norm may have the role position. Try strategy.tensor=1."
    ]


PAIRS = {"layers": 4, "shared": "pairs"}


def test_a_pipeline_is_cut_where_no_weight_is_shared() -> None:
    """Balanced stages of [a, a, b, b, c, c] would begin at block 3."""
    model = random_model(layers=6, shared="pairs")
    options = prepared("strategy=pipeline", "nodes=2", "launcher=local").config.strategy
    assert divide(model, stages=3, sample_shape=(32,), options=options) == [
        range(2),
        range(2, 4),
        range(4, 6),
    ]
    assert [len(part) for part in divide(model, stages=2, sample_shape=(32,), options=options)] in (
        [2, 4],
        [4, 2],
    )
    with pytest.raises(
        ConfigError, match=r"strategy.cuts = \[3\] can't be used: .* cut before block 2, 4 only\."
    ):
        divide(model, stages=2, sample_shape=(32,), options=replace(options, cuts=(3,)))


@pytest.mark.parametrize(
    ("spec", "name"),
    [(PAIRS, "blocks.0.attention.query.weight"), ({"feed": "recurrent"}, "blocks.0.feed.mix"), ({}, None)],
    ids=["a block", "a layer in a loop", "nothing"],
)
def test_a_split_backward_pass_refuses_what_is_used_again(spec: dict[str, Any], name: str | None) -> None:
    """torch raises an error for it, or waits for ever."""
    model = random_model(**spec, tied=True)
    found = problems(model, Layout(pipeline=2), schedule="interleaved_zero_bubble", stages_per_rank=1)
    start = "strategy.schedule = interleaved_zero_bubble can't be used: it splits the backward pass, and"
    assert [text.startswith(f"{start} RandomModel uses {name} several") for text in found] == [True] * bool(
        name
    )
    assert problems(model, Layout(pipeline=2), schedule="1f1b", stages_per_rank=1) == []


@pytest.mark.parametrize(
    ("module", "role", "sentence"),
    [
        (
            nn.LSTM(16, 16),
            "position",
            "the role position for blocks.0.extra, a LSTM, which needs all positions. Give",
        ),
        (
            nn.LSTM(16, 16),
            None,
            "extra may always have the role alike, with strategy.sequence_parallel=false",
        ),
        (
            nn.Linear(16, 16),
            "row",
            "the role vocabulary for stem.tokens.weight and the role row for blocks.0.extra.",
        ),
    ],
    ids=["a recurrence", "without a role", "one weight of two roles"],
)
def test_a_role_that_works_is_named(module: nn.Module, role: str | None, sentence: str) -> None:
    model = random_model()
    model.blocks["0"].extra = module
    if isinstance(module, nn.Linear):
        module.weight = model.stem.tokens.weight
    roles = {} if role is None else {"blocks.*.extra": role, "blocks.*.extra.*": role}
    model.tensor_roles = {**model.tensor_roles, **roles}
    assert any(sentence in text for text in problems(with_ties(model), TENSOR))


def test_the_head_may_have_logits() -> None:
    model = random_model()
    model.tensor_roles = {name: role for name, role in model.tensor_roles.items() if name != "head.logits"}
    model.head.logits.weight, model.tied = nn.Parameter(torch.empty(64, 16, device="meta")), {}
    (found,) = problems(model, TENSOR)
    assert (
        "for head.logits.weight. head.logits may have the role logits, or classes in a model without" in found
    )


def test_an_attention_in_two_blocks_can_not_have_one_cache() -> None:
    config = prepared("strategy=single", "launcher=local").config
    config = replace(config, task=replace(config.task, name="generate"))
    model = random_model(shared="mix")
    (found,) = find_problems(model, config=config, layout=Layout(), sample_shape=(32,))
    assert "RandomModel.blocks.1.attention.mix is used in several places, and has one cache" in str(found)
    assert problems(model, CONTEXT) == []


@pytest.mark.parametrize("layout", [Layout(), Layout(replicate=2)])
def test_sparse_gradients_are_refused_by_name(layout: Layout) -> None:
    model = random_model()
    assert not [problem for problem in problems(model, layout) if "sparse" in problem]
    model.stem.tokens.sparse = True
    (found,) = [problem for problem in problems(model, layout) if "sparse" in problem]
    assert found == (
        "RandomModel.stem.tokens is Embedding with sparse=True: clipping, the optimizers and the layouts "
        "need dense gradients. Try sparse=False."
    )


def test_a_weight_without_elements_is_not_sliced() -> None:
    model = random_model()
    model.head.nothing = nn.Parameter(torch.empty(0, 4, device="meta"))
    sentence = "RandomModel.head.nothing has no elements, and fully_shard can't reduce its gradient"
    assert [found.partition(". ")[0] for found in problems(model, Layout(shard=2))] == [sentence]
    assert problems(model, Layout(replicate=2)) == []


def test_experts_are_split_by_a_width_that_divides() -> None:
    shape = {"layers": 1, "dim": 32, "heads": 2, "kv_heads": 2, "vocab_size": 16, "tied_head": False}
    mixture = MoeTransformer(experts=4, experts_per_token=2, balance=0.0, ffn_dim=173, **shape)
    role = "blocks.0.feed_forward, whose experts' width does not divide by 2"
    assert any(f"has the role experts for {role}" in problem for problem in problems(mixture, TENSOR))
    model = random_model()
    model.tensor_roles = dict(model.tensor_roles) | {"blocks.*.feed": "experts"}
    assert any("which has no Experts" in problem for problem in problems(model, TENSOR))
