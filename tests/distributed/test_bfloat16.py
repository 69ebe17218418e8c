"""Weights in bfloat16 for a step, over float32 weights: the same curve on every layout, short messages."""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest
import torch

from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.models.transformer import Transformer
from hpc_parallel.strategies.precision import of_floats
from hpc_parallel.strategies.working_weights import cast, cast_for_good, cast_weights
from tests.marks import in_full
from tests.matrix import TEXTS
from tests.parity import COMMON, SHARED, largest_difference
from tests.workers import Train, Workers

HALF = "training.precision=bfloat16"


def test_a_weight_is_cast_once_and_its_gradient_reaches_it() -> None:
    model = Transformer(layers=2, dim=16, heads=2, kv_heads=1, ffn_dim=24, vocab_size=11)
    original = dict(model.named_parameters())
    tokens = torch.randint(11, (2, 6))
    with cast_weights([model]):
        assert model.stem.weight is model.head.output.weight
        assert model.stem.weight.dtype == torch.bfloat16
        with torch.autocast("cpu", dtype=torch.bfloat16):
            streams = [model.blocks["0"](model.stem(tokens)) for _ in range(2)]
            losses = [model.head(model.blocks["1"](x)).float().square().sum() for x in streams]
        assert [x.dtype for x in streams] == [torch.bfloat16] * 2
        for loss in losses:  # two microbatches go back through the same casts
            loss.backward()
    assert dict(model.named_parameters()) == original
    assert all(p.grad is not None and p.dtype == p.grad.dtype == torch.float32 for p in original.values())
    assert all(float(p.grad.abs().sum()) > 0 for p in original.values())


def test_a_block_has_its_gradients_before_the_block_below_begins() -> None:
    """DistributedDataParallel can average them meanwhile, and their bfloat16 is freed."""
    model = Transformer(layers=3, dim=16, heads=2, kv_heads=1, ffn_dim=24, vocab_size=11)
    seen: list[str] = []
    for name, weight in model.named_parameters():
        weight.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    with cast_weights([model]), torch.autocast("cpu", dtype=torch.bfloat16):
        x = model.stem(torch.randint(11, (2, 6)))
        for name, block in model.blocks.items():
            x.register_hook(lambda _, name=name: seen.append(f"below block {name}"))
            x = block(x)
        model.head(x).float().square().sum().backward()
    for index, name in enumerate(model.blocks):
        arrived = seen[: seen.index(f"below block {name}")]
        later = {found.split(".")[1] for found in arrived if found.startswith("blocks.")}
        assert later == set(list(model.blocks)[index:])
        own = [found for found in arrived if found.startswith(f"blocks.{name}.")]
        assert len(own) == len(list(model.blocks[name].parameters()))


def test_the_gradient_of_a_cast_is_that_of_torch() -> None:
    """Of two backward passes through one cast."""
    weights = [torch.arange(1, 7, dtype=torch.float32).div(7).requires_grad_() for _ in range(2)]
    for weight, half in zip(weights, (cast(weights[0]), weights[1].to(torch.bfloat16)), strict=True):
        for factor in (3.0, 0.1):
            (half * half * factor).sum().backward(retain_graph=True)
        assert weight.grad is not None
        assert weight.grad.dtype == torch.float32
    assert torch.equal(weights[0].grad, weights[1].grad)


TWO, FOUR = "nodes=2", "nodes=2 gpus_per_node=2"
PIPELINE = f"strategy=pipeline {TWO}"
LAYOUTS = [
    f"strategy=data {TWO}",
    f"strategy=fsdp {TWO}",
    f"strategy=hsdp {FOUR}",
    f"strategy=tensor {TWO}",
    f"strategy=tensor {FOUR} strategy.tensor=2 strategy.shard=2",
    f"strategy=pipeline {TWO} strategy.schedule=interleaved_zero_bubble strategy.stages_per_rank=2",
    f"strategy=hybrid {FOUR}",
    f"strategy=model {TWO}",
    f"strategy=context {TWO}",
    f"strategy=context {TWO} strategy.context_attention=gather",
    f"strategy=context {TWO} strategy.context_attention=all_to_all",
    f"strategy=expert {TWO} model=moe_tiny",
    f"strategy=expert {FOUR} strategy.expert=2 strategy.replicate=2 model=moe_tiny",
    "strategy=parameter_server nodes=3",
    "strategy=dataparallel gpus_per_node=2",
]


@pytest.mark.parametrize("layout", [PIPELINE, *in_full((layout,) for layout in LAYOUTS)])
def test_the_curve_is_that_of_one_device_in_bfloat16(trained: Train, layout: str) -> None:
    """A bfloat16 has 8 bits, so one rounding is up to 2^-9. A mean over hundreds of tokens differs by less
    than one rounding of a single number, although layouts round in another order."""
    shared = (word for word in layout.split() if word.startswith(SHARED))
    reference = trained(*COMMON, HALF, "strategy=single", *shared)
    split = trained(*COMMON, HALF, *layout.split())
    assert largest_difference(split.losses, reference.losses) < 2**-9
    assert all(weight.dtype == torch.float32 for weight in split.weights.values())


class Output(NamedTuple):
    logits: torch.Tensor
    experts: torch.Tensor
    cache: None = None


def test_a_loss_gets_numbers_in_half_precision_as_float32_and_all_else_as_it_is() -> None:
    half, whole = torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.float64)
    seen = of_floats(lambda output, _: output, precision="bfloat16")
    output = seen(Output(half, torch.tensor([3])), half)
    assert (output.logits.dtype, output.experts.dtype, output.cache) == (torch.float32, torch.int64, None)
    assert seen(whole, half) is whole
    assert seen({"logits": half}, half)["logits"] is half


class TiedHead(torch.nn.Module):
    """A head of one's own with the weight of the stem."""

    def __init__(self, stem: torch.nn.Embedding) -> None:
        super().__init__()
        self.weight = stem.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight)


def test_a_weight_that_another_kind_of_module_shares_stays_shared() -> None:
    stem = torch.nn.Embedding(8, 4)
    model = LayeredModel(stem=stem, blocks=[torch.nn.Linear(4, 4)], head=TiedHead(stem))
    cast_for_good(model)
    assert stem.weight.dtype == torch.bfloat16
    assert model.get_parameter("head.weight") is stem.weight


def test_activations_between_stages_have_two_bytes_a_number(trained: Train) -> None:
    """A quarter of those of float64, which other tests ask about too."""
    runs = trained(*COMMON, HALF, *PIPELINE.split()), trained(*TEXTS["pipeline of 2 ranks, 1f1b"])
    half, double = (run.summary["traffic"]["send"] for run in runs)
    assert half * 4 == double


@pytest.mark.parametrize(
    "layout",
    [
        "strategy=single",
        *in_full([(PIPELINE,), (f"strategy=expert {TWO} model=moe_tiny",)]),
    ],
)
def test_inference_holds_cast_weights_and_equals_the_validation(workers: Workers, layout: str) -> None:
    """The weights come from the float32 weights of a training run."""
    shared = (word for word in layout.split() if word.startswith(SHARED))
    words = (*COMMON, HALF, "training.checkpoint_every=3", *shared)
    trained = workers.train(*words, "strategy=single")
    asked = "task=infer", "task.batch_sizes=[4]", "task.repeats=1", f"weights={trained.folder}"
    inferred = workers.do(*words, *asked, *layout.split())
    first = json.loads((inferred / "metrics.jsonl").read_text().splitlines()[0])
    exact = trained.lines[-1]["validation_loss"]
    assert abs(first["validation_loss"] - exact) < 2**-9 * exact * (layout != "strategy=single") + 1e-12
