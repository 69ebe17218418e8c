"""nn.DataParallel's ways: one process, everything through the first device, modules that are copied."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from hpc_parallel.models.layered import SampleIndices
from hpc_parallel.strategies import precision
from hpc_parallel.strategies.dataparallel import ReplicaLocal, Threads, apply
from tests import printed
from tests.parity import COMMON, EXACTNESS, largest_difference
from tests.workers import Train, Workers

SMALL = (*COMMON, "model.layers=2")


def test_transfers_are_counted(workers: Workers) -> None:
    """On CPUs no weight is copied: tokens go out, logits come in, their gradients go out again."""
    words = ("strategy=dataparallel", "gpus_per_node=4", "training.microbatch_size=2", *SMALL)
    trained = workers.train(*words, "training.checkpoint_every=2", "training.keep_last=9")
    summary = trained.summary
    others = 16 * 3 / 4  # samples that are not the first device's
    tokens, logits = 32 * 8, 32 * 256 * 4  # bytes a sample
    assert summary["traffic_bytes"] == others * (tokens + 2 * logits)
    assert summary["busiest_rank_traffic_bytes"] == summary["traffic_bytes"]
    assert summary["layout"]["replicate"] == 4
    resumed = workers.train(*words, resume_from=trained.folder / "checkpoints/step-2").summary
    assert resumed["traffic_bytes"] == summary["traffic_bytes"]  # of a step, whatever an earlier start did


def test_one_process_drives_all_devices(tmp_path: Path) -> None:
    """The command as a user types it."""
    printed(
        "-m", "hpc_parallel.run", "strategy=dataparallel", "gpus_per_node=4", "launcher=local",
        "launcher.snapshot=false", "device=cpu", "run_dir=run", *SMALL, cwd=tmp_path,
    )  # fmt: skip
    logs = sorted(file.name for file in (tmp_path / "run/logs").glob("rank-*"))
    assert logs == ["rank-0.ended.json", "rank-0.err", "rank-0.out"]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["outcome"], summary["world_size"], summary["gpus_per_node"]) == ("completed", 1, 4)


class Net(nn.Module):
    """As much of a LayeredModel as this technique needs."""

    def __init__(self, *, fails_on: float | None = None) -> None:
        super().__init__()
        self.sample_indices = SampleIndices()
        self.norm = nn.BatchNorm1d(3)
        self.fails_on = fails_on

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails_on is not None and bool((x == self.fails_on).any()):
            raise ValueError("this replica can't")
        return self.norm(x)


def test_a_replica_that_fails_keeps_no_other_waiting() -> None:
    runner = apply(Net(fails_on=7.0), degree=4, device=torch.device("cpu"))  # type: ignore[arg-type]
    batch = torch.randn(8, 3)
    assert isinstance(runner, Threads)
    assert runner(batch).shape == (8, 3)
    batch[5, 0] = 7.0
    with pytest.raises(ValueError, match="this replica can't"):
        runner(batch)


def test_replicas_normalise_as_one() -> None:
    """Outputs, gradients and running statistics, which are updated once."""
    torch.manual_seed(0)
    batch = torch.randn(8, 3, dtype=torch.float64) * 3 + 1
    weights = torch.randn(8, 3, dtype=torch.float64)
    whole, net = Net().double(), Net().double()
    runner = apply(net, degree=4, device=torch.device("cpu"))  # type: ignore[arg-type]
    found = []
    for run in (whole, runner):
        x = batch.clone().requires_grad_()
        out = run(x)
        (out * weights).sum().backward()
        found.append((out, x.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], value, rtol=1e-12, atol=1e-12)


class Pair(Net):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return 2 * x, x.sum(1)


def test_an_output_of_several_tensors_is_joined() -> None:
    """And both are counted: a device gets 2 samples of 3 numbers, and sends back 3 numbers and 1 of each."""
    batch = torch.randn(8, 3)
    runner = apply(Pair(), degree=4, device=torch.device("cpu"))  # type: ignore[arg-type]
    for found, expected in zip(runner(batch), Pair()(batch), strict=True):
        torch.testing.assert_close(found, expected)
    back = 2 * (3 + 1) * 4
    traffic = runner.transfers.devices[1]
    assert (traffic.sent_bytes, traffic.received_bytes) == (back, 2 * 3 * 4 + back)


def test_copies_of_a_module_compute_with_their_own_weights() -> None:
    """nn.DataParallel copies modules so for other GPUs: what replaced a forward pass must follow the copy."""
    net = Net()
    precision.apply(net, precision="bfloat16", device_type="cpu")  # type: ignore[arg-type]
    apply(net, degree=2, device=torch.device("cpu"))  # type: ignore[arg-type]
    copy = net._replicate_for_data_parallel()
    copy.norm = net.norm._replicate_for_data_parallel()
    copy.norm.weight, copy.norm.bias = torch.full((3,), 5.0), torch.ones(3)
    batch = torch.randn(64, 3)
    assert net(batch).std().item() == pytest.approx(1, rel=0.02)
    assert copy(batch).std().item() == pytest.approx(5, rel=0.02)
    assert ReplicaLocal().barrier is None


def test_bfloat16_reaches_the_threads(trained: Train) -> None:
    """Autocast is a thread's own: the curve stays near float32's, and is not equal."""
    options = ("strategy=dataparallel", "gpus_per_node=2", "training.precision=bfloat16", "model.layers=2")
    coarse = trained(*COMMON, *options)
    fine = trained(*COMMON, *EXACTNESS["float32"][0], "strategy=single", "model.layers=2")
    assert 1e-6 < largest_difference(coarse.losses, fine.losses) < 2e-2
