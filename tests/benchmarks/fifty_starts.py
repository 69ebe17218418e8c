"""Fifty starts of a four-rank local run in a row, with others starting beside them.

    python tests/benchmarks/fifty_starts.py

Prints how many ended well, the distinct ports they took, the processes left over and the median time of one
start. Each is the whole command, so this takes some minutes; the suite has a quicker one with warm ranks.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

STARTS = 50
SMALL = (
    "training.steps=2", "training.validate_every=null", "data.max_bytes=100000", "data.sequence_length=16",
    "model.dim=32", "model.ffn_dim=64", "optimizer.warmup_steps=0",
)  # fmt: skip


def start(folder: Path, name: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "hpc_parallel.run", "strategy=data", "nodes=2", "gpus_per_node=2"]
    words = ["launcher=local", f"run_dir={folder / name}", *SMALL]
    return subprocess.Popen([*command, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        codes, times = [], []
        for number in range(STARTS):
            beside = start(folder, f"beside-{number}")
            began = time.perf_counter()
            codes.append(start(folder, f"run-{number}").wait())
            times.append(time.perf_counter() - began)
            codes.append(beside.wait())
        ports = [json.loads(file.read_text())["port"] for file in folder.glob("*/rendezvous/*.json")]
        left = [
            p.pid
            for p in psutil.process_iter(["cmdline"])
            if str(folder) in " ".join(p.info["cmdline"] or [])
        ]
    print(f"{len(codes)} starts of 4 ranks, two at a time: {codes.count(0)} ended well")
    print(f"{len(ports)} ports, {len(set(ports))} distinct; {len(left)} processes left over")
    print(f"one start beside another: median {statistics.median(times):.1f} s from Enter to the end")


if __name__ == "__main__":
    main()
