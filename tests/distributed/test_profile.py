"""`profile=torch`: the trace has the ranges of a training, and a recorded training is the same training."""

from __future__ import annotations

import gzip
import json
from collections import Counter

import pytest

from tests.workers import Workers

WORDS = (
    "strategy=hybrid", "nodes=2", "gpus_per_node=2", "model.layers=2", "model.dim=32", "model.heads=2",
    "data.sequence_length=16", "training.steps=7", "training.measure_steps=1", "training.log_every=1",
    "training.global_batch_size=16", "strategy.microbatches=2",
)  # fmt: skip


def test_a_trace_of_the_chosen_ranks(workers: Workers) -> None:
    plain = workers.train(*WORDS)
    recorded = workers.train(
        *WORDS, "profile.kind=torch", "profile.ranks=[1,2]", "profile.first_step=5", "profile.steps=2"
    )
    assert recorded.losses == plain.losses
    folder = recorded.folder / "profile"
    assert sorted(path.name for path in folder.iterdir()) == [
        "rank-1.json.gz", "rank-1.txt", "rank-2.json.gz", "rank-2.txt",
    ]  # fmt: skip
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    for rank, stage in ((1, 0), (2, 1)):
        trace = json.loads(gzip.decompress((folder / f"rank-{rank}.json.gz").read_bytes()))
        names = Counter(
            event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"
        )
        assert {names[name] for name in ("step 5", "step 6")} == {1}
        assert names["data"] == names["optimizer"] == 2
        assert "step 4" not in names
        assert "step 7" not in names
        forwards = {f"pipeline stage {stage} forward {microbatch}" for microbatch in (0, 1)}
        assert {names[name] for name in forwards} == {2}  # of two steps
        text = (folder / f"rank-{rank}.txt").read_text().splitlines()
        assert text[0] == f"rank {rank}, steps 5 to 6 since the start"
        shares = [float(line.split("ms")[1].split("%")[0]) for line in text[1:6]]
        assert sum(shares) == pytest.approx(100, abs=0.3)
