"""The first law for images: convnets on any layout, running statistics included, equal one device."""

from __future__ import annotations

import math
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from hpc_parallel.strategies import batch_norm, channels_last
from tests.marks import in_full
from tests.parity import STEPS, TRAINING, largest_difference, tensor_difference, weight_difference
from tests.workers import Train, Trained, Workers, agreed, train_here

COMMON = (*TRAINING, "training.loss_scale=1024")  # of float16: where a step overflows depends on the layout

NETS = {
    # 40 x 56 pixels halve to 5 x 7 places, which no grid divides
    "convnet": ("model=convnet", "data=digits", "model.channels=[8,16,16,24]",
                "data.height=40", "data.width=56"),
    "segmenter": ("model=segmenter", "data=cells", "data.samples=64", "model.channels=[8,12,16]",
                  "data.height=32", "data.width=48"),
    "unet": ("model=unet", "data=cells", "data.samples=64", "model.channels=[4,6,8]",
             "data.height=16", "data.width=24"),
}  # fmt: skip
# name: (layout, microbatches of one device)
LAYOUTS = {
    "data over 2": (("strategy=data", "nodes=2"), 1),
    "data over 4, accumulating 2": (("strategy=data", "nodes=4", "training.microbatch_size=2"), 2),
    "data over 2, accumulating 4": (("strategy=data", "nodes=2", "training.microbatch_size=2"), 4),
    "dataparallel over 2, accumulating 4": (
        ("strategy=dataparallel", "gpus_per_node=2", "training.microbatch_size=2"), 4,
    ),
    "dataparallel over 4": (("strategy=dataparallel", "gpus_per_node=4"), 1),
    "server with 2 workers, accumulating 4": (
        ("strategy=parameter_server", "nodes=3", "training.microbatch_size=2"), 4,
    ),
    "server that works, over 2": (
        ("strategy=parameter_server", "nodes=2", "strategy.dedicated_server=false"), 1,
    ),
    "pipeline of 2": (("strategy=pipeline", "nodes=2", "strategy.microbatches=4"), 4),
    "pipeline of 2, gpipe, one microbatch": (
        ("strategy=pipeline", "nodes=2", "strategy.schedule=gpipe", "strategy.microbatches=1"), 1,
    ),
    "pipeline 2 x replicate 2": (
        ("strategy=pipeline", "nodes=4", "strategy.pipeline=2", "strategy.replicate=2",
         "strategy.microbatches=4"), 4,
    ),
    "model of 2, accumulating 4": (("strategy=model", "nodes=2", "training.microbatch_size=4"), 4),
    "zero bubble 2 x replicate 2": (
        ("strategy=pipeline", "nodes=4", "strategy.pipeline=2", "strategy.replicate=2",
         "strategy.microbatches=4", "strategy.schedule=interleaved_zero_bubble",
         "strategy.stages_per_rank=1"), 4,
    ),
    "fsdp over 2, accumulating 4": (("strategy=fsdp", "nodes=2", "training.microbatch_size=2"), 4),
    # 4 devices have 3, 3, 3 and 1 of the 10 classes
    "fsdp over 4": (("strategy=fsdp", "nodes=4"), 1),
    "hsdp 2 x 2": (("strategy=hsdp", "nodes=2", "gpus_per_node=2"), 1),
    "tile 1 x 2": (("strategy=tile", "nodes=2"), 1),
    "tile 2 x 1, accumulating 4": (
        ("strategy=tile", "nodes=2", "strategy.tile_grid=[2,1]", "training.microbatch_size=4"), 4,
    ),
    "tile 2 x 2": (("strategy=tile", "nodes=2", "gpus_per_node=2"), 1),
    "tile 1 x 2 x replicate 2, accumulating 4": (
        ("strategy=tile", "nodes=4", "strategy.tile=2", "strategy.replicate=2", "training.microbatch_size=2"),
        4,
    ),
    "pipeline 2 x tile 1 x 2": (
        ("strategy=tile", "nodes=4", "strategy.pipeline=2", "strategy.microbatches=4"), 4,
    ),
    "zero bubble 2 x tile 1 x 2": (
        ("strategy=tile", "nodes=4", "strategy.pipeline=2", "strategy.microbatches=4",
         "strategy.schedule=interleaved_zero_bubble", "strategy.stages_per_rank=1"), 4,
    ),
}  # fmt: skip


CLASSIFIER = {
    "tensor over 2": (("strategy=tensor", "nodes=2"), 1),
    "tensor over 2, whole logits, accumulating 4": (
        ("strategy=tensor", "nodes=2", "strategy.loss_parallel=false", "training.microbatch_size=4"), 4,
    ),
    "tensor 2 x replicate 2": (
        ("strategy=tensor", "nodes=2", "gpus_per_node=2", "strategy.tensor=2", "strategy.replicate=2"), 1,
    ),
    "shard 2 x tensor 2": (
        ("strategy=tensor", "nodes=2", "gpus_per_node=2", "strategy.tensor=2", "strategy.shard=2"), 1,
    ),
    "pipeline 2 x tensor 2": (
        ("strategy=hybrid", "nodes=2", "gpus_per_node=2", "strategy.microbatches=4"), 4,
    ),
}  # fmt: skip
EXACTNESS = {  # bounds of losses, of weights
    "float64": (1e-10, 1e-9),
    "float32": (1e-5, 1e-4),
    "float16": (2**-9, 0.1),  # a bias begins with zero: it is nothing but the rounding of a few gradients
    "bfloat16": (2**-7, 0.3),
}
# As for text, rounding hides nothing in float64, so all is proven there.
SLOW = [
    "data over 4, accumulating 2", "pipeline 2 x replicate 2", "hsdp 2 x 2", "tensor 2 x replicate 2",
    "shard 2 x tensor 2", "pipeline 2 x tensor 2", "zero bubble 2 x replicate 2",
    "zero bubble 2 x tile 1 x 2", "data over 2, accumulating 4", "dataparallel over 4",
    "pipeline of 2, gpipe, one microbatch", "fsdp over 2, accumulating 4",
    "tensor over 2, whole logits, accumulating 4", "dataparallel over 2, accumulating 4",
    "server with 2 workers, accumulating 4", "tile 2 x 1, accumulating 4",
    "tile 1 x 2 x replicate 2, accumulating 4", "model of 2, accumulating 4",
]  # fmt: skip
IN_FLOAT32 = [
    "data over 2", "dataparallel over 4", "server that works, over 2", "pipeline of 2", "fsdp over 4",
    "tile 2 x 2", "tile 1 x 2 x replicate 2, accumulating 4", "tensor over 2",
]  # fmt: skip
FLOAT64 = [*product(NETS, LAYOUTS, ["float64"]), *product(["convnet"], CLASSIFIER, ["float64"])]


def is_slow(case: tuple[str, str, str]) -> bool:
    """Techniques split a segmenter as they do a convnet; only its tiles differ, and a U-Net's stages."""
    net, layout, _ = case
    if net == "unet":
        return layout != "pipeline of 2"
    return layout in SLOW or (net == "segmenter" and layout != "tile 2 x 2")


CASES = [
    *(case for case in FLOAT64 if not is_slow(case)),
    *in_full(case for case in FLOAT64 if is_slow(case)),
    *in_full(product(["convnet"], IN_FLOAT32, ["float32"])),
    *in_full([("segmenter", "tile 2 x 2", "float32")]),
    *in_full(product(["convnet"], IN_FLOAT32, ["bfloat16", "float16"])),
    *in_full([("segmenter", "tile 2 x 2", "bfloat16"), ("segmenter", "tile 2 x 2", "float16")]),
]
LAYOUTS |= CLASSIFIER
FULL, SELECTIVE = (f"training.activation_checkpointing={keeps}" for keeps in ("full", "selective"))
SWITCHES = [
    ("convnet", "pipeline of 2", SELECTIVE),
    ("segmenter", "tile 1 x 2", FULL),
    *in_full([("convnet", "data over 2, accumulating 4", FULL), ("convnet", "tensor over 2", FULL)]),
    *in_full([("unet", "pipeline of 2", FULL), ("unet", "data over 2", "training.compile=true")]),
]


@pytest.mark.parametrize(("net", "layout", "precision"), CASES)
def test_layout_follows_one_device(trained: Train, net: str, layout: str, precision: str) -> None:
    split, microbatches = LAYOUTS[layout]
    losses, weights = EXACTNESS[precision]
    options = (*NETS[net], f"training.precision={precision}")
    follow(trained, options, split, microbatches=microbatches, losses=losses, weights=weights)


@pytest.mark.parametrize(("net", "layout", "switch"), SWITCHES)
def test_recomputed_blocks_follow_one_device(trained: Train, net: str, layout: str, switch: str) -> None:
    """Statistics over ranks, halos and plain BatchNorm once more, in step on all ranks, running ones once."""
    split, microbatches = LAYOUTS[layout]
    options = (*NETS[net], "training.precision=float64")
    follow(trained, options, (*split, switch), microbatches=microbatches, losses=1e-10, weights=1e-9)


@pytest.mark.parametrize("schedule", ["zbv", *in_full([("looped_bfs",), ("dualpipev",)])])
def test_two_stages_a_rank_follow_one_device(trained: Train, schedule: str) -> None:
    """Four blocks, and a BatchNorm whose gradients come in two halves."""
    options = (*NETS["convnet"], "training.precision=float64")
    split = ("strategy=pipeline", "nodes=2", "strategy.microbatches=4", f"strategy.schedule={schedule}")
    follow(trained, options, split, microbatches=4, losses=1e-10, weights=1e-9)


IN_CHANNELS_LAST = [
    ("convnet", "data over 2"),
    ("segmenter", "tile 2 x 2"),
    *in_full([
        ("convnet", "fsdp over 4"), ("convnet", "tensor over 2"), ("convnet", "server that works, over 2"),
        ("convnet", "dataparallel over 4"), ("convnet", "pipeline 2 x tile 1 x 2"), ("unet", "pipeline of 2"),
        ("unet", "tile 1 x 2"),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("net", "layout"), IN_CHANNELS_LAST)
def test_convolutions_in_the_order_of_gpus_follow_one_device(
    workers: Workers, trained: Train, net: str, layout: str
) -> None:
    """GPUs compute in channels_last; one device here does not."""
    split, microbatches = LAYOUTS[layout]
    options = (*NETS[net], "training.precision=float64")
    reference = one_device(trained, options, microbatches=microbatches)
    run = workers.prepare(*COMMON, *options, *split)
    found = workers.run(run.processes, train_in_channels_last, str(run.folder.path))
    losses = [line["loss"] for line in workers.lines(run)]
    assert largest_difference(losses, reference.losses) < 1e-10
    assert tensor_difference(agreed(list(found)), reference.weights) < 1e-9


def train_in_channels_last(run_folder: str) -> dict[str, Tensor]:
    with patch.object(channels_last, "gains", lambda *_: True):
        return train_here(run_folder, {})


def one_device(trained: Train, options: tuple[str, ...], *, microbatches: int) -> Trained:
    return trained(*COMMON, *options, "strategy=single", f"training.microbatch_size={16 // microbatches}")


def follow(
    trained: Train, options: tuple[str, ...], split: tuple[str, ...], *, microbatches: int, losses: float,
    weights: float,
) -> None:  # fmt: skip
    """Train on the layout `split` and compare with one device of as many microbatches."""
    reference = one_device(trained, options, microbatches=microbatches)
    found = trained(*COMMON, *options, *split)
    assert len(reference.losses) == STEPS
    assert largest_difference(found.losses, reference.losses) < losses
    assert weight_difference(found, reference) < weights
    if (
        "training.precision=float64" in options
    ):  # in float32 one device's own is 4e-5 off its float64 gradient
        assert tensor_difference(found.gradients, reference.gradients) < weights
    validation = [
        [line["validation_loss"] for line in run.lines if "validation_loss" in line]
        for run in (found, reference)
    ]
    assert len(validation[1]) >= 2
    assert largest_difference(*validation) < losses


def normed(without: str) -> tuple[float, ...]:
    """How far a BatchNorm over two ranks is from torch's own: output, gradients of input, weight and bias."""
    rank, torch_norm, norm = dist.get_rank(), nn.BatchNorm2d(3).double(), nn.BatchNorm2d(3).double()
    for each in (torch_norm, norm):
        for name in ("weight", "bias"):
            value = None if name == without else nn.Parameter(torch.tensor([0.5, 2.0, -1.0]).double())
            each.register_parameter(name, value)  # BatchNorm2d(bias=False) of torch 2.13
    batch_norm.apply(norm, axis=init_device_mesh("cpu", (2,), mesh_dim_names=("data",)))  # type: ignore[arg-type]
    images, slopes = torch.randn(2, 4, 3, 2, 2, generator=torch.Generator().manual_seed(1)).double()
    whole, part = images.clone().requires_grad_(), images[2 * rank :][:2].clone().requires_grad_()
    expected, output = torch_norm(whole), norm(part)
    (expected * slopes).sum().backward()
    (output * slopes[2 * rank :][:2]).sum().backward()
    assert whole.grad is not None
    assert part.grad is not None
    pairs = [(output, expected[2 * rank :][:2]), (part.grad, whole.grad[2 * rank :][:2])]
    for parameter, reference in zip(norm.parameters(), torch_norm.parameters(), strict=True):
        dist.all_reduce(parameter.grad)
        assert reference.grad is not None
        pairs.append((parameter.grad, reference.grad))  # type: ignore[arg-type]
    return tuple(float((found - wanted).abs().max()) for found, wanted in pairs)


@pytest.mark.parametrize("without", ["bias", "weight", "nothing"])
def test_a_batch_norm_has_the_weight_and_the_bias_that_it_was_given(workers: Workers, without: str) -> None:
    """A BatchNorm with bias=False lost its weight too."""
    for differences in workers.run(2, normed, without):
        assert len(differences) == (4 if without == "nothing" else 3)
        assert max(differences) < 1e-14


@pytest.mark.full
def test_digits_are_learnt(workers: Workers) -> None:
    """From ln(10) or worse to a quarter of that, on digits of writers that were held out."""
    run = workers.train(
        "strategy=data", "nodes=2", "model=convnet", "data=digits", "training.steps=200",
        "training.global_batch_size=32", "training.validate_every=200", "model.channels=[16,32,64,128]",
    )  # fmt: skip
    validation = [line["validation_loss"] for line in run.lines if "validation_loss" in line]
    assert validation[0] > math.log(10)
    assert validation[-1] < math.log(10) / 4
    assert not any("tokens_per_s" in line for line in run.lines)


@pytest.mark.full
def test_cells_are_learnt_in_tiles(workers: Workers) -> None:
    """Cross-entropy a pixel; who knows only how much of an image is cell has 0.65."""
    run = workers.train(
        "strategy=tile", "nodes=2", "model=segmenter", "data=cells", "training.steps=150",
        "training.validate_every=150", "model.channels=[16,32]",
    )  # fmt: skip
    validation = [line["validation_loss"] for line in run.lines if "validation_loss" in line]
    assert validation[-1] < 0.2
