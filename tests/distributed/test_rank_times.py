"""A rank that is held back by its data is named with the cause."""

from __future__ import annotations

import json

import pytest

from hpc_parallel.profiling.rank_times import FIRST_STEP
from tests.workers import Workers

WORDS = (
    "strategy=data", "nodes=2", "training.steps=1400", "training.global_batch_size=4",
    "training.log_every=700",
    "training.validate_every=null", "training.validation_samples=4", "training.checkpoint_every=null",
    "model.layers=1", "model.dim=32", "model.heads=2", "data=dataset", "data.sequence_length=16",
    "data.vocab_size=256", "data.dataset._target_=tests.datasets.SlowOnOneRank", "+data.dataset.rank=1",
    "+data.dataset.pause_s=0.005",
)  # fmt: skip


@pytest.mark.full
def test_a_rank_with_slow_data(workers: Workers) -> None:
    run = workers.train(*WORDS)
    record = json.loads((run.folder / "rank_times.json").read_text())
    samples = record["samples"]
    assert samples[0]["step"] == FIRST_STEP
    assert len(samples) >= 3
    for sample in samples:
        first, second = sample["ranks"]
        assert second["data_s"] - first["data_s"] == pytest.approx(0.01, rel=0.5)  # two samples of the batch
    (slow,) = record["slow"]
    assert (slow["rank"], slow["cause"]) == (1, "data")
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["slow_ranks"] == [slow]
