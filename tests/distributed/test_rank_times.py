"""A rank that is held back by its device, its data or its network is named with the cause."""

from __future__ import annotations

import io
import json
import math
import socket
import time
from contextlib import redirect_stderr
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from hpc_parallel.__main__ import main
from hpc_parallel.commands import status
from hpc_parallel.failure.run_state import RUNNING, State
from hpc_parallel.profiling import links, rank_times
from hpc_parallel.profiling.slow_ranks import Accusations
from hpc_parallel.profiling.timeline import WAIT
from hpc_parallel.record.recorded import read_run
from tests.workers import Workers, train_here


def long_waits(slow: int | None) -> tuple[list[str], list[int]]:
    """Steps that wait longer than they work; exchanges with the rank `slow` take 20 ms more.

    Every rank poses as a host of its own. Returns the line of each slow rank, and the timed steps.
    """
    records: list[dict[str, Any]] = []
    swap, cost = links.swap, rank_times.COST
    rank = dist.get_rank()

    def slow_swap(send: Tensor, receive: Tensor, peer: int) -> None:
        if slow in (rank, peer):
            time.sleep(0.02)
        swap(send, receive, peer)

    times = rank_times.RankTimes(
        on=True, host=f"n{rank}", role=0, device=torch.device("cpu"), profiled=[], expected_s=lambda: 0.0,
        leave_out=lambda seconds: None, device_state=dict, accusations=Accusations([], steps_done=0),
        write=records.append,
    )  # fmt: skip
    rank_times.COST, links.swap = math.inf, slow_swap
    try:
        for step in range(1, 62):
            with times.loading(step):
                pass
            with times.watch(step):
                time.sleep(0.001)
                with record_function(WAIT):
                    time.sleep(0.003)
    finally:
        rank_times.COST, links.swap = cost, swap
    samples = records[-1]["samples"] if records else []
    return [str(each) for each in times.slow], [sample["step"] for sample in samples]


@pytest.mark.timing
@pytest.mark.parametrize("slow", [None, 2])
def test_a_host_with_a_slow_network(slow: int | None, workers: Workers) -> None:
    named = workers.run(3, long_waits, slow)
    lines = [lines for lines, _ in named]
    assert lines[0] == lines[1] == lines[2]
    assert named[0][1] == [20, 40, 60]
    if slow is None:
        assert lines[0] == []
    else:
        (line,) = lines[0]
        assert line.startswith("rank 2 on n2 is slow: network takes ")


THREE = (
    "strategy=data", "nodes=3", "training.steps=62", "training.global_batch_size=3", "training.log_every=62",
    "training.validate_every=null", "training.validation_samples=3", "training.checkpoint_every=null",
    "model.layers=1", "model.dim=32", "model.heads=2", "data.sequence_length=16",
)  # fmt: skip
SLOW = {
    "compute": ("model._target_=tests.models.SlowOnOneRank", "+model.slow_rank=1", "+model.pause_s=0.06"),
    "data": (
        "data=dataset", "data.vocab_size=256", "data.dataset._target_=tests.datasets.SlowOnOneRank",
        "+data.dataset.rank=1", "+data.dataset.pause_s=0.06",
    ),
}  # fmt: skip


def train_in_haste(run_folder: str) -> str:
    """Train with timed steps that need not pay for themselves; returns what the rank prints to its log."""
    printed = io.StringIO()
    with mock.patch.object(rank_times, "COST", math.inf), redirect_stderr(printed):
        train_here(run_folder, {})
    return printed.getvalue()


@pytest.mark.timing
@pytest.mark.parametrize("cause", list(SLOW))
def test_a_slow_rank_is_named_wherever_one_looks(
    cause: str, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    run = workers.prepare(*THREE, *SLOW[cause])
    logs = workers.run(3, train_in_haste, str(run.folder.path))
    summary = json.loads(run.folder.summary.read_text())
    slow = {record["rank"]: record for record in summary["slow_ranks"]}[1]
    assert (slow["rank"], slow["host"], slow["cause"]) == (1, socket.gethostname(), cause)
    samples = json.loads(run.folder.rank_times.read_text())["samples"]
    assert [sample["step"] for sample in samples] == [20, 40, 60]
    extra_s = 0.06 if cause == "data" else 0.0  # one sample of the batch
    for first, second, _ in (sample["ranks"] for sample in samples):
        assert second["data_s"] - first["data_s"] == pytest.approx(extra_s, abs=0.03)
    assert (slow["first_step"], slow["last_step"]) == (60, 60)
    line = slow["line"]
    who = f"rank 1 on {socket.gethostname()} is slow: {cause}"
    assert line.startswith(f"{who} takes ")
    assert f"WARNING: {line}" in logs[0].splitlines()
    assert logs[1:] == ["", ""]
    assert status.row_of(read_run(run.folder.path), State(RUNNING)).reason == who  # of `status`
    assert main(["show", str(run.folder.path)]) == 0
    assert f"{line}, from step 60 to 60" in capsys.readouterr().out
    assert main(["report", str(run.folder.path)]) == 0
    assert f"{line}, from step 60 to 60" in (run.folder.path / "report" / "report.md").read_text()
