"""Every strategy on an NVIDIA GPU: alone over NCCL, and two ranks that share it over gloo, against one rank.

Needs torch, numpy, hydra-core, submitit, psutil, pyyaml, jinja2, rich, xxhash, pytest; nothing is installed:

    python -m pytest tests/gpu -q -rs

HPC_PARALLEL_TEST_DEVICE=cpu runs the same on a machine without one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hpc_parallel.config.places import find_folder
from tests import python_path

DEVICE = os.environ.get("HPC_PARALLEL_TEST_DEVICE", "cuda")
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
NETS = {"tile": IMAGES, "expert": EXPERTS}
# What needs more than nodes=2 to be two ranks, or to be without sends.
TWO = {
    "hsdp": ("gpus_per_node=2",),
    "hybrid": ("gpus_per_node=2",),
    "context": ("nodes=2", "strategy.context_attention=gather"),
}
# torch's table of backends denies gloo everything of a GPU's but all_reduce and broadcast.
BEYOND_GLOO = {"pipeline": "sends from rank to rank", "model": "sends from rank to rank"} | dict.fromkeys(
    ("expert", "fsdp", "hsdp", "hybrid", "tensor"), "gathers and scatters tensors"
)


def prove(strategy: str, *layout: str, here: Path) -> tuple[dict[str, float], set[str]]:
    """Largest relative differences from one rank on the same GPU; and the devices that ranks ran on."""
    net = NETS.get(strategy, TEXT)
    words = (f"strategy={strategy}", *layout, *net, f"device={DEVICE}", "run_dir=proof")
    done = subprocess.run(
        [sys.executable, "-m", "hpc_parallel", "parity", *words],
        cwd=here, env={**os.environ, "PYTHONPATH": python_path(), "CUDA_VISIBLE_DEVICES": "0"},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads((here / "proof/parity.json").read_text())["rows"]
    (folder,) = (here / "proof").glob("01-*")
    ranks = json.loads((folder / "environment.json").read_text())["ranks"]
    return {name: found["value"] for name, found in row["differences"].items()}, {r["device"] for r in ranks}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_over_nccl(strategy: str, tmp_path: Path) -> None:
    if strategy == "parameter_server":
        pytest.skip("a server without workers serves nobody")
    layout = () if strategy == "single" else ("nodes=1", "gpus_per_node=1")
    differences, devices = prove(strategy, *layout, here=tmp_path)
    assert differences["losses"] <= 1e-5
    assert devices == {"cuda:0" if DEVICE == "cuda" else "cpu"}


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name not in ("single", "dataparallel")])
def test_two_ranks_share_a_gpu_over_gloo(strategy: str, tmp_path: Path) -> None:
    if DEVICE == "cuda" and strategy in BEYOND_GLOO:
        pytest.skip(f"{strategy} {BEYOND_GLOO[strategy]}, which gloo can't do on a GPU")
    differences, devices = prove(strategy, *TWO.get(strategy, ("nodes=2",)), here=tmp_path)
    assert differences["losses"] <= 1e-5
    assert devices == {"cuda:0" if DEVICE == "cuda" else "cpu"}


@pytest.mark.skipif(DEVICE != "cuda", reason="of a GPU alone")
@pytest.mark.parametrize("strategy", ["pipeline", "fsdp"])
def test_what_gloo_lacks_on_a_shared_gpu_is_refused_with_its_reason(strategy: str, tmp_path: Path) -> None:
    words = (f"strategy={strategy}", "nodes=2", *TEXT, "device=cuda")
    done = subprocess.run(
        [sys.executable, "-m", "hpc_parallel", "parity", *words],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": python_path(), "CUDA_VISIBLE_DEVICES": "0"},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 1
    assert BEYOND_GLOO[strategy] in " ".join(done.stdout.split())
