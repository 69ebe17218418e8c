"""A study on a real Slurm whose links are slow: its report says what physics says."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from cluster import Cluster
from test_jobs import Site

pytestmark = pytest.mark.slurm

GRADIENTS_BYTES = 4 * (256 * 128 + 4 * (128 * 128 * 3 + 3 * 128 * 344 + 2 * 128) + 128)  # of model=tiny


@pytest.mark.full
@pytest.mark.timing
def test_over_slow_links_tensor_loses_to_data_with_accumulation(cluster: Cluster, tmp_path: Path) -> None:
    site = Site(cluster, tmp_path)
    words = ("jobs=compare_strategies", "strategy=data,tensor", "sweep.also=[]", "nodes=2",
             "model=tiny", "training.precision=float32", "training.steps=8", "training.measure_steps=3",
             "sweep.parallelism=1", "sweep.wait=true", "hydra.sweep.dir=study")  # fmt: skip
    cluster.shape("50mbit")
    try:
        done = site.run("-m", *words, timeout_s=300)
    finally:
        cluster.unshape()
    assert done.returncode == 0, done.stdout + done.stderr
    subprocess.run([sys.executable, "-m", "hpc_parallel", "report", "study"], cwd=tmp_path, check=True)
    with (tmp_path / "study" / "report" / "report.csv").open() as file:
        found = {row["strategy"]: row for row in csv.DictReader(file)}
    data, tensor = found["data"], found["tensor"]
    # A ring over two devices sends the gradients once from each, and once a step, whatever the microbatches.
    assert float(data["traffic_bytes"]) == pytest.approx(2 * GRADIENTS_BYTES, rel=0.01)
    assert float(tensor["traffic_bytes"]) > 4 * float(data["traffic_bytes"])
    # A rank's traffic is half out and half in, and its link carries both at once.
    wire_s = {name: float(row["busiest_rank_traffic_bytes"]) / 2 * 8 / 50e6 for name, row in found.items()}
    assert float(tensor["step_time_s"]) > 0.8 * wire_s["tensor"] > wire_s["data"]
    assert float(tensor["samples_per_s"]) < 0.5 * float(data["samples_per_s"])
    # Seconds, not shares: `tensor` computes longer too, in many small pieces, so its share can be the lesser.
    exposed_s = {
        name: float(row["exposed_communication_share"]) * float(row["step_time_s"])
        for name, row in found.items()
    }
    assert exposed_s["tensor"] > 2 * exposed_s["data"] > wire_s["data"]


@pytest.mark.full
@pytest.mark.timing
def test_collectives_find_the_rate_of_the_links(cluster: Cluster, tmp_path: Path) -> None:
    """An all-reduce of two hosts over 1 Gbit/s: 0.125 GB/s less what TCP and gloo take."""
    site = Site(cluster, tmp_path)
    words = ("task=collectives", "nodes=2", "task.operations=[all_reduce]", "task.dtypes=[float32]",
             "task.max_bytes=33554432", "task.seconds=60", "launcher.wait=true", "run_dir=links")  # fmt: skip
    cluster.shape("1gbit", burst="128k")  # a small burst: what passes in it is faster than the wire
    try:
        done = site.run(*words, timeout_s=200)
    finally:
        cluster.unshape()
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "links" / "collectives.json").read_text())["rows"]
    assert {row["group"] for row in rows} == {"world"}
    largest = max(rows, key=lambda row: row["size_bytes"])
    assert largest["size_bytes"] == 2**25
    assert 0.105e9 <= largest["busbw_bytes_per_s"] <= 0.125e9
    fitted = yaml.safe_load((tmp_path / "links" / "machine.yaml").read_text())["collectives"]["world"]
    assert fitted["all_reduce"]["bandwidth_bytes_per_s"] == pytest.approx(0.12e9, rel=0.2)
