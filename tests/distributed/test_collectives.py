"""`task=collectives` on real ranks: each collective is proven, timed and counted as nccl-tests counts."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml

from hpc_parallel.config.command_line import CommandLine
from hpc_parallel.launch.checked_run import checked_run
from hpc_parallel.launch.run_files import write
from hpc_parallel.measure.collectives import FEW_BATCHES, Bench, group_of
from hpc_parallel.record.metrics_file import MetricsReader
from hpc_parallel.record.run_folder import RunFolder
from tests.workers import Workers, do_here

FACTORS = {  # of nccl-tests (PERFORMANCE.md), by the number of ranks
    "all_reduce": {4: 1.5, 2: 1.0},
    "all_gather": {4: 0.75, 2: 0.5},
    "reduce_scatter": {4: 0.75, 2: 0.5},
    "broadcast": {4: 1.0, 2: 1.0},
    "reduce": {4: 1.0, 2: 1.0},
    "all_to_all": {4: 0.75, 2: 0.5},
    "send_recv": {4: 1.0, 2: 1.0},
    "barrier": {4: 0.0, 2: 0.0},
}


TWO_BY_TWO = ("task=collectives", "strategy=fsdp", "nodes=2", "gpus_per_node=2", "strategy.replicate=2",
              "strategy.shard=2")  # fmt: skip


def test_all_are_measured_in_every_group(workers: Workers) -> None:
    folder = workers.do(*TWO_BY_TWO, "task.min_bytes=4096", "task.max_bytes=4096", "task.seconds=0.001")
    content = json.loads((folder / "collectives.json").read_text())
    first = content["sum"]
    assert (first["size_bytes"], first["ranks"], first["dtype"]) == (4 * 2**20, 4, "float32")
    rows = content["rows"]
    # The axes of the mesh have the ranks of a node and of all nodes, so they are names of these groups.
    groups = {row["group"]: row["ranks"] for row in rows}
    assert groups == {"world": 4, "inside a node": 2, "across nodes": 2}
    names = {"world": [], "inside a node": ["axis shard"], "across nodes": ["axis replicate"]}
    assert {row["group"]: row["also"] for row in rows} == names
    assert len(rows) == 3 * (7 * 2 + 1)  # the smallest size is measured in any case
    assert content["left_out"] is None
    for row in rows:
        assert row["busbw_bytes_per_s"] == pytest.approx(
            row["size_bytes"] / row["time_s"] * FACTORS[row["operation"]][row["ranks"]]
        )
        assert row["operation"] == "barrier" or row["size_bytes"] == 4096
        slices = row["ranks"] if row["operation"] in ("all_gather", "reduce_scatter", "all_to_all") else 1
        width = {"float32": 4, "bfloat16": 2}[row["dtype"]]
        assert row["count"] * width * slices == row["size_bytes"]
        assert row["redop"] == ("sum" if "reduce" in row["operation"] else "none")
        assert row["rounds"] >= FEW_BATCHES  # at least 8, but for a row whose first round is slow
    profile = yaml.safe_load((folder / "machine.yaml").read_text())["collectives"]
    assert {name: group.get("also", []) for name, group in profile.items()} == names


def test_axes_that_are_no_nodes_have_groups_of_their_own(workers: Workers) -> None:
    folder = workers.do(
        "task=collectives", "nodes=1", "gpus_per_node=4", "strategy=hybrid", "strategy.pipeline=2",
        "strategy.tensor=2", "task.operations=[all_reduce]", "task.dtypes=[float32]", "task.max_bytes=8",
        "task.seconds=0.001",
    )  # fmt: skip
    rows = json.loads((folder / "collectives.json").read_text())["rows"]
    assert {row["group"]: row["ranks"] for row in rows} == {"world": 4, "axis pipeline": 2, "axis tensor": 2}


def measured_with(broken: str, replacement: Callable[..., None]) -> str:
    """The error of a rank whose torch does `replacement` in place of one collective."""
    original = getattr(dist, broken)
    if dist.get_rank() == 1:
        setattr(dist, broken, replacement)
    try:
        bench = Bench(device=torch.device("cpu"), seconds=0.001)
        world = dist.group.WORLD
        assert world is not None
        bench.measure(broken, group=("world", group_of(world)), dtype=torch.float32, size_bytes=64)
    except RuntimeError as error:
        return str(error)
    finally:
        setattr(dist, broken, original)
    return "no error"


def reduced_wrongly(array: torch.Tensor, *, group: dist.ProcessGroup) -> None:
    dist.distributed_c10d.all_reduce(array, group=group)
    array[3] += 1


def test_a_wrong_value_on_one_rank_stops_all(workers: Workers) -> None:
    messages = workers.run(2, measured_with, "all_reduce", reduced_wrongly)
    assert messages == ["all_reduce of 64 bytes of float32, world: rank 1 got wrong values"] * 2


def test_a_run_is_compared_with_the_profile_of_another(workers: Workers, tmp_path: Path) -> None:
    words = ("task=collectives", "strategy=data", "gpus_per_node=2", "task.operations=[all_reduce]",
             "task.max_bytes=65536", "task.factor=8192", "task.seconds=60")  # fmt: skip
    good = workers.do(*words)
    profiles = tmp_path / "site" / "machine"
    profiles.mkdir(parents=True)
    shutil.copy(good / "machine.yaml", profiles / "good.yaml")
    run = checked_run(CommandLine.parse([
        f"--config-dir={tmp_path / 'site'}", *words, "machine=good", "launcher=local", "device=cpu",
        "launcher.snapshot=false", f"run_dir={tmp_path / 'run'}",
    ]))  # fmt: skip
    write(run)
    workers.run(run.processes, do_here, str(run.folder.path))
    fit = yaml.safe_load((good / "machine.yaml").read_text())["collectives"]["world"]["all_reduce"]
    rows = json.loads(run.folder.collectives.read_text())["rows"]
    assert [(row["dtype"], row["size_bytes"]) for row in rows] == [
        (dtype, size) for dtype in ("float32", "bfloat16") for size in (8, 65536)
    ]
    per_byte_s = 1 / fit["bandwidth_bytes_per_s"] if fit["bandwidth_bytes_per_s"] else 0
    expected = [fit["latency_s"] + size * per_byte_s for size in (8, 65536)]  # two ranks: factor 1
    assert [row["predicted_s"] for row in rows] == pytest.approx([*expected, None, None])


def test_ctrl_c_keeps_the_rows_that_are_done(tmp_path: Path) -> None:
    words = ["task=collectives", "gpus_per_node=2", "strategy=data", "device=cpu", "launcher=local",
             "launcher.snapshot=false", "task.seconds=3600", f"run_dir={tmp_path / 'run'}"]  # fmt: skip
    folder = RunFolder(tmp_path / "run")
    command = subprocess.Popen(
        [sys.executable, "-m", "hpc_parallel.run", *words], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}, cwd=tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert command.stdout
    shown = []
    for line in command.stdout:
        shown.append(line.rstrip())
        if re.match(r" *3/183 ", line):
            command.send_signal(signal.SIGINT)
    assert command.wait() == 1
    metrics = MetricsReader(folder.metrics).read()
    assert 3 <= len(metrics) < 183
    content = json.loads(folder.collectives.read_text())
    measured = [(row["operation"], row["dtype"], row["time_s"]) for row in metrics]
    assert sorted((row["operation"], row["dtype"], row["time_s"]) for row in content["rows"]) == sorted(
        measured
    )
    missing = 183 - len(metrics)
    assert re.fullmatch(rf"left out: {missing} of 183 rows: stopped by SIG(INT|TERM)", content["left_out"])
    assert (folder.machine.exists(), folder.collectives_table.exists()) == (True, True)
    assert json.loads(folder.summary.read_text())["outcome"] == "cancelled"
    assert shown[-1] == f"cancelled by Ctrl-C: {len(metrics)} of 183 rows are kept"
    assert not folder.failure.exists()
