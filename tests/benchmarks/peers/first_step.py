"""From the end of the imports to the end of the first step, and where the imports themselves go.

The local launcher forks its ranks after the imports, so the age of rank 0's process at the end of its first
step is what a start takes besides them: the store, the groups, the preflight, the data, the model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from hpc_parallel.training.callbacks import Callback
from tests import ROOT, python_path

STARTS, TARGET_S = 5, 1.0
TOP = 12  # packages that are shown
RUN = (
    "strategy=data", "nodes=2", "launcher=local", "device=cpu", "training.steps=2",
    "training.validate_every=null", "training.checkpoint_every=null", "data.max_bytes=1000000",
)  # fmt: skip
OURS = "import hpc_parallel.worker.main"
BARE = "import torch, torch.distributed; torch.optim.AdamW([torch.zeros(1)])"  # the optimizer imports dynamo


class Clock(Callback):
    """Writes the age of rank 0's process after its first step."""

    def on_start(self, folder: Path, lines: Sequence[Mapping[str, Any]]) -> None:
        self._file = folder / "first_step.json"

    def on_step(self, step: int) -> None:
        if step == 1:
            age_s = time.time() - psutil.Process().create_time()
            self._file.write_text(json.dumps(age_s), encoding="utf-8")


def measure(peers: str, *, starts: int = STARTS) -> dict[str, Any]:
    """One row. Met if the median of the starts is within `TARGET_S`."""
    ages_s = [start_s() for _ in range(starts)]
    own_s, packages_s = imports_s(OURS)
    bare_s, bare_packages_s = imports_s(BARE)
    top = sorted(packages_s.items(), key=lambda item: -item[1])[:TOP]
    more = {name: spent for name, spent in packages_s.items() if name not in bare_packages_s}
    top_more = sorted(more.items(), key=lambda item: -item[1])[:TOP]
    text = (
        f"first step {median(ages_s):.2f} s after imports ({min(ages_s):.2f} to {max(ages_s):.2f}, "
        f"{len(ages_s)} starts; target {TARGET_S} s). Imports {own_s:.2f} s, of a bare loop {bare_s:.2f} s.\n"
        f"  most: {listed(top)}\n  of these not in a bare loop: {listed(top_more)}"
    )
    return {
        "first_step_s": ages_s,
        "imports_s": own_s,
        "bare_imports_s": bare_s,
        "packages_s": packages_s,
        "met": median(ages_s) <= TARGET_S,
        "text": text,
    }


def listed(packages: Sequence[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {spent * 1e3:.0f} ms" for name, spent in packages)


def start_s() -> float:
    """The age of rank 0 at the end of the first step of one start."""
    clock = "training.callbacks=[{_target_: tests.benchmarks.peers.first_step.Clock}]"
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        done = subprocess.run(
            [sys.executable, "-m", "hpc_parallel.run", *RUN, clock, f"run_dir={run}"],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": python_path()},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        age_s: float = json.loads((run / "first_step.json").read_text())
    return age_s


def imports_s(code: str) -> tuple[float, dict[str, float]]:
    """The seconds of all imports of `code`, and by package (two words of a module's name), each once.

    Without CPython's timing they take about a third less; the shares are the same.
    """
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    packages_us: Counter[str] = Counter()
    for line in done.stderr.splitlines():
        if line.startswith("import time:") and line.count("|") == 2 and "self" not in line:
            own, _, name = line.removeprefix("import time:").split("|")
            packages_us[".".join(name.strip().split(".")[:2])] += int(own)
    return sum(packages_us.values()) / 1e6, {name: spent / 1e6 for name, spent in packages_us.items()}
