"""The first law: the result does not depend on the layout. One device is the reference."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from tests.marks import in_full
from tests.parity import (
    COMMON,
    EXACTNESS,
    LONG,
    TIED,
    follow_one_device,
    largest_difference,
    weight_difference,
)
from tests.workers import Train

PIPELINES = list(product((2, 4), ("gpipe", "1f1b", "interleaved")))
SERVER = ("strategy=parameter_server", "model.layers=2")
NO_SERVER = (*SERVER, "strategy.dedicated_server=false")
SHALLOW = ("model.layers=2",)  # what splits single layers is the same for any number of them
LAYOUTS = {
    "data over 2": ("strategy=data", "nodes=2"),
    "data over 4": ("strategy=data", "nodes=2", "gpus_per_node=2"),
    "data over 2, accumulating 4": ("strategy=data", "nodes=2", "training.microbatch_size=2"),
    "data over 2, small buckets": ("strategy=data", "nodes=2", "strategy.bucket_mb=0.05"),
    "data over 2, accumulating 4, static graph": (
        "strategy=data", "nodes=2", "training.microbatch_size=2", "strategy.static_graph=true",
    ),
    "single, accumulating 4": ("strategy=single", "training.microbatch_size=4"),
    **{
        f"pipeline of {ranks} ranks, {schedule}": (
            "strategy=pipeline", f"nodes={ranks}", f"strategy.schedule={schedule}",
            f"strategy.microbatches={2 * ranks}",
            *(("model.layers=8",) if (ranks, schedule) == (4, "interleaved") else ()),
        )
        for ranks, schedule in PIPELINES
    },
    "pipeline 2 x replicate 2": (
        "strategy=pipeline", "nodes=2", "gpus_per_node=2", "strategy.pipeline=2", "strategy.replicate=-1",
    ),
    "interleaved 2 x replicate 2": (
        "strategy=pipeline", "nodes=2", "gpus_per_node=2", "strategy.pipeline=2", "strategy.replicate=-1",
        "strategy.schedule=interleaved",
    ),
    "tensor over 2": ("strategy=tensor", "nodes=2", *SHALLOW),
    "tensor over 4, accumulating 4": (
        "strategy=tensor", "nodes=4", *SHALLOW, "model.kv_heads=4", "training.microbatch_size=4",
    ),
    "tensor over 2, whole sequence": (
        "strategy=tensor", "nodes=2", *SHALLOW, "strategy.sequence_parallel=false",
    ),
    "tensor over 2, whole logits": ("strategy=tensor", "nodes=2", *SHALLOW, "strategy.loss_parallel=false"),
    "replicate 2 x tensor 2, accumulating 4": (
        "strategy=tensor", "nodes=2", "gpus_per_node=2", "strategy.tensor=2", "strategy.replicate=2",
        "training.microbatch_size=2", *SHALLOW,
    ),
    "shard 2 x tensor 2": (
        "strategy=tensor", "nodes=2", "gpus_per_node=2", "strategy.tensor=2", "strategy.shard=2", *SHALLOW,
    ),
    "pipeline 2 x tensor 2": (
        "strategy=hybrid", "nodes=2", "gpus_per_node=2", "strategy.microbatches=4", *SHALLOW,
    ),
    "pipeline 2 x shard 2": (
        "strategy=pipeline", "nodes=2", "gpus_per_node=2", "strategy.pipeline=2", "strategy.shard=2",
        *SHALLOW,
    ),
    "pipeline 2 x shard 2 x tensor 2": (
        "strategy=hybrid", "nodes=2", "gpus_per_node=4", "strategy.tensor=2", "strategy.replicate=1",
        "strategy.shard=2", *SHALLOW,
    ),
    "pipeline 2 x replicate 2 x tensor 2": (
        "strategy=hybrid", "nodes=2", "gpus_per_node=4", "strategy.tensor=2", *SHALLOW,
    ),
    "replicate 2 x shard 2 x tensor 2": (
        "strategy=hsdp", "nodes=2", "gpus_per_node=4", "strategy.tensor=2", *SHALLOW,
    ),
    "interleaved 2 x shard 2": (
        "strategy=pipeline", "nodes=2", "gpus_per_node=2", "strategy.pipeline=2", "strategy.shard=2",
        "strategy.schedule=interleaved", "model.layers=4",
    ),
    "fsdp over 2": ("strategy=fsdp", "nodes=2", *SHALLOW),
    "fsdp over 4, accumulating 4": ("strategy=fsdp", "nodes=4", "training.microbatch_size=1", *SHALLOW),
    "fsdp over 3, slices of unequal size": (
        "strategy=fsdp", "nodes=3", "training.global_batch_size=18", "model.ffn_dim=161", *SHALLOW,
    ),
    "fsdp over 2, gathered to the end": ("strategy=fsdp", "nodes=2", "strategy.reshard=false", *SHALLOW),
    "fsdp over 2, two blocks ahead": (
        "strategy=fsdp", "nodes=2", "strategy.prefetch=2", "model.layers=4",
    ),
    "hsdp 2 x 2": ("strategy=hsdp", "nodes=2", "gpus_per_node=2", *SHALLOW),
    "hsdp 2 x 2, accumulating 4": (
        "strategy=hsdp", "nodes=2", "gpus_per_node=2", "training.microbatch_size=1", *SHALLOW,
    ),
    "dataparallel over 2": ("strategy=dataparallel", "gpus_per_node=2", *SHALLOW),
    "dataparallel over 4, accumulating 4": (
        "strategy=dataparallel", "gpus_per_node=4", "training.microbatch_size=1", *SHALLOW,
    ),
    "server with 1 worker": (*SERVER, "nodes=2"),
    "server with 2 workers, small buckets": (*SERVER, "nodes=3", "strategy.bucket_mb=0.05"),
    "server with 4 workers, accumulating 4": (*SERVER, "nodes=5", "training.microbatch_size=1"),
    "server that works, over 2": (*NO_SERVER, "nodes=2"),
    "server that works, over 4, accumulating 4": (
        *NO_SERVER, "nodes=2", "gpus_per_node=2", "training.microbatch_size=1",
    ),
}  # fmt: skip


# Rounding can hide nothing in float64, so every layout is proven there.
# Variants of techniques and of pairs that `make test` proves once.
SLOW = [
    "data over 4", "data over 2, accumulating 4", "hsdp 2 x 2, accumulating 4", "interleaved 2 x replicate 2",
    "interleaved 2 x shard 2", *(f"pipeline of 4 ranks, {schedule}" for _, schedule in PIPELINES[3:]),
    "pipeline 2 x shard 2 x tensor 2", "pipeline 2 x replicate 2 x tensor 2",
    "replicate 2 x shard 2 x tensor 2", "tensor over 4, accumulating 4", "tensor over 2, whole sequence",
    "fsdp over 2, gathered to the end", "data over 2, small buckets", "fsdp over 2, two blocks ahead",
    "data over 2, accumulating 4, static graph", "pipeline of 2 ranks, gpipe",
    "tensor over 2, whole logits", "fsdp over 4, accumulating 4", "shard 2 x tensor 2",
    "single, accumulating 4", "replicate 2 x tensor 2, accumulating 4",
    "dataparallel over 4, accumulating 4", "server with 1 worker", "server with 4 workers, accumulating 4",
    "server that works, over 4, accumulating 4",
]  # fmt: skip
SERVED = ["dataparallel over 2", "server with 2 workers, small buckets", "server that works, over 2"]
IN_FLOAT32 = [
    "data over 2", "data over 2, accumulating 4", "single, accumulating 4", "pipeline 2 x replicate 2",
    *(f"pipeline of 2 ranks, {schedule}" for schedule in ("gpipe", "1f1b", "interleaved")),
    "tensor over 2", "fsdp over 2", "hsdp 2 x 2", "shard 2 x tensor 2", *SERVED,
]  # fmt: skip
UNTIED = ["data over 2", "pipeline of 2 ranks, 1f1b", "tensor over 2", "fsdp over 2"]
CASES = [
    *((layout, "float64") for layout in LAYOUTS if layout not in SLOW),
    *in_full((layout, "float64") for layout in SLOW),
    *in_full((layout, "float32") for layout in IN_FLOAT32),
    *in_full((layout, exactness) for layout in UNTIED for exactness in ("float64, untied head", LONG)),
    *in_full((layout, LONG) for layout in SERVED),
]


@pytest.mark.parametrize(("layout", "exactness"), CASES)
def test_layout_follows_one_device(trained: Train, layout: str, exactness: str) -> None:
    words = LAYOUTS[layout]
    found = follow_one_device(trained, words, exactness=exactness)
    degrees = [int(word.partition("=")[2]) for word in words if word.startswith(("nodes=", "gpus_per_node="))]
    processes = 1 if "strategy=dataparallel" in words else math.prod(degrees)
    assert found.summary["world_size"] == processes


def test_clipping_is_active(trained: Train) -> None:
    """The comparisons above prove clipping only if the norm is above its bound."""
    lines = trained(*COMMON, *TIED, "strategy=single").lines
    assert max(line["grad_norm"] for line in lines) > 1.0


def test_the_comparison_can_fail(trained: Train) -> None:
    """Another seed is another model: the differences must show it."""
    one, other = (trained(*COMMON, *TIED, "strategy=single", *seed) for seed in ((), ("seed=1",)))
    assert largest_difference(other.losses, one.losses) > 1e-3
    assert weight_difference(other, one) > 1e-3


@pytest.mark.parametrize("strategy", ["pipeline", *in_full([("fsdp",), ("tensor",), ("context",)])])
def test_bfloat16_follows_float32_loosely(trained: Train, strategy: str) -> None:
    """Products are rounded to 8 bits: the curve stays near, and not equal."""
    coarse = trained(*COMMON, "training.precision=bfloat16", f"strategy={strategy}", "nodes=2")
    fine = trained(*COMMON, *EXACTNESS["float32"][0], "strategy=single")
    difference = largest_difference(coarse.losses, fine.losses)
    assert 1e-6 < difference < 2e-2
    assert {weight.dtype for weight in coarse.weights.values()} == {torch.float32}
