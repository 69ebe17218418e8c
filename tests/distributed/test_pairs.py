"""Every pair of switches, with the defaults left on: equal to one device, or refused with advice.

Each row of the covering array sets many switches at once. If a row is refused, the test follows the advice of
the refusal until the row runs: all that is advised must be accepted.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice

import pytest
from allpairspy import AllPairs

from hpc_parallel.problems import ConfigError
from tests.marks import in_full
from tests.parity import tensor_difference
from tests.workers import Trained, Workers

Words = tuple[str, ...]
STEPS = 4  # the last two are measured; a save after half of them
COMMON = (
    f"training.steps={STEPS}", "training.log_every=1", f"training.checkpoint_every={STEPS // 2}",
    "training.global_batch_size=24", "optimizer.warmup_steps=2",
)  # fmt: skip
NETWORKS: dict[str, Words] = {
    "text": (
        "model=tiny", "model.layers=4", "model.dim=32", "model.heads=4", "model.kv_heads=4",
        "model.ffn_dim=64", "data=text", "data.sequence_length=16", "data.max_bytes=100000",
    ),
    "moe": (
        "model=moe_tiny", "model.layers=4", "model.dim=32", "model.heads=4", "model.kv_heads=4",
        "model.ffn_dim=16", "data=text", "data.sequence_length=16", "data.max_bytes=100000",
    ),
    "digits": ("model=convnet", "model.channels=[4,8,8]", "data=digits"),
    "cells": (
        "model=segmenter", "model.channels=[8,12,16]", "data=cells", "data.samples=64", "data.height=16",
        "data.width=16",
    ),
}  # fmt: skip
TWO, FOUR = ("nodes=2",), ("nodes=2", "gpus_per_node=2")
LAYOUTS: dict[str, Words] = {
    "single": ("strategy=single",),
    "data": ("strategy=data", *TWO),
    "fsdp": ("strategy=fsdp", *TWO),
    "hsdp": ("strategy=hsdp", *FOUR),
    "tensor": ("strategy=tensor", *TWO),
    "tensor x shard": ("strategy=tensor", *FOUR, "strategy.tensor=2", "strategy.shard=2"),
    "pipeline": ("strategy=pipeline", *TWO),
    "interleaved": ("strategy=pipeline", *TWO, "strategy.schedule=interleaved"),
    "pipeline x replicate": ("strategy=pipeline", *FOUR, "strategy.pipeline=2", "strategy.replicate=2"),
    "context": ("strategy=context", *TWO),
    "gathering context": ("strategy=context", *TWO, "strategy.context_attention=gather"),
    "tile": ("strategy=tile", *TWO),
    "expert": ("strategy=expert", *TWO),
    "hybrid": ("strategy=hybrid", *FOUR),
    "server": ("strategy=parameter_server", "nodes=3"),
    "model": ("strategy=model", *TWO),
}
LAYOUT, NETWORK, RESUME = "layout", "network", "resume"
# The first value of each switch is the default.
SWITCHES: dict[str, dict[str, Words]] = {
    LAYOUT: LAYOUTS,
    NETWORK: NETWORKS,
    "task": {name: (f"task={name}",) for name in ("train", "infer", "generate")},
    "precision": {
        name: (f"training.precision={name}",) for name in ("float64", "float32", "bfloat16", "float16")
    },
    "compile": {"no": (), "blocks": ("training.compile=true",)},
    "recompute": {
        name: (f"training.activation_checkpointing={name}",) for name in ("none", "full", "selective")
    },
    "optimizer": {name: (f"optimizer={name}",) for name in ("adamw", "sgd", "muon", "adafactor")},
    "microbatch": {name: (f"training.microbatch_size={name}",) for name in ("null", "2")},
    "clip": {name: (f"training.clip_norm={name}",) for name in ("1.0", "null")},
    "nonfinite": {name: (f"training.on_nonfinite={name}",) for name in ("stop", "skip", "rollback")},
    "async": {name: (f"training.checkpoint_async={name}",) for name in ("true", "false")},
    "fp8": {name: (f"training.fp8={name}",) for name in ("off", "tensorwise")},
    "chunked": {name: (f"training.chunked_loss={name}",) for name in ("true", "false")},
    "deterministic": {name: (f"training.deterministic={name}",) for name in ("false", "true")},
    "compression": {name: (f"strategy.gradient_compression={name}",) for name in ("none", "bfloat16")},
    "static": {name: (f"strategy.static_graph={name}",) for name in ("false", "true")},
    RESUME: {"no": (), "on one device": LAYOUTS["single"], "on slices": LAYOUTS["fsdp"]},
}
Row = dict[str, str]
# Keys that decide the result, which one device gets too.
SHARED = re.compile(
    r"(model|data|optimizer|task|seed)[.=]|training\.(steps|global|precision|clip|on_non|fp8|weights|log|val)"
)
TOLERANCES = {"float64": 1e-9, "float32": 2e-4, "bfloat16": 0.03, "float16": 0.03}
LOSSY = {"training.fp8=tensorwise": 0.1, "strategy.gradient_compression=bfloat16": 2e-3}  # 2^-9 and less
MOST_ADVICE = 12
OVERRIDE = re.compile(r"[a-z_]+(\.[a-z_0-9-]+)*=\S+")


def rows(seed: int) -> Iterator[Row]:
    """A covering array of all pairs of values."""
    order = random.Random(seed)
    values = [order.sample(list(table), len(table)) for table in SWITCHES.values()]
    yield from (dict(zip(SWITCHES, row, strict=True)) for row in AllPairs(values))


def words_of(row: Row) -> list[str]:
    return [
        *COMMON,
        *(word for switch, value in row.items() if switch != RESUME for word in SWITCHES[switch][value]),
    ]


def advised(problem: object) -> list[list[str]]:
    """The alternatives that a problem proposes; each is a list of overrides."""
    _, _, advice = str(problem).partition("Try ")
    choices = re.split(r",? or |, |\. ", advice.rstrip("."))
    overrides = [[word for word in choice.split() if OVERRIDE.fullmatch(word)] for choice in choices]
    return [choice for choice in overrides if choice]


def accepted(workers: Workers, words: Sequence[str]) -> list[str]:
    """`words`, changed as refusals advise until they are accepted; each proposal must solve its problem."""
    words = list(words)
    for _ in range(MOST_ADVICE):
        problems = refusals(workers, words)
        if not problems:
            return words
        changed: set[str] = set()
        for problem in problems:
            choices = advised(problem)
            assert choices, f"no advice in: {problem} ({' '.join(words)})"
            for choice in choices[1:]:
                assert problem not in refusals(workers, merged(words, choice)), f"{problem} Tried {choice}."
            keys = {re.sub(r"^task\..*", "task", key_of(override)) for override in choices[0]}
            if not changed & keys:
                words = merged(words, choices[0])
                changed |= keys
    raise AssertionError(f"still refused after {MOST_ADVICE} times: {problems} ({' '.join(words)})")


def refusals(workers: Workers, words: Sequence[str]) -> list[str]:
    try:
        workers.prepare(*words)
    except ConfigError as error:
        return list(map(str, error.problems))
    return []


def key_of(override: str) -> str:
    return override.partition("=")[0]


def merged(words: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """`words` with `overrides` in place of earlier ones of the same keys; another task has other keys."""
    keys = set(map(key_of, overrides))
    kept = [word for word in words if not ("task" in keys and word.startswith("task."))]
    return [*(word for word in kept if key_of(word) not in keys), *overrides]


def with_samples_of(workers: Workers, run: Sequence[str], words: Sequence[str]) -> list[str]:
    """`words`, accepted, with as many samples in a BatchNorm as in `run`: on one device if replicas can't."""
    samples = workers.prepare(*run).plan.batch.samples_per_microbatch
    words = accepted(workers, merged(words, ["training.microbatch_size=null"]))
    size, rest = divmod(samples, workers.prepare(*words).plan.batch.data)
    if rest:
        return with_samples_of(
            workers, run, merged(words, [*LAYOUTS["single"], "nodes=1", "gpus_per_node=1"])
        )
    return merged(words, [f"training.microbatch_size={size}"])


TASK_SIZES: Mapping[str, Words] = {
    "infer": ("task.repeats=3", "task.seconds=1"), "generate": ("task.new_tokens=6",), "train": (),
}  # fmt: skip


def finished(workers: Workers, words: Sequence[str]) -> tuple[dict[str, list[float]], Trained | None]:
    """The figures of a run by name, and what a training leaves."""
    task = next(word.partition("=")[2] for word in words if word.startswith("task="))
    words = [*words, *TASK_SIZES[task]]
    if task == "train":
        trained = workers.train(*words)
        return curves(trained), trained
    folder = workers.do(*words)
    if task == "infer":
        summary = json.loads((folder / "summary.json").read_text())
        return {"validation_loss": [summary["validation_loss"]]}, None
    lines = [json.loads(line) for line in (folder / "generated.jsonl").read_text().splitlines()]
    return {f"text {index}": line["tokens"] for index, line in enumerate(lines)}, None


def curves(trained: Trained) -> dict[str, list[float]]:
    keys = ("loss", "grad_norm", "validation_loss")
    return {key: [line[key] for line in trained.lines if line.get(key) is not None] for key in keys}


def assert_equal(found: dict[str, list[float]], wanted: dict[str, list[float]], *, within: float) -> None:
    assert found.keys() == wanted.keys()
    for key, values in wanted.items():
        assert len(found[key]) == len(values)
        if key.startswith("text"):
            assert found[key] == values or within > 1e-3, key  # rounding may decide between two tokens
            continue
        differences = [abs(a - b) / abs(b) for a, b in zip(found[key], values, strict=True)]
        assert max(differences) < within * (10 if key == "grad_norm" else 1), (key, differences)


@dataclass(frozen=True)
class Compared:
    """A run that equals one device: its overrides, what it left, the figures of one device, the tolerance."""

    words: list[str]
    trained: Trained | None
    wanted: dict[str, list[float]]
    within: float


def compared(workers: Workers, words: Sequence[str]) -> Compared:
    """Run the overrides as they are accepted, beside one device, and compare the two."""
    words = accepted(workers, words)
    print(" ".join(words))
    precision = next(word.partition("=")[2] for word in words if word.startswith("training.precision="))
    within = max([TOLERANCES[precision], *(LOSSY[word] for word in words if word in LOSSY)])
    found, trained = finished(workers, words)
    alone = [*(word for word in words if SHARED.match(word)), "strategy=single"]
    wanted, reference = finished(workers, with_samples_of(workers, words, alone))
    assert_equal(found, wanted, within=within)
    if trained is not None and reference is not None and within < 1e-3:
        assert tensor_difference(trained.weights, reference.weights) < 100 * within
    return Compared(words, trained, wanted, within)


def check(workers: Workers, row: Row) -> list[str]:
    """Run the row as it is accepted, beside one device, and from its checkpoint; returns its overrides."""
    run = compared(workers, words_of(row))
    words, trained, wanted, within = run.words, run.trained, run.wanted, run.within
    if trained is not None and SWITCHES[RESUME][row[RESUME]]:
        layout = [word for word in words if not word.startswith(("strategy", "nodes=", "gpus_per_node="))]
        other = with_samples_of(workers, words, [*layout, *SWITCHES[RESUME][row[RESUME]]])
        resumed = workers.train(*other, resume_from=trained.folder / f"checkpoints/step-{STEPS // 2}")
        later = {key: values[-STEPS // 2 :] for key, values in wanted.items() if key != "validation_loss"}
        later["validation_loss"] = wanted["validation_loss"][-1:]
        assert_equal(curves(resumed), later, within=within)
    return words


@cache
def most_switched(seed: int) -> tuple[tuple[str, ...], ...]:
    """The ten rows that differ from the defaults in the most switches, uncompiled because that is quick."""
    table = [row for row in rows(seed) if row["compile"] == "no" and row["task"] == "train"]
    table.sort(key=lambda row: -sum(value != next(iter(SWITCHES[name])) for name, value in row.items()))
    return tuple(tuple(row.values()) for row in islice(table, 10))


QUICK = (9, 0, 8)  # together they have the most pairs of the ten for their time


@pytest.mark.parametrize("number", [*QUICK, *in_full((row,) for row in range(10) if row not in QUICK)])
def test_rows_with_the_most_switches(workers: Workers, number: int) -> None:
    check(workers, dict(zip(SWITCHES, most_switched(0)[number], strict=True)))


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", [1])
def test_every_pair_of_switches(workers: Workers, seed: int) -> None:
    failures = []
    for row in rows(seed):
        try:
            check(workers, row)
        except Exception as error:
            failures.append(f"{row}: {type(error).__name__}: {error}")
    assert not failures, "\n".join(failures)
