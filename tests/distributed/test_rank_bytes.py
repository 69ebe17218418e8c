"""`rank_memory_bytes` and `rank_state_bytes` of summary.json: what each rank holds, against closed forms.

The plan of `planning/memory.py` must say the same of each of these runs.
"""

from __future__ import annotations

import json
import shutil

import pytest

from hpc_parallel.config.resolve import resolve
from hpc_parallel.planning.memory import plan
from tests.composed import composed
from tests.marks import in_full
from tests.matrix import TEXTS, cases
from tests.parity import COMMON
from tests.workers import Train, Workers, train_here

FLOAT = 8
EMBEDDING, NORM = 256 * 64, 64


def block(ffn_dim: int = 160) -> int:
    return 3 * 64 * 64 + 3 * 64 * ffn_dim + 2 * 64  # kv_heads are half of heads


def whole(layers: int, *, ffn_dim: int = 160) -> int:
    return EMBEDDING + layers * block(ffn_dim) + NORM  # the head is tied


def tensors(layers: int) -> int:
    """Each has a step count of AdamW, in float32."""
    return 2 + layers * 9


def held(weights: int, *, tensors: int) -> dict[str, int]:
    """A rank with these weights, its gradients and AdamW's two moments of each."""
    return {
        "parameters": FLOAT * weights,
        "gradients": FLOAT * weights,
        "optimizer": 2 * FLOAT * weights + 4 * tensors,
    }


def test_a_replica_holds_all(trained: Train) -> None:
    found = trained(*TEXTS["data over 2"]).summary
    all_of_it = held(whole(4), tensors=tensors(4))
    assert found["rank_state_bytes"] == [all_of_it] * 2
    assert len(found["rank_memory_bytes"]) == 2
    assert max(found["rank_memory_bytes"]) == found["peak_memory_bytes"]
    assert min(found["rank_memory_bytes"]) > sum(all_of_it.values())


def test_a_shard_holds_its_part(trained: Train) -> None:
    """Rows are dealt out, so an uneven weight has more on the first ranks."""
    states = trained(*TEXTS["fsdp over 3, slices of unequal size"]).summary["rank_state_bytes"]
    for key, all_of_it in held(whole(2, ffn_dim=161), tensors=3 * tensors(2)).items():  # on each rank a count
        assert sum(state[key] for state in states) == all_of_it
        assert states[0][key] == pytest.approx(all_of_it / 3, rel=0.02)


def test_a_worker_holds_no_optimizer_state(trained: Train) -> None:
    words = TEXTS["server with 2 workers, small buckets"]
    server, *others = trained(*words).summary["rank_state_bytes"]
    assert server == held(whole(2), tensors=tensors(2))
    assert others == [{**server, "optimizer": 0}] * 2


def test_a_stage_holds_its_blocks(trained: Train) -> None:
    """The last stage has a copy of the tied weight."""
    first, last = trained(*TEXTS["pipeline of 2 ranks, 1f1b"]).summary["rank_state_bytes"]
    assert first == held(EMBEDDING + 2 * block(), tensors=1 + 18)
    assert last == held(2 * block() + NORM + EMBEDDING, tensors=2 + 18)


OTHERS = {
    name: (*COMMON, *words.split())
    for name, words in {
        "untied, tensor": "strategy=tensor nodes=2 model.tied_head=false",
        "adafactor": "strategy=fsdp nodes=2 optimizer=adafactor",
        "muon": "strategy=tensor nodes=2 optimizer=muon",
    }.items()
}


@pytest.mark.parametrize("layout", [*cases(TEXTS), *in_full((name,) for name in OTHERS)])
def test_a_plan_knows_what_each_rank_holds(trained: Train, layout: str) -> None:
    """The gradient of an embedding that is split by rows is whole on each device."""
    words = (TEXTS | OTHERS)[layout]
    planned = plan(resolve(composed(*words))[0])
    assert planned is not None
    summary = trained(*words).summary
    states = [vars(held.state) for held in planned.devices]  # of dataparallel the process has the first
    assert summary["rank_state_bytes"] == states[: summary["world_size"]]
    assert all(state["parameters"] > 0 for state in states)


def test_a_start_without_a_step_counts_nothing(workers: Workers) -> None:
    """A run that had done all of its steps is completed by a second start."""
    words = (*COMMON, "strategy=single", "training.checkpoint_every=1")
    first, second = workers.train(*words), workers.prepare(*words)
    shutil.copytree(first.folder / "checkpoints", second.folder.checkpoints, dirs_exist_ok=True)
    workers.run(1, train_here, str(second.folder.path), {})
    found = json.loads(second.folder.summary.read_text())
    assert (found["rank_state_bytes"], found["rank_memory_bytes"]) == (None, None)
