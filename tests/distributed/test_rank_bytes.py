"""`rank_memory_bytes` and `rank_state_bytes` of summary.json: what each rank holds, against closed forms.

The plan of `planning/memory.py` must say the same of each of these runs.
"""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from hpc_parallel.config.resolve import resolve
from hpc_parallel.planning.memory import plan
from tests.composed import composed
from tests.parity import in_full
from tests.workers import Workers, train_here

# As in test_memory: 2 and 4 devices can't have equal slices of every weight.
MODEL = ("model.dim=132", "model.heads=2", "model.kv_heads=2", "model.ffn_dim=346", "data.max_bytes=300000")
SHORT = (*MODEL, "training.steps=2", "training.global_batch_size=4", "training.validate_every=null",
         "training.checkpoint_every=null", "training.measure_steps=0")  # fmt: skip
BLOCK, EMBEDDING, NORM = 4 * 132 * 132 + 3 * 132 * 346 + 2 * 132, 256 * 132, 132
WEIGHTS = EMBEDDING + 4 * BLOCK + NORM  # the head is tied
TENSORS = 2 + 4 * 9  # each has a step count of AdamW, in float32
FLOAT = 4


def summary(workers: Workers, *words: str) -> dict[str, Any]:
    folder = workers.train(*SHORT, *words).folder
    found = json.loads((folder / "summary.json").read_text())
    planned = plan(resolve(composed(*SHORT, *words))[0])
    assert planned is not None
    assert found["rank_state_bytes"] == [vars(held.state) for held in planned.devices]
    return found


def held(weights: int, *, tensors: int) -> dict[str, int]:
    """A rank with these weights, its gradients and AdamW's two moments of each."""
    return {
        "parameters": FLOAT * weights,
        "gradients": FLOAT * weights,
        "optimizer": 2 * FLOAT * weights + FLOAT * tensors,
    }


def test_a_replica_holds_all(workers: Workers) -> None:
    found = summary(workers, "strategy=data", "nodes=2")
    assert found["rank_state_bytes"] == [held(WEIGHTS, tensors=TENSORS)] * 2
    assert len(found["rank_memory_bytes"]) == 2
    assert max(found["rank_memory_bytes"]) == found["peak_memory_bytes"]
    assert min(found["rank_memory_bytes"]) > sum(held(WEIGHTS, tensors=TENSORS).values())


def test_a_shard_holds_its_part(workers: Workers) -> None:
    """Rows are dealt out, so an uneven weight has one row more on the first rank."""
    states = summary(workers, "strategy=fsdp", "nodes=2")["rank_state_bytes"]
    for key, whole in held(WEIGHTS, tensors=2 * TENSORS).items():  # a step count on each rank
        assert sum(state[key] for state in states) == whole
        assert states[0][key] == pytest.approx(whole / 2, rel=0.01)


@pytest.mark.parametrize("dedicated", [True, *in_full([(False,)])])
def test_a_worker_holds_no_optimizer_state(workers: Workers, dedicated: bool) -> None:
    words = ("strategy=parameter_server", "nodes=3", f"strategy.dedicated_server={dedicated}".lower())
    batch = "training.global_batch_size=6"
    server, *others = summary(workers, *words, batch)["rank_state_bytes"]
    assert server == held(WEIGHTS, tensors=TENSORS)
    assert others == [{**held(WEIGHTS, tensors=TENSORS), "optimizer": 0}] * 2


def test_a_stage_holds_its_blocks(workers: Workers) -> None:
    """The last stage has a copy of the tied weight."""
    first, last = summary(workers, "strategy=pipeline", "nodes=2")["rank_state_bytes"]
    assert first == held(EMBEDDING + 2 * BLOCK, tensors=1 + 18)
    assert last == held(2 * BLOCK + NORM + EMBEDDING, tensors=2 + 18)


@pytest.mark.parametrize(
    "words",
    [
        "strategy=tensor nodes=2 model.tied_head=false",
        *in_full([
            ("strategy=fsdp nodes=2 optimizer=adafactor",),
            ("strategy=tensor nodes=2 optimizer=muon",),
            ("strategy=pipeline nodes=2 strategy.schedule=zbv",),
        ]),
    ],
)  # fmt: skip
def test_a_plan_knows_what_other_layouts_hold(workers: Workers, words: str) -> None:
    """The gradient of an embedding that is split by rows is whole on each device (`summary` compares)."""
    first, second = summary(workers, *words.split())["rank_state_bytes"]
    assert first["parameters"] > 0 < second["parameters"]


def test_a_start_without_a_step_counts_nothing(workers: Workers) -> None:
    """A run that had done all of its steps is completed by a second start."""
    words = (*SHORT, "strategy=single", "training.checkpoint_every=1")
    first, second = workers.train(*words), workers.prepare(*words)
    shutil.copytree(first.folder / "checkpoints", second.folder.checkpoints, dirs_exist_ok=True)
    workers.run(1, train_here, str(second.folder.path), {})
    found = json.loads(second.folder.summary.read_text())
    assert (found["rank_state_bytes"], found["rank_memory_bytes"]) == (None, None)
