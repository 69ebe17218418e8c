"""Random models on random layouts either equal one device or are refused before they train."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.layout.batch_plan import batch_of
from hpc_parallel.layout.layout import layout_of
from hpc_parallel.problems import spell
from tests.marks import in_full
from tests.parity import largest_difference
from tests.random_models import CHOICES, CHOICES_OF_ROWS, RIGHT, RIGHT_ROWS
from tests.workers import Train, Workers, do_or_refuse

LAYOUTS = (
    "strategy=context nodes=2",
    "strategy=context nodes=2 strategy.context_attention=gather",
    "strategy=tensor nodes=2",
    "strategy=tensor nodes=2 strategy.sequence_parallel=false",
    "strategy=tensor nodes=2 strategy.loss_parallel=false",
    "strategy=tensor nodes=2 strategy.sequence_parallel=false training.microbatch_size=2",
    "strategy=fsdp nodes=2",
    "strategy=fsdp nodes=2 training.compile=true",
    "strategy=data nodes=2",
    "strategy=data nodes=2 training.microbatch_size=1",
    "strategy=pipeline nodes=2 strategy.microbatches=2",
    "strategy=pipeline nodes=2 strategy.schedule=gpipe strategy.microbatches=4",
    "strategy=fsdp nodes=2 gpus_per_node=2 strategy.context=2",
    "strategy=tensor nodes=2 gpus_per_node=2 strategy.context=2",
    "strategy=fsdp nodes=2 gpus_per_node=2 strategy.tensor=2",
    "strategy=hybrid nodes=2 gpus_per_node=2 strategy.tensor=1 strategy.context=2 strategy.microbatches=2",
)
COMMON = (
    "model=tiny", "model._target_=tests.random_models.RandomModel", "model.dim=16", "training.steps=2",
    "training.log_every=1", "training.validate_every=null", "training.checkpoint_every=null",
    "training.measure_steps=0", "training.global_batch_size=8", "training.precision=float64",
    "data.sequence_length=32", "data.max_bytes=100000",
)  # fmt: skip
ROWS = (
    "data=dataset", "data.dataset._target_=tests.datasets.Table", "~model",
    "+model._target_=tests.random_models.RandomRows",
    *(word for word in COMMON if not word.startswith(("model", "data"))),
)  # fmt: skip
LAYOUTS_OF_ROWS = (
    "strategy=data nodes=2 training.microbatch_size=2",
    "strategy=fsdp nodes=2",
    "strategy=hsdp nodes=2 gpus_per_node=2",
    "strategy=fsdp nodes=2 training.compile=true",
    "strategy=parameter_server nodes=3 strategy.dedicated_server=true",
    "strategy=pipeline nodes=2 strategy.microbatches=2",
    "strategy=tensor nodes=2",
)


def specs(choices: dict[str, tuple[Any, ...]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({key: st.sampled_from(values) for key, values in choices.items()})


TEXT_CASES = st.tuples(specs(CHOICES), st.sampled_from(LAYOUTS))
ROW_CASES = st.tuples(specs(CHOICES_OF_ROWS), st.sampled_from(LAYOUTS_OF_ROWS))
EQUAL = "equal"

Try = Callable[[dict[str, Any], str], str]


@pytest.fixture
def attempt(workers: Workers, tmp_path: Path) -> Try:
    """Trains a model on a layout: EQUAL, or the reason why it was refused. Fails if it trains otherwise."""

    def attempt(spec: dict[str, Any], layout: str) -> str:
        words = (*(COMMON if spec.keys() == RIGHT.keys() else ROWS), f"+model.spec={spell(spec)}")
        run = workers.prepare(*words, *layout.split())
        reasons = workers.run(run.processes, do_or_refuse, str(run.folder.path), str(tmp_path / "cache"))
        if any(reasons):
            assert all(reasons)
            assert not run.folder.metrics.exists()
            return max(reasons)
        reference = workers.train("strategy=single", *words, *alike_batches(run.config, spec))
        losses = [line["loss"] for line in workers.lines(run)]
        assert largest_difference(losses, reference.losses) < 1e-9, "it trained something else"
        return EQUAL

    return attempt


def alike_batches(config: RunConfig, spec: dict[str, Any]) -> tuple[str, ...]:
    """States and BatchNorm's moments depend on microbatches, so one device has as many; others need not."""
    if spec.get("state", "no") == "no" and spec["norm"] != "batch":
        return ()
    count = batch_of(config, layout_of(config.strategy, devices=config.devices)).microbatches
    return (f"training.microbatch_size={config.training.global_batch_size // count}",)


ZERO_BUBBLE = "strategy.schedule=interleaved_zero_bubble strategy.stages_per_rank=1 strategy.microbatches=4"
CASES = {
    "positions counted otherwise": (
        {"positions": "cumsum"}, "strategy=context nodes=2",
        "RandomModel does not equal one device on context 2: the loss is",
    ),
    "positions mixed without attention": (
        {"feed": "shift"}, "strategy=context nodes=2", "RandomModel does not equal one device",
    ),
    "fused columns that are viewed": (
        {"attention": "fused", "roles": "split_view"}, "strategy=tensor nodes=2",
        "RandomModel does not equal one device on tensor 2",
    ),
    "a refusal of its hints": (
        {"positions": "arange"}, "strategy=context nodes=2", "ConfigError: strategy.context = 2 can't be used"
    ),
    "positions mixed behind a gate of zero": (
        {"feed": "conv", "gate": "zero"}, "strategy=context nodes=2", "RandomModel does not equal one device",
    ),
    "a buffer that ranks write differently": (
        {"state": "mean"}, "strategy=data nodes=2",
        "buffer blocks.0.state.seen, which the forward pass writes: off by",
    ),
    "a buffer that compiled code reads later": (
        {"state": "count"}, "strategy=data nodes=2 training.compile=true",
        "training.compile = true can't be used: the forward pass of Block writes the buffer state.seen",
    ),
    "a branch that depends on data": (
        {"unused": "some", "dropout": "no"}, "strategy=fsdp nodes=2 training.compile=true",
        "training.compile = true can't be used: torch can't compile a block in one piece: "
        "Data-dependent branching (random_models.py:179)",
    ),
    "a buffer that a checkpointed block reads later": (
        {"state": "count"}, "strategy=data nodes=2 training.activation_checkpointing=full",
        "the forward pass of Block writes the buffer state.seen, and is computed again from its later value",
    ),
    "a weight that some samples use": (
        {"unused": "some", "dropout": "no"},
        f"strategy=pipeline nodes=4 strategy.pipeline=2 strategy.shard=2 {ZERO_BUBBLE}"
        " strategy.reshard=false",
        "RandomModel uses blocks.0.unused.weight for some samples only, and pipeline 2 x shard 2 waits for",
    ),
}  # fmt: skip


FIRST = (
    "positions counted otherwise",
    "positions mixed behind a gate of zero",
    "a buffer that ranks write differently",
    "a buffer that a checkpointed block reads later",
    "a branch that depends on data",
    "a weight that some samples use",
)


@pytest.mark.parametrize("case", [*FIRST, *in_full((case,) for case in CASES if case not in FIRST)])
def test_a_wrong_model_is_refused(attempt: Try, case: str) -> None:
    spec, layout, reason = CASES[case]
    assert reason in attempt({**RIGHT, **spec}, layout)


@pytest.mark.parametrize(
    ("spec", "layout"),
    [
        ({"attention": "fused", "gate": "zero"}, "strategy=tensor nodes=2"),
        ({"state": "count", "unused": True}, "strategy=data nodes=2"),
        ({"feed": "conv", "gate": "zero"}, "strategy=tensor nodes=2 strategy.sequence_parallel=false"),
        ({"shared": "blocks", "dropout": "no"}, "strategy=fsdp nodes=2 training.microbatch_size=2"),
        (
            {"shared": "pairs", "layers": 4, "dropout": "no"},
            "strategy=pipeline nodes=2 strategy.microbatches=2",
        ),
        (
            {"feed": "gains", "roles": "alike"},
            "strategy=tensor nodes=2 strategy.sequence_parallel=false training.microbatch_size=2",
        ),
        *in_full(
            [
                ({"feed": "normed"}, "strategy=tensor nodes=2"),
                ({"dropout": "heads"}, "strategy=fsdp nodes=2 training.compile=true"),
                ({"unused": "some", "dropout": "no"}, "strategy=fsdp nodes=2 training.microbatch_size=1"),
                ({}, "strategy=context nodes=2"),
                ({"unused": "some", "dropout": "no"}, "strategy=data nodes=2 training.microbatch_size=1"),
                ({"unused": "some", "dropout": "no"}, "strategy=parameter_server nodes=3"),
                ({"unused": "some", "dropout": "no"}, "strategy=hsdp nodes=2 gpus_per_node=2"),
                (  # its blocks look at the first position, which a slice of the sequence lacks
                    {"unused": "some", "dropout": "no"},
                    "strategy=fsdp nodes=2 gpus_per_node=2 strategy.tensor=2"
                    " strategy.sequence_parallel=false",
                ),
                (
                    {"unused": "some", "dropout": "no"},
                    "strategy=pipeline nodes=4 strategy.pipeline=2 strategy.shard=2 strategy.microbatches=2",
                ),
                ({"feed": "mixture"}, "strategy=tensor nodes=2 strategy.sequence_parallel=false"),
                ({"shared": "linear"}, "strategy=fsdp nodes=2 gpus_per_node=2 strategy.tensor=2"),
                ({"shared": "weight"}, "strategy=tensor nodes=2"),
                ({"shared": "mix"}, "strategy=context nodes=2"),
                ({"attention": "fused"}, "strategy=fsdp nodes=2 gpus_per_node=2 strategy.tensor=2"),
                ({}, "strategy=parameter_server nodes=3"),
                ({}, "strategy=dataparallel gpus_per_node=2"),
            ]
        ),
    ],
)
def test_a_right_model_equals_one_device(attempt: Try, spec: dict[str, Any], layout: str) -> None:
    assert attempt({**RIGHT, **spec}, layout) == EQUAL


@pytest.mark.parametrize(
    ("spec", "layout"),
    [
        ({}, "strategy=pipeline nodes=2 strategy.microbatches=2"),
        *in_full(({"norm": norm}, layout) for norm in ("batch", "layer") for layout in LAYOUTS_OF_ROWS),
        *in_full([({"shared": True, "dropout": False}, "strategy=fsdp nodes=2")]),
    ],
)
def test_a_model_of_rows_equals_one_device(attempt: Try, spec: dict[str, Any], layout: str) -> None:
    assert attempt({**RIGHT_ROWS, **spec}, layout) == EQUAL


@pytest.mark.parametrize(
    "layout",
    [
        "strategy=fsdp nodes=2",
        *in_full(
            [
                ("strategy=pipeline nodes=2 strategy.microbatches=2",),
                (f"strategy=pipeline nodes=4 strategy.pipeline=2 strategy.replicate=2 {ZERO_BUBBLE}",),
                ("strategy=pipeline nodes=4 strategy.pipeline=2 strategy.shard=2 strategy.microbatches=2",),
                ("strategy=tensor nodes=2",),
                ("strategy=context nodes=2",),
                ("strategy=fsdp nodes=2 gpus_per_node=2 strategy.tensor=2",),
            ]
        ),
    ],
)
def test_a_weight_that_the_loss_does_not_use_stays(trained: Train, layout: str) -> None:
    """Without gradient, not with one of zero, by which weight decay would change it."""
    words = (*COMMON, "optimizer.weight_decay=0.5", f"+model.spec={spell({**RIGHT, 'unused': True})}")
    alone, split = trained("strategy=single", *words), trained(*layout.split(), *words)
    names = [name for name in alone.weights if ".unused." in name]
    assert len(names) == 4
    assert split.gradients.keys() == alone.gradients.keys() == alone.weights.keys() - set(names)
    assert all(split.weights[name].equal(alone.weights[name]) for name in names)


SHORT = tuple(word for word in COMMON if word.startswith("training"))
EXPERTS = ("model=moe_tiny", "model._target_=tests.models.UnusedBesideExperts", "model.layers=2", *SHORT)
IMAGES = ("model=segmenter", "data=cells", "model._target_=tests.models.UnusedInImages", *SHORT)


@pytest.mark.parametrize(
    ("words", "layout"), [(EXPERTS, "strategy=expert nodes=2"), (IMAGES, "strategy=tile nodes=2")]
)
def test_a_weight_that_nothing_uses_stays_beside_experts_and_in_tiles(
    workers: Workers, words: tuple[str, ...], layout: str
) -> None:
    alone = workers.train("strategy=single", *words, "training.validation_samples=8")
    split = workers.train(*layout.split(), *words, "training.validation_samples=8")
    assert largest_difference(split.losses, alone.losses) < 1e-9
    names = [name for name in alone.weights if ".unused." in name]
    assert names
    assert split.gradients.keys() == alone.gradients.keys() == alone.weights.keys() - set(names)
    assert all(split.weights[name].equal(alone.weights[name]) for name in names)


@pytest.mark.parametrize(
    ("spec", "layout", "reason"),
    [
        ({"positions": "cumsum"}, "strategy=single", "logits of the next token: off by"),
        ({"feed": "conv", "gate": "zero"}, "strategy=single", "logits of the next token: off by"),
        *in_full(
            [
                ({"positions": "arange"}, "strategy=single", "RandomModel.stem counts positions"),
                ({"feed": "shift"}, "strategy=pipeline nodes=2", "logits of the next token: off by"),
                ({}, "strategy=pipeline nodes=2", ""),
            ]
        ),
    ],
)
def test_generation_is_compared(
    workers: Workers, tmp_path: Path, spec: dict[str, Any], layout: str, reason: str
) -> None:
    words = (*COMMON, "task=generate", "task.new_tokens=2", f"+model.spec={spell({**RIGHT, **spec})}")
    run = workers.prepare(*words, *layout.split())
    reasons = workers.run(run.processes, do_or_refuse, str(run.folder.path), str(tmp_path))
    assert all(reason in text and bool(reason) == bool(text) for text in reasons)


@pytest.mark.parametrize(
    ("feed", "layout"), [("conv", "strategy=pipeline nodes=2"), ("mlp", "strategy=single")]
)
def test_what_is_generated_with_a_cache_is_compared_on_the_weights_of_the_run(
    workers: Workers, tmp_path: Path, feed: str, layout: str
) -> None:
    """The comparison at the start sees nothing."""
    words = (*COMMON, "model._target_=tests.random_models.HidesInSmall", "task=generate", "task.new_tokens=5",
             f"+model.spec={spell({**RIGHT, 'feed': feed})}")  # fmt: skip
    run = workers.prepare(*words, *layout.split())
    reasons = workers.run(run.processes, do_or_refuse, str(run.folder.path), str(tmp_path))
    wrong = "HidesInSmall computes something else with cached keys and values than from the whole text"
    assert all(
        text.startswith(f"DifferenceError: {wrong}") if feed == "conv" else not text for text in reasons
    )


def test_positions_that_are_mixed_far_apart_are_refused(workers: Workers, tmp_path: Path) -> None:
    """The short texts of the comparison show no difference."""
    words = (*COMMON, "model._target_=tests.models.LooksBack", "strategy=context", "nodes=2")
    run = workers.prepare(*words)
    reasons = workers.run(run.processes, do_or_refuse, str(run.folder.path), str(tmp_path))
    wrong = "strategy.context = 2 can't be used: LooksBack mixes positions outside of CausalAttention"
    assert all(wrong in text for text in reasons)


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_no_random_model_trains_wrong(attempt: Try) -> None:
    """200 models; the counts are printed (`pytest -s`)."""
    counts: Counter[str] = Counter()

    @seed(13)
    @settings(
        max_examples=200, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=TEXT_CASES | TEXT_CASES | TEXT_CASES | ROW_CASES)
    def search(case: tuple[dict[str, Any], str]) -> None:
        counts[attempt(*case).partition(":")[0]] += 1
        print(counts.total(), dict(counts), flush=True)

    search()
    assert counts[EQUAL] > 50
    assert counts.total() >= 200
