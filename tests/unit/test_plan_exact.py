"""`plan --exact`: what traced ranks hold and send beside the formulas, and what it refuses."""

from __future__ import annotations

import re

import pytest

from hpc_parallel.__main__ import main as command
from tests.parity import in_full

COMMON = (
    "model=tiny", "model.layers=4", "data.sequence_length=64", "training.global_batch_size=32",
    "training.microbatch_size=2", "hardware=a100_80gb_node8_800gbit",
)  # fmt: skip
TWO, FOUR, EIGHT = "nodes=2", "nodes=2 gpus_per_node=2", "nodes=2 gpus_per_node=4"
FULL = "training.activation_checkpointing=full"
ALL_TO_ALL, GATHER = (f"strategy.context_attention={kind}" for kind in ("all_to_all", "gather"))
CASES = [
    f"strategy=hybrid {EIGHT} strategy.tensor=2",
    f"strategy=fsdp {FOUR} strategy.context=2 {FULL}",
    f"strategy=pipeline {FOUR} strategy.pipeline=2 strategy.replicate=2 strategy.schedule=interleaved",
]
MORE = [
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
    f"strategy=pipeline {FOUR} strategy.pipeline=2 strategy.shard=2",
    f"strategy=pipeline {FOUR} strategy.pipeline=2 strategy.context=2 {ALL_TO_ALL}",
]
WITHIN_PERCENT = {"sent": 1.0, "activations": 5.0}  # norms and sums of the loss are not in the formulas
LINE = re.compile(r"^  (\S.*?)\s+([\d,]+)\s+([\d,]+|-)(?:\s+([+-][\d.]+) %)?$")


def figures(text: str) -> list[tuple[str, int, float]]:
    """Label, traced bytes and difference of each row with a plan."""
    rows = [match.groups() for match in map(LINE.match, text.splitlines()) if match is not None]
    return [(label, int(traced.replace(",", "")), float(off)) for label, traced, _, off in rows if off]


@pytest.mark.processes
@pytest.mark.parametrize("words", [*CASES, *in_full((words,) for words in MORE)])
def test_formulas_are_what_ranks_hold_and_send(words: str, capfd: pytest.CaptureFixture[str]) -> None:
    """State exactly, the bytes of collectives within 1 %, activations within 5 %.

    `test_plan_activations.py` is stricter: here microbatches are views of one batch, which counts as a whole.
    """
    assert command(["plan", "--exact", *COMMON, *words.split()]) == 0
    text = capfd.readouterr().out
    rows = figures(text)
    assert {"parameters", "gradients", "optimizer"} <= {label for label, _, _ in rows}
    assert any(label.startswith("activations") for label, _, _ in rows)
    sent = [label for label, _, _ in rows if label.startswith("sent over")]
    assert len(sent) == sum(line.startswith("  sent over") for line in text.splitlines()) > 0
    for label, traced, difference in rows:
        assert traced > 0
        assert abs(difference) <= WITHIN_PERCENT.get(label.split()[0], 0), label
    assert "rank 0" in text


@pytest.mark.processes
def test_a_ring_sends_what_it_must(capfd: pytest.CaptureFixture[str]) -> None:
    """By hand: 3 hops of keys and values, twice, in bfloat16, and 4 of their gradients in float32."""
    words = ["strategy=context", "nodes=2", "gpus_per_node=2"]
    assert command(["plan", "--exact", *COMMON, *words]) == 0
    text = capfd.readouterr().out
    (sent,) = re.findall(r"send, 4 ranks, (\d+) calls\s+([\d,]+)", text)
    numbers = 2 * (2 * 64 // 4) * 64  # keys and values of 2 samples of 16 positions, 2 heads of 32
    of_block = numbers * (3 * 2 + 3 * 2 + 4 * 4)
    blocks_and_microbatches = 4 * 16
    assert int(sent[1].replace(",", "")) == of_block * blocks_and_microbatches
    assert int(sent[0]) == 10 * blocks_and_microbatches


def test_what_cannot_be_traced_is_refused_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["plan", "--exact", *COMMON, "training.compile=true", "task=infer", "weights=x"]) == 2
    assert command(["plan", "--exact", *COMMON, "training.compile=true", "training.fp8=rowwise"]) == 2
    errors = capsys.readouterr().err
    assert "training.compile = true is not traced" in errors


def test_options_that_do_not_go_with_it_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["plan", "--exact", "--explain", "--rows", "0", *COMMON, "strategy=fsdp"]) == 2
    errors = capsys.readouterr().err
    assert "--explain does not go with --exact" in errors
    assert "--rows 0: at least one role is traced" in errors
    assert command(["plan", "--exact", "--best", *COMMON]) == 2
    assert "--exact does not go with --best" in capsys.readouterr().err


@pytest.mark.processes
def test_only_the_first_roles_are_traced(capfd: pytest.CaptureFixture[str]) -> None:
    assert command(["plan", "--exact", "--rows", "1", *COMMON, "strategy=pipeline", "nodes=2"]) == 0
    text = capfd.readouterr().out
    assert text.count("\nrank ") == 1
    assert "1 more roles are not traced: their ranks hold other bytes." in text
