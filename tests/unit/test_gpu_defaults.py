"""What is chosen for GPUs if nobody sets it, and what is said if a job's torch finds none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpc_parallel.config.node_devices import default_precision
from hpc_parallel.config.resolve import resolve
from hpc_parallel.models import attention
from hpc_parallel.slurm import limits
from hpc_parallel.slurm.limits import NodeShare, share_of_a_gpu
from hpc_parallel.slurm.records import SlurmNode
from hpc_parallel.worker.main import unused_gpus
from tests.composed import composed, prepared

LISTING = (
    "cpu*|1|128000|1:00|(null)|32\ngpu|1|2048000|1:00|gpu:h100:8|192\n"
    "gpu|1|1024000+|1:00|gpu:h100:4(S:0-1)|64+\nodd|1|9|1:00|gpu:2|x\n"
)


def _values(kind: str, *, device: str = "auto", gpus: bool = True) -> dict[str, Any]:
    return {"device": device, "launcher": {"kind": kind}, "cluster": {"gpus": gpus}}


@pytest.mark.parametrize(
    ("values", "visible", "precision"),
    [
        (_values("slurm"), "", "bfloat16"),
        (_values("slurm", gpus=False), "0,1", "float32"),
        (_values("slurm", device="cpu"), "0", "float32"),
        (_values("local"), "0,1", "bfloat16"),
        (_values("local"), "", "float32"),
        (_values("local", device="cuda"), "", "bfloat16"),
    ],
)
def test_gpus_compute_in_bfloat16(values: dict[str, Any], visible: str, precision: str) -> None:
    assert default_precision(values, environment={"CUDA_VISIBLE_DEVICES": visible}) == precision


@pytest.mark.parametrize(
    ("partition", "gpu_type", "share"),
    [
        # 64 CPUs for 4 GPUs are the fewest; 2,048,000 MB for 8 as many as 1,024,000 MB for 4: 225 GB of 250
        ("gpu", None, NodeShare(16, 225.0)),
        ("gpu", "a100", NodeShare()),
        ("odd", None, NodeShare()),
        (None, None, NodeShare()),  # the default partition has no GPUs
    ],
)
def test_a_device_gets_its_share_of_the_node(
    partition: str | None, gpu_type: str | None, share: NodeShare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_sinfo", lambda minute: LISTING)
    assert share_of_a_gpu(partition=partition, gpu_type=gpu_type) == share


def test_the_share_leaves_out_what_the_site_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """sinfo counts cores and memory that no job can have; scontrol says what the least node has."""
    listing = "gpu*|3|800000+|1:00|gpu:4|64+|g[1-3]\nold|1|400000|1:00|gpu:4|64|h1\n"
    nodes = [SlurmNode("g1", 64, 900_000, {}, ()), SlurmNode("g2", 56, 796_000, {}, ())]
    monkeypatch.setattr(limits, "_sinfo", lambda minute: listing)
    monkeypatch.setattr(limits, "_nodes", lambda minute: {node.name: node for node in nodes})
    assert share_of_a_gpu(partition=None, gpu_type=None) == NodeShare(14, 796_000 * 9 // 10 // 4 // 1024)
    assert share_of_a_gpu(partition="old", gpu_type=None).cpus == 16  # scontrol does not show it
    most = limits.limits(partition="gpu")
    assert (most.cpus, most.memory_mb, most.nodes) == (64, 900_000, 3)  # of the largest node
    monkeypatch.setattr(limits, "_sinfo", lambda minute: "gpu*|1|800000|1:00|gpu:4|64|g2\n")
    assert limits.limits(partition=None) == limits.Limits(1, 796_000, 1, 4, 56)


def test_a_job_asks_for_the_share_of_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_sinfo", lambda minute: LISTING)
    job = ("launcher=script", "launcher.partition=gpu", "gpus_per_node=2")
    run = prepared(*job)
    assert (run.config.launcher.cpus_per_device, run.config.launcher.memory_gb) == (16, 450)
    assert run.config.training.precision == "bfloat16"
    stated = prepared(*job, "cluster.cpus_per_device=3", "training.precision=float32")
    assert (stated.config.launcher.cpus_per_device, stated.config.launcher.memory_gb) == (3, None)
    assert stated.config.training.precision == "float32"
    own_memory = prepared(*job, "+launcher.extra.mem-per-gpu=9G")
    assert (own_memory.config.launcher.cpus_per_device, own_memory.config.launcher.memory_gb) == (16, None)
    local = prepared("launcher=local", "device=cpu")
    assert (local.config.launcher.cpus_per_device, local.config.training.precision) == (1, "float32")


def test_heads_are_expanded_where_no_kernel_groups_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 on a GPU; autocast decides, not the tensors' own dtype."""
    assert not attention.has_groups("cuda", torch.float32)
    assert attention.has_groups("cuda", torch.bfloat16)
    assert attention.has_groups("cpu", torch.float32)
    query, key, value = (torch.randn(2, heads, 5, 8, requires_grad=True) for heads in (6, 2, 2))
    grouped = attention.attend(query, key, value, causal=True)
    wanted = torch.autograd.grad(grouped.square().sum(), (query, key, value))
    asked = []
    monkeypatch.setattr(attention, "has_groups", lambda kind, dtype: asked.append(dtype))
    expanded = attention.attend(query, key, value, causal=True)
    torch.testing.assert_close(expanded, grouped)
    torch.testing.assert_close(torch.autograd.grad(expanded.square().sum(), (query, key, value)), wanted)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        attention.attend(query, key, value, causal=True)
    assert asked == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(
    ("words", "device", "said"),
    [
        (("launcher=slurm",), "cpu", "finds none on n7: this run uses the CPU, in bfloat16"),
        (("launcher=slurm", "training.precision=float32"), "cpu", "this run uses the CPU, in float32"),
        (("launcher=slurm",), "cuda:0", None),
        (("launcher=slurm", "device=cpu"), "cpu", None),
        (("launcher=slurm", "cluster=cpu"), "cpu", None),
        (("launcher=local",), "cpu", None),
    ],
)
def test_it_is_said_where_gpus_were_asked_for(words: tuple[str, ...], device: str, said: str | None) -> None:
    config, *_ = resolve(composed("strategy=single", *words))
    problem = unused_gpus(config, torch.device(device), host="n7")
    assert (problem is None) == (said is None)
    assert said is None or (problem is not None and said in problem)
