"""A kernel that never ends: seconds to the verdict, what it says, and whether the GPU is free afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests import ROOT, python_path
from tests.gpu.report import setting
from tests.gpu.report.findings import Findings

TITLE, LIMIT_S = "a kernel that never ends", 45.0
HANG_AFTER_S, STEP = 4.0, 3
FREE = "import torch; x = torch.ones(1000, 1000, device='{}'); print(int((x @ x).sum()))"


def run(findings: Findings) -> None:
    device = setting.device().type
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "run")
        command = [
            sys.executable, "-m", "hpc_parallel.run", "strategy=single", "launcher=local", f"device={device}",
            f"run_dir={folder}", f"cluster.hang_timeout_s={HANG_AFTER_S}", "cluster.collective_timeout_s=60",
            "training.steps=10", "training.log_every=1", "training.validate_every=null", "preflight.act=off",
            "data.max_bytes=100000", "data.sequence_length=16", *setting.model_words(),
            f"training.callbacks=[{{_target_: tests.gpu.report.endless.Endless, step: {STEP}}}]",
        ]  # fmt: skip
        began = time.perf_counter()
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": python_path()},
            capture_output=True, text=True, check=False, timeout=LIMIT_S - 10,
        )  # fmt: skip
        findings.add(seconds_to_end=time.perf_counter() - began, returncode=done.returncode)
        failure = folder / "failure.json"
        verdict = json.loads(failure.read_text()) if failure.exists() else {}
        findings.add(
            verdict={key: verdict.get(key) for key in ("kind", "source", "cause", "message", "rank", "step")},
            said=(done.stdout + done.stderr).splitlines()[-8:],
            hang_timeout_s=HANG_AFTER_S,
        )
    free = subprocess.run(
        [sys.executable, "-c", FREE.format(device)], capture_output=True, text=True, check=False, timeout=30
    )
    is_free = free.stdout.strip() == str(10**9)
    findings.add(device_free_after=is_free, error=free.stderr[-300:] or None)
    if verdict.get("kind") != "hang" or not is_free:
        raise RuntimeError("the run should end as a hang, and the device should be free then")
