"""Mixed positions are found at any distance within a sample, and attention is not taken for them."""

from __future__ import annotations

import pytest
import torch

from hpc_parallel.config.build import build
from hpc_parallel.data.dataset import as_data
from hpc_parallel.layout.batch_plan import Plan
from hpc_parallel.proof.position_check import mixes_positions
from hpc_parallel.proof.small_model import SmallRun, build_small
from tests.composed import prepared
from tests.marks import in_full

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
