"""What formulas say that ranks hold and send, beside ranks that are assembled and traced (`tests/oracle`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hpc_parallel.config.resolve import resolve
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.layout.layout import layout_of
from hpc_parallel.planning.hardware import read_hardware
from hpc_parallel.planning.memory import plan
from hpc_parallel.planning.step_time import StepTerms
from hpc_parallel.planning.work import work_of_run
from tests.benchmarks.calibrate_plan import FOLDERS
from tests.composed import composed
from tests.marks import in_full
from tests.oracle.sent_bytes import sent_by_axes
from tests.oracle.traced_rank import measure
from tests.unit.test_plan_activations import PACKED

GPU = read_hardware("a100_80gb_node8_800gbit", folders=FOLDERS)
SMALL = (
    "model.layers=4", "data.sequence_length=64", "training.global_batch_size=32", "training.microbatch_size=2"
)  # fmt: skip
TWO, FOUR, EIGHT = "nodes=2", "nodes=2 gpus_per_node=2", "nodes=2 gpus_per_node=4"
FULL = "training.activation_checkpointing=full"
ALL_TO_ALL, GATHER = (f"strategy.context_attention={kind}" for kind in ("all_to_all", "gather"))
CASES = [
    f"strategy=hybrid {EIGHT} strategy.tensor=2",
    f"strategy=fsdp {FOUR} strategy.context=2 {FULL}",
]
MORE = [
    f"strategy=pipeline {FOUR} strategy.pipeline=2 strategy.replicate=2 strategy.schedule=interleaved",
    f"strategy=context {FOUR} {ALL_TO_ALL}",
    f"strategy=data {TWO}",
    f"strategy=data {TWO} strategy.gradient_compression=bfloat16 training.precision=float32",
    f"strategy=fsdp {FOUR}",
    f"strategy=fsdp {FOUR} strategy.reshard=false",
    f"strategy=hsdp {FOUR}",
    f"strategy=tensor {TWO} {FULL}",
    f"strategy=tensor {TWO} strategy.sequence_parallel=false {FULL}",
    f"strategy=context {FOUR} {FULL}",
    f"strategy=context {FOUR} {GATHER} training.precision=float32",
    f"strategy=fsdp {FOUR} strategy.context=2 {GATHER}",
    f"strategy=context {FOUR} {GATHER} {PACKED}",
    f"strategy=pipeline {FOUR} strategy.pipeline=2 strategy.shard=2",
    f"strategy=pipeline {FOUR} strategy.pipeline=2 strategy.context=2 {ALL_TO_ALL}",
]
WITHIN = {"sent": 0.01, "activations": 0.05}  # norms and sums of the loss are not in the formulas


def configured(*words: str) -> RunConfig:
    """A run on GPUs with torch's kernels for CPUs, which the trace runs."""
    return replace(resolve(composed(*SMALL, *words, "device=cuda"))[0], device="cpu")


def figures(*words: str) -> Iterator[tuple[str, int, float]]:
    """Label, traced bytes and planned bytes of each rank that differs from those before it."""
    config = configured(*words)
    memory, layout = plan(config), layout_of(config.strategy, devices=config.devices)
    step = StepTerms(work_of_run(config), replace(GPU, node=replace(GPU.node, devices=config.gpus_per_node)))
    step.result()
    places = [layout.coordinates(held.device)["pipeline"] for held in memory.devices]
    differ = {
        (place, held.state, held.stages): held
        for place, held in reversed([*zip(places, memory.devices, strict=True)])
    }
    measured = measure(config, [held.device for held in differ.values()])
    for (place, state, stages), traced in zip(differ, measured, strict=True):
        for kind, planned in vars(state).items():
            yield kind, getattr(traced, kind), planned
        for kept, of_stage in zip(traced.activations, stages, strict=True):
            yield "activations", kept, of_stage
        sent = Counter[str]()
        for collective in traced.collectives:
            sent[collective.over] += collective.sent_bytes
        formulas = sent_by_axes(step, config, pipeline_rank=place)
        for over in {*sent, *formulas}:
            yield f"sent over {over}", sent[over], formulas.get(over, 0)


@pytest.mark.processes
@pytest.mark.parametrize("words", [*CASES, *in_full((words,) for words in MORE)])
def test_formulas_are_what_ranks_hold_and_send(words: str) -> None:
    """State exactly, the bytes of collectives within 1 %, activations within 5 %.

    `test_plan_activations.py` is stricter: here microbatches are views of one batch, which counts as a whole.
    """
    rows = [*figures("model=tiny", *words.split())]
    assert {"parameters", "gradients", "optimizer", "activations"} < {label for label, _, _ in rows}
    assert any(label.startswith("sent over") for label, _, _ in rows)
    for label, traced, planned in rows:
        assert traced > 0
        assert planned == pytest.approx(traced, rel=WITHIN.get(label.split()[0], 0)), label


@pytest.mark.processes
def test_a_ring_sends_what_it_must() -> None:
    """By hand: 3 hops of keys and values, twice, in bfloat16, and 4 of their gradients in float32."""
    (rank,) = measure(configured("model=tiny", "strategy=context", "nodes=2", "gpus_per_node=2"), [0])
    (sent,) = [one for one in rank.collectives if one.kind == "send"]
    numbers = 2 * (2 * 64 // 4) * 64  # keys and values of 2 samples of 16 positions, 2 heads of 32
    of_block = numbers * (3 * 2 + 3 * 2 + 4 * 4)
    blocks_and_microbatches = 4 * 16
    assert (sent.over, sent.ranks) == ("context", 4)
    assert sent.sent_bytes == of_block * blocks_and_microbatches
    assert sent.calls == 10 * blocks_and_microbatches
