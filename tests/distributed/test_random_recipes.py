"""200 recipes drawn at random: equal to one device, or refused with advice that leads to one that is.

`pytest -m full -s -k reasons` prints how many are refused for which reason.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.distributed.test_pairs import NETWORKS, Words, accepted, compared, refusals
from tests.workers import Workers

SEED, COUNT = 50, 200
COMMON = (
    "task=train", "training.steps=4", "training.log_every=1", "training.checkpoint_every=2",
    "training.global_batch_size=24", "optimizer.warmup_steps=2",
)  # fmt: skip
PACKED = (
    *(word for word in NETWORKS["text"] if not word.startswith("data")), "data=dataset",
    "data.dataset._target_=hpc_parallel.proof.rows.RandomDocuments", "data.vocab_size=256",
    "data.sequence_length=16", "data.packing=true",
)  # fmt: skip
NETS: tuple[Words, ...] = (NETWORKS["text"], NETWORKS["moe"], PACKED)
AXES = ("pipeline", "replicate", "shard", "expert", "context", "tensor")
OPTIONS: dict[str, tuple[str, ...]] = {
    "training.precision": ("float64", "float64", "float32", "bfloat16"),
    "training.fp8": ("off", "off", "off", "tensorwise", "rowwise"),
    "training.compile": ("false", "false", "true"),
    "training.activation_checkpointing": ("none", "full", "selective"),
    "training.microbatch_size": ("null", "1", "2"),
    "training.weights": ("float32", "float32", "bfloat16"),
    "optimizer.state": ("float32", "bfloat16"),
    "strategy.context_attention": ("ring", "gather", "all_to_all"),
    "strategy.schedule": (
        "1f1b", "gpipe", "naive", "interleaved", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev",
    ),
}  # fmt: skip
# Reasons of refusals that somebody could remove; the others are what can't be right, or what torch can't do.
UNTRIED = re.compile("not proven")


def recipes() -> Iterator[list[str]]:
    """The same recipes each time."""
    numbers = random.Random(SEED)
    for _ in range(COUNT):
        degrees = dict.fromkeys(AXES, 1)
        for _ in range(numbers.randint(1, 3)):
            degrees[numbers.choice(AXES)] *= 2
        net = NETS[1] if degrees["expert"] > 1 else numbers.choice(NETS)
        ranks = 2 ** (sum(degree.bit_length() - 1 for degree in degrees.values()))
        options = {key: numbers.choice(values) for key, values in OPTIONS.items()}
        if options["training.fp8"] != "off":
            options["training.precision"] = "bfloat16"
        if degrees["pipeline"] == 1:
            del options["strategy.schedule"]
        layout = [f"strategy.{axis}={degree}" for axis, degree in degrees.items()]
        yield [
            *COMMON, *net, "strategy=hybrid", f"nodes={min(2, ranks)}", f"gpus_per_node={max(1, ranks // 2)}",
            *layout, *(f"{key}={value}" for key, value in options.items()),
        ]  # fmt: skip


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_reasons_of_refusals(workers: Workers) -> None:
    """Each recipe is accepted, or refused with advice that ends at an accepted one."""
    reasons: Counter[str] = Counter()
    for words in recipes():
        problems = refusals(workers, words)
        reasons.update({re.sub(r"\d+", "N", problem.partition(" Try ")[0]) for problem in problems})
        reasons["accepted"] += not problems
        accepted(workers, words)
    print(f"{reasons['accepted']} of {COUNT} are accepted as they are")
    for reason, count in (reasons - Counter(accepted=COUNT)).most_common():
        print(f"{count:4} {'nobody tried' if UNTRIED.search(reason) else 'physics':12} {reason}")
    assert 0 < reasons["accepted"] < COUNT


@pytest.mark.full
@pytest.mark.timeout(6 * 3600)
def test_each_equals_one_device(workers: Workers) -> None:
    failures = []
    for number, words in enumerate(recipes()):
        try:
            compared(workers, words)
        except Exception as error:
            failures.append(f"{number}: {' '.join(words)}: {type(error).__name__}: {error}")
    assert not failures, "\n".join(failures)
