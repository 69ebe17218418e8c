"""A rank that is harmed, over NCCL: who is named, after how long, and whether the run goes on.

Each run has one harm at step 25 of rank 1, saves at each tenth step, and may restart once. It must name
rank 1 within `HANG_S` + `MORE_S` of the harm, leave no process, and end with the loss of a run without harm.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from hpc_parallel.record.run_folder import RunFolder
from tests import ROOT, python_path
from tests.gpu.report import setting
from tests.gpu.report.findings import Findings

TITLE, LIMIT_S = "a rank that is harmed", 420.0
HANG_S, MORE_S, BESIDE = 15.0, 30.0, 6
OWN = "own script"
STRATEGIES = {
    "data": ("nodes=2",), "fsdp": ("nodes=2",), "tensor": ("nodes=2",), "pipeline": ("nodes=2",),
    "hybrid": ("nodes=2", "gpus_per_node=2"),
}  # fmt: skip
HARMS = ("SIGKILL", "SIGSTOP", "kernel", "kernel, waits", "sleep", "raise")
ENDS = {"raise": "failed"}  # an error of a user's code comes again, so the run does not restart
EQUAL = 1e-4  # of final losses, relative
VERDICT = re.compile(r"rank (\d+) on \S+ failed first: (.*)")


def run(findings: Findings) -> None:
    targets, harms = setting.sized(([*STRATEGIES, OWN], HARMS), (["data", OWN], ("SIGKILL", "sleep")))
    wrong = []

    def case(target: str, how: str, *, loss: float | None = None) -> float | None:
        row = harmed(target, how, here=Path(scratch))
        problems = problems_of(row, how=how, loss=loss)
        findings.add(**{f"{target}, {how or 'not harmed'}": row | {"problems": problems}})
        wrong.extend(f"{target}, {how}: {problem}" for problem in problems)
        return row["final_loss"]

    with (
        tempfile.TemporaryDirectory() as scratch,
        ThreadPoolExecutor(setting.sized(BESIDE, 1)) as beside,
    ):
        unharmed = {name: beside.submit(case, name, "") for name in ("data", OWN)}
        losses = {name: future.result() for name, future in unharmed.items()}
        for how in harms:
            for target in targets:
                beside.submit(case, target, how, loss=losses.get(target, losses["data"]))
    findings.add(device_free_after=is_free())
    if wrong or not is_free():
        raise RuntimeError("\n".join(wrong) or "the device is not free")


def problems_of(row: dict[str, Any], *, how: str, loss: float | None) -> list[str]:
    """What of a run is not as it should be."""
    problems = [f"{len(row['left'])} processes are left"] if row["left"] else []
    if row["outcome"] != ENDS.get(how, "completed"):
        problems.append(f"ended as {row['outcome']}")
    elif loss is not None and how not in ENDS and abs(row["final_loss"] - loss) > EQUAL * abs(loss):
        problems.append(f"final loss {row['final_loss']}, not {loss}")
    if how and row["rank"] != 1:
        problems.append(f"named rank {row['rank']}: {row['message']}")
    if how and not (row["named_after_s"] or 1e9) <= HANG_S + MORE_S:
        problems.append(f"named after {row['named_after_s']} s")
    return problems


def harmed(target: str, how: str, *, here: Path) -> dict[str, Any]:
    """Run one case to its end. `how`: empty for no harm."""
    folder = here / f"{target} {how} run".replace(" ", "-").replace(",", "")
    mark = folder.with_suffix(".mark")
    done = subprocess.run(
        [sys.executable, "-m", "hpc_parallel.run", *words(target, how, folder=folder, mark=mark)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    run = RunFolder(folder)
    summary = json.loads(run.summary.read_text()) if run.summary.exists() else {}
    verdicts = VERDICT.findall((run.logs / "agent.err").read_text() + done.stdout)
    rank, message = verdicts[0] if verdicts else (None, None)
    ended = [
        line["ended"] for line in map(json.loads, run.attempts.read_text().splitlines()) if "ended" in line
    ]
    return {
        "rank": rank and int(rank), "message": message, "last": verdicts[1:], "left": left(folder),
        "named_after_s": seconds_to(ended[0], mark) if ended and mark.exists() else None,
        "outcome": summary.get("outcome", done.stderr[-300:]),
        "restarts": summary.get("restarts"), "final_loss": summary.get("final_loss"),
    }  # fmt: skip


def seconds_to(moment: str, mark: Path) -> float:
    """From the harm to a moment in ISO 8601."""
    return datetime.fromisoformat(moment).timestamp() - mark.stat().st_mtime


def words(target: str, how: str, *, folder: Path, mark: Path) -> Sequence[str]:
    """The command line of a case."""
    fixed = (
        f"run_dir={folder}", "launcher=local", f"cluster.hang_timeout_s={HANG_S}", "launcher.max_restarts=1",
    )  # fmt: skip
    if target == OWN:
        script = Path(__file__).with_name("own_training.py")
        return (*fixed, "nodes=2", "--", str(script), how, str(mark))
    data = (
        "data._target_=tests.harmed_data.HarmedData", "+data.rank=1", "+data.step=25",
        f"+data.how='{how}'", f"+data.mark='{mark}'",
    )  # fmt: skip
    return (
        *fixed, f"strategy={target}", *STRATEGIES[target], f"device={setting.device().type}",
        "model=tiny", "model.layers=4", "model.dim=64", "data.sequence_length=32", "data.max_bytes=200000",
        "training.steps=40", "training.checkpoint_every=10", "training.checkpoint_async=false",
        "training.precision=float32", "strategy.verify=never", "launcher.check_imports=false",
        *(data if how else ()),
    )  # fmt: skip


def left(folder: Path) -> list[int]:
    """Processes that name the run folder in their command line or write to its logs."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(folder) in text for text in (*process.cmdline(), *map(str, process.open_files()))):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def is_free() -> bool:
    """Whether no process but this one holds memory of the device."""
    if not setting.on_gpu():
        return True
    free, total = torch.cuda.mem_get_info()
    return total - free < 2**30
