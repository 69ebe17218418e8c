"""The first law with uneven devices: a batch or a pipeline split by speed equals one device."""

from __future__ import annotations

import pytest

from tests.marks import in_full
from tests.parity import COMMON, assert_follows, follow_one_device
from tests.workers import Train, Workers, train_here

SHALLOW = ("model.layers=2",)
FOUR = ("nodes=2", "gpus_per_node=2")
LAYOUTS = {
    "data over 2, accumulating 2": (
        "strategy=data", "nodes=2", "strategy.shares=[3,1]", "training.microbatch_size=4", *SHALLOW,
    ),
    "fsdp over 2": ("strategy=fsdp", "nodes=2", "strategy.shares=[1,3]", *SHALLOW),
    "pipeline of 2": ("strategy=pipeline", "nodes=2", "strategy.shares=[3,1]"),
    "data over 4": ("strategy=data", *FOUR, "strategy.shares=[4,1,2,1]", *SHALLOW),
    "data over 2, static graph": (
        "strategy=data", "nodes=2", "strategy.shares=[3,1]", "training.microbatch_size=4",
        "strategy.static_graph=true", *SHALLOW,
    ),
    "server with 2 workers": ("strategy=parameter_server", "nodes=3", "strategy.shares=[1,3]", *SHALLOW),
    "server that works, over 2": (
        "strategy=parameter_server", "nodes=2", "strategy.dedicated_server=false", "strategy.shares=[3,1]",
        *SHALLOW,
    ),
    "hsdp 2 x 2": ("strategy=hsdp", *FOUR, "strategy.shares=[4,1,2,1]", *SHALLOW),
    "replicate 2 x tensor 2": (
        "strategy=tensor", *FOUR, "strategy.tensor=2", "strategy.replicate=2", "strategy.shares=[3,1]",
        *SHALLOW,
    ),
    "replicate 2 x context 2": (
        "strategy=context", *FOUR, "strategy.context=2", "strategy.replicate=2", "strategy.shares=[3,1]",
        *SHALLOW,
    ),
    "interleaved of 2": (
        "strategy=pipeline", "nodes=2", "strategy.schedule=interleaved", "strategy.shares=[3,1]",
        "model.layers=8",
    ),
    "model of 2": ("strategy=model", "nodes=2", "strategy.shares=[1,3]"),
}  # fmt: skip
FAST = ("data over 2, accumulating 2", "fsdp over 2", "pipeline of 2")
SEGMENTER = (
    "model=segmenter", "data=cells", "data.samples=64", "model.channels=[8,12,16]", "data.height=32",
    "data.width=48", "training.precision=float64", "training.steps=5", "training.log_every=1",
    "training.validate_every=5", "training.validation_samples=32", "training.global_batch_size=16",
    "optimizer.warmup_steps=3",
)  # fmt: skip


@pytest.mark.parametrize("layout", [*FAST, *in_full([(layout,) for layout in LAYOUTS if layout not in FAST])])
def test_shares_follow_one_device(trained: Train, layout: str) -> None:
    follow_one_device(trained, LAYOUTS[layout])


@pytest.mark.parametrize(
    "layout",
    [
        ("strategy=data", "nodes=2"),
        *in_full([(("strategy=tile", "nodes=4", "strategy.tile=2", "strategy.replicate=2"),)]),
    ],
)
def test_batch_norm_counts_the_samples_of_every_replica(workers: Workers, layout: tuple[str, ...]) -> None:
    """Eight samples are split into 6 and 2; one device normalises all eight together."""
    reference = workers.train("strategy=single", *SEGMENTER, "training.microbatch_size=8")
    words = ("training.microbatch_size=4", "strategy.shares=[3,1]")
    split = workers.train(*SEGMENTER, *layout, *words)
    assert_follows(split, reference, losses=1e-10, weights=1e-10)


def test_measured_shares_follow_one_device_and_are_recorded(trained: Train) -> None:
    layout = ("strategy=data", "nodes=2", "strategy.shares=measured", *SHALLOW)
    shares = follow_one_device(trained, layout).summary["shares"]
    assert len(shares) == 2
    assert max(shares) == 1.0
    assert min(shares) > 0.1  # two processes of one machine


def test_each_rank_of_a_pipeline_gets_blocks_by_its_speed(workers: Workers) -> None:
    run = workers.prepare(*COMMON, "strategy=pipeline", "nodes=2", "strategy.shares=[3,1]")
    names = workers.run(2, _weights_of, str(run.folder.path))
    blocks = [{name.split(".")[1] for name in own if name.startswith("blocks.")} for own in names]
    assert blocks == [{"0", "1", "2"}, {"3"}]


def _weights_of(run_folder: str) -> list[str]:
    return list(train_here(run_folder, {}))
