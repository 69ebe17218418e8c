"""Training in float8: the curve of bfloat16 within its tolerance, and the same curve on layouts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from hpc_parallel.strategies.float8 import product
from hpc_parallel.strategies.float8_scales import LARGEST, LayerSplits, ScaleAxis, WeightScales
from tests.marks import in_full
from tests.parity import COMMON, assert_follows, largest_difference
from tests.workers import Train, Workers

HALF, TENSORWISE = "training.precision=bfloat16", "training.fp8=tensorwise"
LONG = ("training.steps=30", "training.validate_every=30")
TOLERANCE = 0.01
"""Of the loss over 30 steps. A float8 is off by up to 1/16, and at random, so that sums are nearer."""


@pytest.mark.parametrize("recipe", ["tensorwise", *in_full([("rowwise",)])])
def test_the_curve_is_that_of_bfloat16(trained: Train, recipe: str) -> None:
    words = ("strategy=single", *COMMON, HALF, *LONG)
    reference, coarse = trained(*words), trained(*words, f"training.fp8={recipe}")
    assert reference.losses[-1] < 0.6 * reference.losses[0]
    assert 0 < largest_difference(coarse.losses, reference.losses) < TOLERANCE
    means = [run.lines[-1]["validation_loss"] for run in (coarse, reference)]
    assert abs(means[0] - means[1]) < TOLERANCE * means[1]


WORDS = (*COMMON, HALF, TENSORWISE)
LAYOUTS = ["strategy=data", "strategy=fsdp", "strategy=pipeline", "strategy=tensor", "strategy=context"]
LAYOUTS.append("strategy=fsdp training.weights=bfloat16 training.activation_checkpointing=selective")


@pytest.mark.parametrize("layout", [LAYOUTS[1], *in_full((name,) for name in LAYOUTS if name != LAYOUTS[1])])
def test_a_layout_follows_one_device(trained: Train, layout: str) -> None:
    """Scales are powers of two, so other microbatches leave the bound of bfloat16 as it is."""
    rounded = [word for word in layout.split() if word.startswith("training.weights")]
    reference = trained(*WORDS, *rounded, "strategy=single")
    split = trained(*WORDS, *layout.split(), "nodes=2")
    assert largest_difference(split.losses, reference.losses) < 2**-9


@pytest.mark.full
def test_recomputation_changes_nothing(trained: Train) -> None:
    full = "training.activation_checkpointing=full"
    assert trained(*WORDS, full, "strategy=single").losses == trained(*WORDS, "strategy=single").losses


# The dims of x, weight, gradient, output and both gradients, by what an axis can split.
DIMS = (
    ("rows", "inputs"), ("outputs", "inputs"), ("rows", "outputs"), ("rows", "outputs"), ("rows", "inputs"),
    ("outputs", "inputs"),
)  # fmt: skip


def products(by_rows: bool, splits: LayerSplits, *factors: Tensor) -> list[Tensor]:
    x, weight, gradient = (factor.clone() for factor in factors)
    output = product(x.requires_grad_(), weight.requires_grad_(), by_rows=by_rows, splits=splits)
    output.backward(gradient)
    assert x.grad is not None
    assert weight.grad is not None
    return [output.detach(), x.grad, weight.grad]


def products_of_parts(by_rows: bool) -> dict[str, float]:
    """On each of two ranks: the largest difference of a part's products from those of the whole factors."""
    size, differences = {"rows": 32, "inputs": 48, "outputs": 64}, {}
    factors = []
    for place, (first, second) in enumerate(DIMS[:3]):
        numbers = torch.Generator().manual_seed(place)
        matrix = torch.randn(size[first], size[second], generator=numbers, dtype=torch.float64)
        spread = 16 if place == 2 and not by_rows else 5  # e5m2 has more range
        steps = [torch.linspace(-spread, spread, count).double().exp2() for count in matrix.shape]
        factors.append(matrix * steps[0][:, None] * steps[1])  # the last half of each dim has the largest
    whole = products(by_rows, LayerSplits(), *factors)
    for split in LayerSplits._fields:

        def part(matrix: Tensor, dims: tuple[str, str], split: str = split) -> Tensor:
            return matrix.chunk(2, dim=dims.index(split))[dist.get_rank()] if split in dims else matrix

        splits = LayerSplits(**{split: (ScaleAxis("tensor", dist.group.WORLD.group_name),)})
        parts = products(by_rows, splits, *map(part, factors, DIMS[:3]))
        for dims, found, wanted in zip(DIMS[3:], parts, whole, strict=True):
            if split not in dims:
                dist.all_reduce(found)
            expected = part(wanted, dims)
            relative = (found - expected).abs() / expected.abs().clamp(min=1e-300)  # some are rounded to 0
            differences[f"{split}, {dims}"] = float(relative.max())
    return differences


@pytest.mark.parametrize("by_rows", [False, True])
def test_parts_have_the_scale_of_the_whole(workers: Workers, by_rows: bool) -> None:
    """One rank has the largest values of each factor, so the other rank must hear of them."""
    for differences in workers.run(2, products_of_parts, by_rows):
        assert len(differences) == 9
        assert max(differences.values()) < 1e-10, differences


EXACT = ("training.precision=float64", "model.layers=2")
FOUR = ("nodes=2", "gpus_per_node=2")
SELECTIVE, ROUNDED = "training.activation_checkpointing=selective", "training.weights=bfloat16"
MIXTURE = (
    "model=moe_tiny", "model.ffn_dim=64", "model.experts=4", "model.balance=0.1", "model.shared_experts=1",
    "model.dense_layers=1", "model.layers=3",
)  # fmt: skip
SPLITS = {
    # layout: (recipe, words, samples of a microbatch). One device has the same microbatches.
    "tensor, keeping products, rounded weights": (
        "tensorwise", ("strategy=tensor", "nodes=2", SELECTIVE, ROUNDED), 16
    ),
    "context, by rows": ("rowwise", ("strategy=context", "nodes=2"), 16),
    "expert x tensor": (
        "rowwise", (*MIXTURE, "strategy=tensor", *FOUR, "strategy.tensor=2", "strategy.expert=2"), 8
    ),
}  # fmt: skip
MORE_SPLITS = {
    "tensor": ("tensorwise", ("strategy=tensor", "nodes=2"), 16),
    "data": ("tensorwise", ("strategy=data", "nodes=2"), 8),
    "pipeline": ("tensorwise", ("strategy=pipeline", "nodes=2"), 4),
    "tensor, by rows": ("rowwise", ("strategy=tensor", "nodes=2"), 16),
    "tensor, whole sequences": (
        "tensorwise", ("strategy=tensor", "nodes=2", "strategy.sequence_parallel=false"), 16
    ),
    "context": ("tensorwise", ("strategy=context", "nodes=2"), 16),
    "tensor x context": (
        "tensorwise", ("strategy=tensor", *FOUR, "strategy.tensor=2", "strategy.context=2"), 16
    ),
    "pipeline x tensor": (
        "tensorwise", ("strategy=pipeline", *FOUR, "strategy.pipeline=2", "strategy.tensor=2"), 4
    ),
    "shard x tensor, by rows, recomputing all": (
        "rowwise",
        ("strategy=fsdp", *FOUR, "strategy.tensor=2", "training.activation_checkpointing=full"), 8,
    ),
    "shard x context": ("tensorwise", ("strategy=fsdp", *FOUR, "strategy.context=2"), 8),
    "experts of each replica": ("rowwise", (*MIXTURE, "strategy=data", "nodes=2"), 4),
    "shard x expert, recomputing all": (
        "rowwise",
        (*MIXTURE, "strategy=fsdp", *FOUR, "strategy.expert=2", "training.activation_checkpointing=full"), 4,
    ),
    "expert x tensor, keeping products, rounded weights": (
        "rowwise",
        (*MIXTURE, "strategy=tensor", *FOUR, "strategy.tensor=2", "strategy.expert=2", SELECTIVE, ROUNDED), 8,
    ),
    "shard, rounded weights": ("tensorwise", ("strategy=fsdp", "nodes=2", ROUNDED), 8),
    "pipeline x context, keeping products, rounded weights": (
        "tensorwise",
        ("strategy=pipeline", *FOUR, "strategy.pipeline=2", "strategy.context=2", SELECTIVE, ROUNDED), 4,
    ),
    "pipeline x expert": (
        "rowwise", (*MIXTURE, "strategy=pipeline", *FOUR, "strategy.pipeline=2", "strategy.expert=2"), 4
    ),
    "expert x context": (
        "rowwise", (*MIXTURE, "strategy=context", *FOUR, "strategy.context=2", "strategy.expert=2"), 8
    ),
    "pipeline x expert, compiled, keeping products": (
        "rowwise",
        (*MIXTURE, "strategy=pipeline", *FOUR, "strategy.pipeline=2", "strategy.expert=2", SELECTIVE,
         "training.compile=true"), 4,
    ),
    "pipeline x tensor, split backward passes": (
        "tensorwise",
        ("strategy=pipeline", *FOUR, "strategy.pipeline=2", "strategy.tensor=2",
         "strategy.schedule=interleaved_zero_bubble", "model.layers=4"), 4,
    ),
    "a mixture, pipeline x expert, some split backward passes, recomputing": (
        "rowwise",
        (*MIXTURE, "strategy=pipeline", *FOUR, "strategy.pipeline=2", "strategy.expert=2",
         "strategy.schedule=dualpipev", "model.layers=4", "training.activation_checkpointing=full"), 2,
    ),
    "a mixture, tensor, whole sequences": (
        "rowwise", (*MIXTURE, "strategy=tensor", "nodes=2", "strategy.sequence_parallel=false"), 16
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", [*SPLITS, *in_full((name,) for name in MORE_SPLITS)])
def test_a_layout_rounds_as_one_device(trained: Train, layout: str) -> None:
    """In float64 nothing but another scale differs: it moves the numbers that have few bits left."""
    recipe, words, samples = (SPLITS | MORE_SPLITS)[layout]
    words_of_both = *COMMON, *EXACT, f"training.fp8={recipe}", f"training.microbatch_size={samples}"
    model = [word for word in words if word.startswith(("model", "training.weights"))]
    assert_follows(
        trained(*words_of_both, *words), trained(*words_of_both, *model, "strategy=single"),
        losses=1e-10, weights=1e-10,
    )  # fmt: skip


def test_one_message_a_step_has_the_scales_of_all_weights(trained: Train) -> None:
    """Per block and microbatch: an input of two layers forward, a gradient of five layers backward."""
    words = (*COMMON, *EXACT, "strategy=tensor", "nodes=2", "training.microbatch_size=8")
    without, float8 = (
        trained(*words, f"training.fp8={recipe}").collectives["all_reduce", (0, 1)]
        for recipe in ("off", "tensorwise")
    )
    blocks, microbatches = 2, 2
    assert float8 - without == blocks * microbatches * (2 + 5) + 1


def steps_of_weight_scales() -> list[bool]:
    """Whether layers know the largest value of their split weight in each step, and forget it afterwards."""
    rank, outcomes = dist.get_rank(), []
    axis = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    layer = torch.nn.Linear(16, 16)
    setattr(layer, LARGEST, None)

    class Inner:
        copies = ()

        def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
            outcomes.append(float(getattr(layer, LARGEST)) == float(targets))
            return inputs

        evaluate = train

    schedule = WeightScales(Inner(), layers=[layer], axes=[None, axis])
    for run, step in ((schedule.train, 1.0), (schedule.train, 2.0), (schedule.evaluate, 3.0)):
        torch.nn.init.constant_(layer.weight, -step if rank else step / 2)
        run(torch.zeros(1), torch.tensor(step))
        outcomes.append(getattr(layer, LARGEST) is None)
    return outcomes


def test_scales_of_weights_are_those_of_each_step(workers: Workers) -> None:
    assert workers.run(2, steps_of_weight_scales) == [[True] * 6] * 2
