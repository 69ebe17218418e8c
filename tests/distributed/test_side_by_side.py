"""`make bench` in small: ours and the bare loop in the same two processes, and a peer of another curve."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.benchmarks.peers import entries
from tests.marks import in_full
from tests.workers import Workers

SMALL = ("model.layers=2", "model.dim=32", "model.ffn_dim=64", "data.sequence_length=16")
STEPS = 40


def measured(workers: Workers, name: str) -> dict[str, object]:
    return entries.measure(
        workers, name, model="tiny", peers="nowhere", limit_s=60, most_steps=STEPS, extra=SMALL
    )


@pytest.mark.parametrize("name", ["bare", *in_full([("one_process",)])])
def test_both_sides_train_in_turns(workers: Workers, name: str) -> None:
    row = measured(workers, name)
    assert row["pairs"] == 1  # the blocks between the warm-up and the last batch
    assert row["low"] == row["ratio"] == row["high"] == row["total_ratio"]
    assert min(row["ours_step_s"], row["theirs_step_s"]) > 0
    assert row.get("largest_loss_difference", 0.0) < 1e-5


def test_another_loss_curve_fails(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process alone sees half of the batch."""
    other = replace(entries.ENTRIES["one_process"], coincides=True)
    monkeypatch.setattr(entries, "ENTRIES", {"one_process": other})
    with pytest.raises(AssertionError, match="the loss curves differ"):
        measured(workers, "one_process")
