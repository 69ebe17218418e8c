"""Models of docs/own-model.md on several devices, against one: masks, biases, inputs, losses and roles."""

from __future__ import annotations

import pytest

from tests.marks import in_full
from tests.parity import COMMON, assert_follows
from tests.workers import Train

OPTIONS = (
    *(word for word in COMMON if not word.startswith("data.")), "training.precision=float64",
    "data.sequence_length=32",
)  # fmt: skip
WORDS = ("data=dataset", "data.vocab_size=256", "data.dataset._target_=tests.guide_models.Pairs")
NUMBERS = ("data=dataset", "data.dataset._target_=tests.guide_models.Numbers")
TEXT = ("model._target_=tests.guide_models.Text", *WORDS, "data.sequence_length=32")
BRIGHTNESS = ("model._target_=tests.guide_models.Brightness", *NUMBERS, "data.sequence_length=null")
RECURRENT = ("model._target_=tests.guide_models.Recurrent", "data.max_bytes=400000")
BIASED = ("model._target_=tests.guide_models.Biased", "data.max_bytes=400000")
OF_EACH_HEAD, OF_ALL_HEADS = (*BIASED, "+model.biases=4"), (*BIASED, "+model.biases=1")
WHOLE = ("strategy.sequence_parallel=false",)
CASES = {
    "two inputs, a bias and a mask, data": (TEXT, ("strategy=data", "nodes=2")),
    "two inputs, a bias and a mask, context": (TEXT, ("strategy=context", "nodes=2")),
    "two inputs, a bias and a mask, context by heads": (
        TEXT, ("strategy=context", "nodes=2", "strategy.context_attention=all_to_all"),
    ),
    "two inputs, a bias and a mask, shard 2 x context 2": (
        TEXT, ("strategy=fsdp", "nodes=2", "gpus_per_node=2", "strategy.context=2"),
    ),
    "two inputs, a bias and a mask, pipeline": (TEXT, ("strategy=pipeline", "nodes=2")),
    "a regression of images, fsdp": (BRIGHTNESS, ("strategy=fsdp", "nodes=2")),
    "a regression of images, tensor": (
        BRIGHTNESS, ("strategy=tensor", "nodes=2", "strategy.loss_parallel=false"),
    ),
    "a bias of each head, tensor": (OF_EACH_HEAD, ("strategy=tensor", "nodes=2", *WHOLE)),
    "one bias of all heads, tensor": (OF_ALL_HEADS, ("strategy=tensor", "nodes=2", *WHOLE)),
    "a bias of each head, tensor 2 x context 2 by heads": (
        OF_EACH_HEAD,
        ("strategy=tensor", "nodes=2", "gpus_per_node=2", "strategy.context=2",
         "strategy.context_attention=all_to_all", *WHOLE),
    ),
    "a recurrence, tensor": (RECURRENT, ("strategy=tensor", "nodes=2", *WHOLE)),
}  # fmt: skip


IN_FULL = [
    case for case in CASES
    if " x " in case or case.endswith("context by heads") or case == "one bias of all heads, tensor"
]  # fmt: skip


@pytest.mark.parametrize("case", [*(c for c in CASES if c not in IN_FULL), *in_full((c,) for c in IN_FULL)])
def test_it_follows_one_device(trained: Train, case: str) -> None:
    model, layout = CASES[case]
    alone, split = (trained(*words, *OPTIONS, *model) for words in (("strategy=single",), layout))
    assert len(set(alone.losses)) == len(alone.losses)  # it learns
    assert_follows(split, alone, losses=1e-10, weights=1e-10)
