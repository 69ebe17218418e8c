"""Every strategy on an NVIDIA GPU over NCCL: one rank, and two and four ranks that share it, against one.

Needs torch, numpy, hydra-core, submitit, psutil, pyyaml, jinja2, rich, xxhash, safetensors, pytest;
nothing is installed:

    python -m pytest tests/gpu -q -rs

HPC_PARALLEL_TEST_DEVICE=cpu runs the same on a machine without one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_parallel.config.places import find_folder
from tests import printed

DEVICE = os.environ.get("HPC_PARALLEL_TEST_DEVICE", "cuda")
PLACE = "cuda:0" if DEVICE == "cuda" else "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(), reason="there is no NVIDIA GPU on this machine"
    ),
]

FILES = (find_folder("conf") / "strategy").glob("*.yaml")
STRATEGIES = sorted({file.stem for file in FILES} - {"auto"})  # it chooses one of the others
TEXT = ("model=tiny", "model.layers=4", "model.dim=64", "data.sequence_length=32", "data.max_bytes=200000")
IMAGES = ("model=segmenter", "model.channels=[8,12,16]", "data=cells", "data.samples=64",
          "data.height=32", "data.width=48")  # fmt: skip
EXPERTS = ("model=moe_tiny", *TEXT[1:])
NETS = {"tile": IMAGES, "expert": EXPERTS, "tensor": (*TEXT, "model.kv_heads=4")}
LAYOUTS = {
    ("hsdp", 2): ("gpus_per_node=2",), ("hsdp", 4): ("nodes=2", "gpus_per_node=2"),
    ("hybrid", 2): ("gpus_per_node=2",), ("hybrid", 4): ("nodes=2", "gpus_per_node=2"),
    ("parameter_server", 4): ("nodes=4", "training.global_batch_size=12"),  # three of them train
}  # fmt: skip


def prove(strategy: str, *layout: str, here: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """Largest relative differences from one rank on the same GPU; and what `environment.json` says."""
    net = NETS.get(strategy, TEXT)
    words = (f"strategy={strategy}", *layout, *net, f"device={DEVICE}", "run_dir=proof")
    printed("-m", "hpc_parallel", "parity", *words, cwd=here, CUDA_VISIBLE_DEVICES="0")
    (row,) = json.loads((here / "proof/parity.json").read_text())["rows"]
    (folder,) = (here / "proof").glob("01-*")
    environment = json.loads((folder / "environment.json").read_text())
    return {name: found["value"] for name, found in row["differences"].items()}, environment


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_over_nccl(strategy: str, tmp_path: Path) -> None:
    if strategy == "parameter_server":
        pytest.skip("a server without workers serves nobody")
    layout = () if strategy == "single" else ("nodes=1", "gpus_per_node=1")
    differences, environment = prove(strategy, *layout, here=tmp_path)
    assert differences["losses"] <= 1e-5
    assert {rank["device"] for rank in environment["ranks"]} == {PLACE}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name not in ("single", "dataparallel")])
def test_ranks_share_a_gpu_over_nccl(strategy: str, ranks: int, tmp_path: Path) -> None:
    layout = LAYOUTS.get((strategy, ranks), (f"nodes={ranks}",))
    differences, environment = prove(strategy, *layout, here=tmp_path)
    assert differences["losses"] <= 1e-5
    assert [rank["device"] for rank in environment["ranks"]] == [PLACE] * ranks
    assert environment["transport"].get("library") == ("NCCL" if DEVICE == "cuda" else None)
