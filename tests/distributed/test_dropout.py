"""Dropout drops the same elements on every layout, in every recomputation and after a resume elsewhere.

tests/distributed/test_models_of_others.py trains a GPT with dropout on all layouts of token models.
"""

from __future__ import annotations

import pytest

from hpc_parallel.record.checkpoint_index import complete
from tests.distributed.test_models_of_others import words_of
from tests.marks import in_full
from tests.parity import assert_follows, weight_difference
from tests.workers import Train, Workers

STEPS = 4
COMMON = (
    f"training.steps={STEPS}", "training.log_every=1", f"training.validate_every={STEPS}",
    "training.validation_samples=8", "training.checkpoint_every=2", "training.measure_steps=0",
    "training.global_batch_size=8", "training.precision=float64", "optimizer.warmup_steps=1",
    "optimizer.schedule=constant",
    "strategy.verify=never",  # the tests compare
)  # fmt: skip
MODELS = {
    "gpt": words_of("split gpt"),
    "columns": (
        "data=text", "data.sequence_length=16", "data.max_bytes=100000", "~model",
        "+model={_target_: tests.dropout_models.Tokens, layers: 2, width: 16, rate: 0.3}",
    ),
    "maps": (
        "data=digits", "data.height=8", "data.width=24", "~model",
        "+model={_target_: tests.dropout_models.Images, width: 4, rate: 0.3}",
    ),
}  # fmt: skip
PIPELINE = "strategy=pipeline nodes=2 strategy.microbatches=4"
CASES = [
    ("gpt", f"{PIPELINE} training.activation_checkpointing=full"),
    ("columns", "strategy=tensor nodes=2"),
    ("maps", "strategy=tile nodes=2"),
]
MORE = [
    ("maps", "strategy=tile nodes=2 gpus_per_node=2"),
    ("gpt", f"{PIPELINE} strategy.schedule=interleaved_zero_bubble training.activation_checkpointing=full"),
    ("gpt", f"{PIPELINE} strategy.schedule=interleaved training.activation_checkpointing=selective"),
    ("gpt", "strategy=pipeline nodes=2 strategy.schedule=naive strategy.microbatches=2"),
    ("gpt", "strategy=fsdp nodes=2 training.activation_checkpointing=full training.microbatch_size=2"),
    ("gpt", "strategy=data nodes=2 training.compile=true training.activation_checkpointing=full"),
    ("columns", "strategy=tensor nodes=2 strategy.sequence_parallel=false"),
    ("maps", "strategy=tile nodes=2 gpus_per_node=2 strategy.tile=2 strategy.replicate=2"),
    ("maps", "strategy=pipeline nodes=2 strategy.microbatches=2"),
]


@pytest.mark.parametrize(("model", "layout"), [*CASES, *in_full(MORE)])
def test_layout_follows_one_device(trained: Train, model: str, layout: str) -> None:
    words = (*COMMON, *MODELS[model])
    split, alone = trained(*words, *layout.split()), trained(*words, "strategy=single")
    assert_follows(split, alone, losses=1e-10, weights=1e-9)


@pytest.mark.parametrize(
    "after", ["strategy=tensor nodes=2", *in_full([(PIPELINE,), ("strategy=context nodes=2",)])]
)
def test_a_run_goes_on_with_the_same_masks_in_another_layout(
    workers: Workers, trained: Train, after: str
) -> None:
    whole = trained(*COMMON, *MODELS["gpt"], "strategy=single")
    begun = workers.train(*COMMON, *MODELS["gpt"], "strategy=fsdp", "nodes=2", "training.steps=2",
                          "training.validate_every=2")  # fmt: skip
    (checkpoint,) = complete(begun.folder / "checkpoints")
    ended = workers.train(*COMMON, *MODELS["gpt"], *after.split(), resume_from=checkpoint.path)
    assert ended.losses == pytest.approx(whole.losses[2:], rel=1e-10)
    assert weight_difference(ended, whole) < 1e-9


def test_it_does_drop(trained: Train) -> None:
    columns = [word.replace("rate: 0.3", "rate: 0.0") for word in MODELS["columns"]]
    runs = (trained(*COMMON, *words, "strategy=single") for words in (MODELS["columns"], columns))
    norms = [run.gradients["blocks.0.feed.up.weight"].norm() for run in runs]
    assert abs(norms[0] / norms[1] - 1) > 0.05
