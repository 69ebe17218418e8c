"""The switches of speed: what `auto` means, garbage on fixed steps, and the variables that torch reads."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest

from hpc_parallel.machine import torch_variables
from hpc_parallel.problems import ConfigError
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.training.trainer import collecting
from tests.composed import prepared


@pytest.mark.parametrize(
    ("words", "compiles"),
    [
        ((), False),
        (("training.speed=max",), True),
        (("training.speed=max", "training.compile=false"), False),
        (("training.compile=true",), True),
    ],
)
def test_auto_means_what_the_speed_says(words: tuple[str, ...], compiles: bool) -> None:
    assert prepared("launcher=local", "device=cpu", *words).config.training.compile is compiles


WHOLE = ("training.compile=true", "training.compile_whole=true")
FOUR = ("nodes=2", "gpus_per_node=2")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("training.memory_budget=0.5",), "training.memory_budget = 0.5 needs training.compile=true"),
        (
            ("training.memory_budget=0.5", "training.compile=true",
             "training.activation_checkpointing=full"),
            "training.activation_checkpointing = full can't be combined with training.memory_budget",
        ),
        (("training.memory_budget=1.5", "training.compile=true"), "must lie between 0 and 1"),
        (("training.speed=fast",), "training.speed = fast is not one of safe, max"),
        (("training.compile_whole=true",), "compiles nothing, whole or not. Try training.compile=true"),
        ((*WHOLE, "strategy=fsdp", "nodes=2"), "its samples are divided by strategy.shard=2"),
        ((*WHOLE, "strategy=hybrid", *FOUR), "by strategy.pipeline=2 and strategy.tensor=2"),
        ((*WHOLE, "strategy=parameter_server", "nodes=2"), "strategy=parameter_server does more around"),
        ((*WHOLE, "training.activation_checkpointing=full"), "with training.activation_checkpointing=full"),
        ((*WHOLE, "training.precision=bfloat16", "training.fp8=rowwise"), "with training.fp8=rowwise"),
        ((*WHOLE, "model._target_=tests.own.Model"), "yours are compiled block by block"),
    ],
)  # fmt: skip
def test_what_can_not_be_together_is_refused(words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        prepared("launcher=local", "device=cpu", *words)
    assert sentence in str(raised.value)


def test_garbage_is_collected_on_fixed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    generations: list[int | None] = []
    monkeypatch.setattr(gc, "collect", lambda generation=None: generations.append(generation))
    at: list[int] = []
    with collecting(3) as collect:
        assert not gc.isenabled()
        for step in range(1, 8):
            before = len(generations)
            collect(step)
            if len(generations) > before:
                at.append(step)
    assert (at, generations) == ([3, 6], [None, 1, 1])
    assert gc.isenabled()
    with collecting(None) as collect:
        assert gc.isenabled()
        collect(3)
    assert len(generations) == 3


def test_garbage_that_was_alive_in_a_collection_goes_too() -> None:
    class Kept: ...

    kept = Kept()
    kept.itself = kept  # type: ignore[attr-defined]
    alive = weakref.ref(kept)
    with collecting(1) as collect:
        collect(1)
        del kept
        for step in range(2, 20):
            collect(step)
        assert alive() is not None
        collect(20)
        assert alive() is None


def test_the_collector_is_on_again_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), collecting(3):
        raise ZeroDivisionError
    assert gc.isenabled()


def test_variables_of_torch_are_set_only_where_the_user_has_not(tmp_path: Path) -> None:
    environment: dict[str, str] = {}
    folder = RunFolder(tmp_path)
    assert set(torch_variables.use_compiler_cache(folder, environment)) == {"TORCHINDUCTOR_CACHE_DIR"}
    assert set(torch_variables.use_expandable_segments(environment)) == {"PYTORCH_ALLOC_CONF"}
    assert environment == {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled"),
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    users = {"TORCHINDUCTOR_CACHE_DIR": "/mine", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    unchanged = dict(users)
    assert torch_variables.use_compiler_cache(folder, users) == {}
    assert torch_variables.use_expandable_segments(users) == {}
    assert users == unchanged
