"""Suggestions for unknown keys: the name in other programs, another group, a typing error, or nothing."""

from __future__ import annotations

import difflib
import random
import string

import pytest

from hpc_parallel import __version__
from hpc_parallel.commands.run import main
from hpc_parallel.config.compose import flat
from hpc_parallel.config.key_suggestions import SYNONYMS, edits, suggest
from tests.composed import composed

LINES = {
    "optimizer.lr=0.1": "Try optimizer.learning_rate=0.1.",
    "lr=0.1": "Try optimizer.learning_rate=0.1.",
    "epochs=3": "Try training.steps=500.",
    "batch_size=32": "Try training.global_batch_size=32.",
    "optimizer.wd=0.01": "Try optimizer.weight_decay=0.01.",
    "fp16=true": "Try training.precision=float16.",
    "training.bf16=true": "Try training.precision=bfloat16.",
    "amp=true": "Try training.precision=bfloat16.",
    "strategy.tp=2": "Try strategy.tensor=2.",
    "pp=2": "Try strategy.pipeline=2.",
    "dp=2": "Try strategy.replicate=2.",
    "ckpt=yes": "Try training.checkpoint_every=500.",
    "eval=true": "Try training.validate_every=100.",
    "gpus=2": "Try gpus_per_node=2.",
    "model.hidden_size=64": "Try model.dim=64.",
    "model.widht=3": "there is no key model.widht.",
    "gradient_accumulation=4": "accumulated over microbatches. Try training.microbatch_size=4.",
    "optimizer._target_=torch.optim.SGD": "Try optimizer=custom optimizer._target_=torch.optim.SGD.",
    "training.foo=1": "there is no key training.foo.",
    "training.stepz=5": "Try training.steps=5.",
    "training.learning_rate=0.1": "Try optimizer.learning_rate=0.1.",
    "launcher.schedule=x": "there is no key launcher.schedule.",
    "strategy=ddp": "Try strategy=data.",
    "strategy=zero3": "Try strategy=fsdp.",
    "strategy=cp": "Try strategy=context.",
    "device=gpu": "Try device=cuda.",
    "training.precision=half": "Try training.precision=float16.",
    "training.steps=1e3": "Try training.steps=1000.",
    "time=2h": "Try launcher.time_minutes=120.",
    "launcher.time_minutes=1:30:00": "Try launcher.time_minutes=90.",
    "launcher.memory_gb=64G": "Try launcher.memory_gb=64.",
    "launcher.memory_gb=512MiB": "Try launcher.memory_gb=0.5.",
    "data=words.npy": "Try data=tokens data.path=words.npy.",
    "model=mymodel": "is found by --config-dir FOLDER, which holds model/mymodel.yaml.",
}


def test_the_version_is_ours(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"hpc_parallel {__version__}\n")


@pytest.mark.parametrize("override", LINES)
def test_the_suggestion_means_what_was_typed(override: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([override, "launcher=script"]) == 2
    assert capsys.readouterr().err.splitlines()[1].endswith(LINES[override])


FLAGS = {
    ("--nodes", "2"): "--nodes: a key has no dashes before it. Try nodes=2.",
    ("strategy=data", "--strategy=pipeline"): "--strategy=pipeline: a key has no dashes before it. "
    "Try strategy=pipeline.",
    ("--num-nodes", "4"): "--num-nodes: a key has no dashes before it. Try nodes=4.",
    ("--training.steps=5",): "--training.steps=5: a key has no dashes before it. Try training.steps=5.",
    ("--verbose",): "--verbose: there is no such flag. `run --help` lists the flags and keys.",
}


@pytest.mark.parametrize("words", FLAGS)
def test_a_flag_that_is_a_key_becomes_an_override(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.splitlines()[1].strip() == FLAGS[words]


def test_flags_may_follow_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nodes=1,0", "-m", "strategy=data", "sweep.on_invalid=stop", "launcher=script"]) == 2
    assert "nodes = 0" in capsys.readouterr().err


def test_each_synonym_names_a_key_of_some_model() -> None:
    keys = {key for model in ("tiny", "moe_tiny") for key in flat(composed(f"model={model}"))}
    assert {name.partition("=")[0] for name in SYNONYMS.values()} <= keys
    assert not SYNONYMS.keys() & {key for key in keys if "." not in key}


def test_nothing_far_is_suggested() -> None:
    """A key of random letters has no suggestion unless it is within two edits of one in its group."""
    keys = flat(composed())
    letters = random.Random(0)
    for _ in range(500):
        group = letters.choice(["optimizer.", "training.", "strategy.", "launcher.", ""])
        word = "".join(letters.choices(string.ascii_lowercase, k=letters.randint(2, 10)))
        suggestion = suggest(group + word, keys)
        if suggestion is not None and word not in SYNONYMS and group + word not in keys:
            last = suggestion.rpartition(".")[2]
            assert last == word or edits(word, last) <= 2


@pytest.mark.parametrize(
    ("a", "b", "distance"), [("", "ab", 2), ("kitten", "sitting", 3), ("nodes", "nodes", 0)]
)
def test_edits_are_counted(a: str, b: str, distance: int) -> None:
    assert edits(a, b) == edits(b, a) == distance
    matches = sum(block.size for block in difflib.SequenceMatcher(None, a, b).get_matching_blocks())
    assert distance <= len(a) + len(b) - 2 * matches  # inserting and deleting alone
