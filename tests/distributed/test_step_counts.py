"""The counts of a step (tests/benchmarks/step_counts.py) against what each layout must send."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest

from tests.benchmarks.step_counts import OTHERS, count_here

SAMPLES, SEQ, DIM, LAYERS, FFN, WORDS = 2, 32, 64, 4, 128, 512
TINY = (
    "model=tiny", f"model.layers={LAYERS}", f"model.dim={DIM}", "model.heads=8", "model.kv_heads=8",
    f"model.ffn_dim={FFN}", f"model.vocab_size={WORDS}", f"data.sequence_length={SEQ}",
    f"training.microbatch_size={SAMPLES}",
)  # fmt: skip
BLOCK = 4 * DIM * DIM + 3 * DIM * FFN + 2 * DIM
WEIGHTS = LAYERS * BLOCK + WORDS * DIM + DIM  # the head is tied
STATE = SAMPLES * SEQ * DIM * 2  # of a microbatch between two blocks, in bfloat16
MICROBATCHES = 2
BATCH = "training.global_batch_size={}".format
OWN_TEXT = [word for word in TINY if not word.startswith("training.microbatch_size")]
QUICK = (
    "hybrid 2x2", "parameter_server 4", "context 2 ring", "pipeline 2 zbv", "tile 2x2",
)  # fmt: skip


@pytest.fixture(scope="module")
def counts() -> dict[str, dict[str, Any]]:
    """The counts of each case; torch can't have one world after another, so each has a process."""
    cases = {
        "one device": BATCH(4), "data 8": BATCH(32), "fsdp 8": BATCH(32), "tensor 8": BATCH(4),
        "pipeline 4": BATCH(16), "plain loop": BATCH(4),
    }  # fmt: skip
    return {name: alone(name, [*TINY, batch]) for name, batch in cases.items()}


def alone(name: str, overrides: list[str]) -> dict[str, Any]:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(count_here, (name, overrides))


def test_no_strategy_waits_for_the_device(counts: dict[str, dict[str, Any]]) -> None:
    assert {name: count["waits_in"] for name, count in counts.items() if count["waits_in"]} == {}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in OTHERS]
)
def test_no_other_layout_waits(name: str) -> None:
    """`dataparallel` is not among them: its devices are in one process, which this machine lacks."""
    assert alone(name, [] if name in ("images 2", "tile 2x2") else OWN_TEXT)["waits_in"] == {}


@pytest.mark.full
@pytest.mark.parametrize("keeps", ["full", "selective"])
@pytest.mark.parametrize(
    "name", ["one device", "fsdp 8", "tensor 8", "hsdp 2x2", "context 2 ring", "pipeline 2 gpipe", "tile 2x2"]
)
def test_no_recomputation_waits(name: str, keeps: str) -> None:
    words = [] if name == "tile 2x2" else OWN_TEXT
    counted = alone(name, [*words, f"training.activation_checkpointing={keeps}"])
    assert counted["waits_in"] == {}


@pytest.mark.full
def test_experts_wait_for_counts_of_rows_only() -> None:
    """Each device must know how many rows it gets before it has memory for them."""
    assert set(alone("expert 8", [])["waits_in"]) <= {"tolist"}


def test_what_data_and_fsdp_send(counts: dict[str, dict[str, Any]]) -> None:
    """A ring moves 7/8 of the array in each direction. Gathers are bfloat16, sums of gradients float32."""
    assert counts["data 8"]["sent"] == {"all_reduce float32": 2 * 7 / 8 * 4 * WEIGHTS}
    of_slices = 7 / 8 * WEIGHTS * MICROBATCHES
    blocks_again = 7 / 8 * LAYERS * BLOCK * MICROBATCHES  # gathered anew for their backward pass
    sent = counts["fsdp 8"]["sent"]
    assert sent["all_gather bfloat16"] == 2 * (of_slices + blocks_again)
    assert sent["reduce_scatter float32"] == 4 * of_slices
    assert counts["fsdp 8"]["calls"]["reduce_scatter"] == MICROBATCHES * (LAYERS + 1)
    assert counts["fsdp 8"]["calls"]["all_gather"] == MICROBATCHES * (2 * LAYERS + 1)


def test_what_tensor_and_pipeline_send(counts: dict[str, dict[str, Any]]) -> None:
    """The stream between blocks is in bfloat16."""
    tensor = counts["tensor 8"]
    assert set(tensor["sent"]) == {"all_gather bfloat16", "reduce_scatter bfloat16", "all_reduce float32"}
    gathers, scatters = tensor["calls"]["all_gather"], tensor["calls"]["reduce_scatter"]
    assert gathers == scatters == MICROBATCHES * (4 * LAYERS + 2)  # each twice a block and pass; the ends
    assert tensor["sent"]["all_gather bfloat16"] == pytest.approx(7 / 8 * STATE * gathers)
    assert counts["pipeline 4"]["sent"]["send bfloat16"] == 8 * STATE


def test_autograd_keeps_and_casts_less_than_in_a_plain_loop(counts: dict[str, dict[str, Any]]) -> None:
    """A plain loop keeps all logits, and a float32 stream; it casts each weight in each forward pass."""
    ours, plain = counts["one device"], counts["plain loop"]
    assert ours["kept_bytes"] < plain["kept_bytes"]
    assert ours["cast_bytes"] < plain["cast_bytes"]
