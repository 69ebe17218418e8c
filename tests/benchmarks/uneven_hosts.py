"""Throughput with a host of half speed on a real Slurm: with shares against equal shares.

python tests/benchmarks/uneven_hosts.py [ROUNDS]

Each of two hosts has one core of this machine. On the core of the slow one a real-time process runs half of
each 2 ms, so that its ranks have half a core, and those of the other host never run there. All kinds of runs
take turns; each figure is the median over the rounds. The losses of all must be equal.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/slurm")]

from cluster import Cluster  # noqa: E402

from tests.parity import largest_difference  # noqa: E402

FAST, SLOW = "n2", "n3"
WORDS = (
    "nodes=2", "launcher.exclude='n1,n4'", "launcher.wait=true", "preflight.act=off", "training.steps=10",
    "training.log_every=2", "training.global_batch_size=24", "training.measure_steps=0",
    "training.validate_every=null", "training.checkpoint_every=null", "data.max_bytes=300000",
    "data.sequence_length=256", "model.layers=12", "model.dim=128", "model.ffn_dim=320",
    "optimizer.learning_rate=1e-4",
)  # fmt: skip
SHARES = ("null", "[2,1]", "measured")
HALF = """
import os, time
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
while True:
    end = time.perf_counter() + 0.001
    while time.perf_counter() < end:
        pass
    time.sleep(0.001)
"""


@contextmanager
def half_speed(cluster: Cluster) -> Iterator[None]:
    """One core for each host, and half of it for SLOW."""
    cores = sorted(os.sched_getaffinity(0))
    bind(cluster, FAST, {cores[0]})
    bind(cluster, SLOW, {cores[1]})
    with subprocess.Popen([sys.executable, "-c", HALF]) as other:
        os.sched_setaffinity(other.pid, {cores[1]})
        try:
            yield
        finally:
            other.kill()


def bind(cluster: Cluster, host: str, cores: set[int]) -> None:
    """The threads of slurmd there, from which all processes of later jobs inherit it."""
    for pid in cluster.pids(host):
        with suppress(ProcessLookupError, FileNotFoundError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), cores)


def trained(cluster: Cluster, folder: Path, *words: str) -> tuple[dict[str, Any], list[float]]:
    """The summary and the losses of one run."""
    run = [sys.executable, "-m", "hpc_parallel.run", *WORDS, *words, f"run_dir={folder}"]
    environment = {**os.environ, **cluster.environment}
    subprocess.run(run, cwd=folder.parent, env=environment, check=True, capture_output=True)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return json.loads((folder / "summary.json").read_text()), [json.loads(line)["loss"] for line in lines]


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    with tempfile.TemporaryDirectory() as temporary, Cluster.start() as cluster, half_speed(cluster):
        for strategy in ("data", "pipeline"):
            rates: dict[str, list[float]] = {shares: [] for shares in SHARES}
            curves = []
            for number in range(rounds):
                for at, shares in enumerate(SHARES):
                    folder = Path(temporary) / f"{strategy}-{number}-{at}"
                    words = (f"strategy={strategy}", f"strategy.shares={shares}")
                    summary, losses = trained(cluster, folder, *words)
                    rates[shares].append(summary["samples_per_s"])
                    curves.append(losses)
            equal = median(rates["null"])
            for shares, by_round in rates.items():
                shown = ", ".join(f"{rate:.1f}" for rate in by_round)
                ratio = median(by_round) / equal
                print(f"{strategy}, shares {shares}: {shown} samples/s; {ratio:.2f} of equal", flush=True)
            difference = max(largest_difference(curve, curves[0]) for curve in curves)
            assert difference < 1e-4, difference  # float32


if __name__ == "__main__":
    main()
