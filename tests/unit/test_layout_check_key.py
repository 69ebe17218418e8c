"""A recorded comparison with one device holds for what it compared, and for nothing else."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hpc_parallel.config.build import build
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.data.dataset import as_data
from hpc_parallel.layout.batch_plan import Plan
from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.proof import verify as keys
from hpc_parallel.proof.small_checks import mixes_positions
from hpc_parallel.proof.small_model import SmallRun, build_small
from hpc_parallel.proof.verify import TECHNIQUES, layout_check_key
from tests.composed import prepared
from tests.marks import in_full

PACKAGE = Path(keys.__file__).parents[1]
PIPELINE = ("strategy=pipeline", "nodes=2", "training.global_batch_size=16")


class Tokens:
    """Samples that depend on their index and on `shift`."""

    def __init__(self, shift: int) -> None:
        self.shift = shift

    def __len__(self) -> int:
        return 64

    def batch(self, indices: np.ndarray[Any, Any]) -> tuple[Tensor, Tensor]:
        tokens = (torch.from_numpy(indices)[:, None] * 7 + torch.arange(33) + self.shift) % 256
        return tokens[:, :-1], tokens[:, 1:]


@cache
def key(*overrides: str, shift: int = 0) -> str:
    config = prepared("launcher=local", "device=cpu", *PIPELINE, *overrides).config
    data: Any = SimpleNamespace(train=Tokens(shift))
    model = build_small(config)
    return layout_check_key(small_run(config, model=model, data=data), model=model)


def small_run(config: RunConfig, *, model: LayeredModel, data: Any) -> SmallRun:
    device = torch.device("cpu")
    return SmallRun.of(config, plan=Plan.of(config), model=model, data=data, device=device)


@pytest.mark.parametrize(
    "overrides",
    [
        "strategy.microbatches=8", "strategy.schedule=gpipe", "nodes=4", "strategy=data", "model.dim=64",
        "seed=1", "training.activation_checkpointing=full",
    ],
)  # fmt: skip
def test_another_comparison_has_another_key(overrides: str) -> None:
    assert key("strategy.microbatches=4") != key("strategy.microbatches=4", *overrides.split())


def test_other_samples_have_another_key() -> None:
    assert key() != key(shift=1)


@pytest.mark.parametrize("overrides", ["training.steps=7", "optimizer.learning_rate=0.5", "name=other"])
def test_what_is_not_compared_does_not_count(overrides: str) -> None:
    assert key() == key(overrides)


def test_two_microbatches_at_least_are_compared() -> None:
    config = prepared(
        "launcher=local", "device=cpu", "strategy=data", "nodes=2", "data.sequence_length=32"
    ).config
    data: Any = SimpleNamespace(train=Tokens(0))
    run = small_run(config, model=build_small(config), data=data)
    assert run.microbatches == 2


def test_all_that_decides_whether_a_layout_is_right_is_in_the_key() -> None:
    hashed = {path.relative_to(PACKAGE).as_posix() for path in keys._techniques()}
    deciding = (
        "proof/verify.py",
        "proof/small_results.py",
        "strategies/context/ring.py",
        "worker/session.py",
    )
    assert hashed.issuperset(deciding)
    assert {path.split("/")[0] for path in hashed} == set(TECHNIQUES)


SMALL = ("launcher=local", "device=cpu", "data.max_bytes=100000", "model.dim=16", "model.ffn_dim=16",
         "model.heads=4", "model.kv_heads=2", "model.layers=2")  # fmt: skip


@pytest.mark.parametrize(
    ("name", "length", "layout", "mixes"),
    [
        ("LooksBack", 64, "strategy=context", True),
        ("LooksBack", 16, "strategy=context", False),  # no sample reaches 20 positions back
        *in_full([("LooksBack", 64, "strategy=data", False), ("Decided", 64, "strategy=context", False)]),
    ],
)
def test_positions_that_are_mixed_far_apart_are_found(
    name: str, length: int, layout: str, mixes: bool
) -> None:
    words = (*SMALL, layout, "nodes=2", f"model._target_=tests.models.{name}")
    config = prepared(*words, f"data.sequence_length={length}").config
    data = as_data(build(config.data, key="data"))
    model = build_small(config)
    device = torch.device("cpu")
    run = SmallRun.of(config, plan=Plan.of(config), model=model, data=data, device=device)
    assert run.inputs.shape[1] == 16
    assert mixes_positions(run, model) is mixes
