"""Fifty faults in one run: the curve of one device, and the useful share that the times of its parts give."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from statistics import median

import psutil
import pytest
from chaos import EQUAL, TRAINING, Row
from test_jobs import read

from tests.parity import largest_difference
from tests.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.chaos, pytest.mark.chaos_slow, pytest.mark.timeout(7200)]

STEPS, FAULTS, PAUSE_S, POINTS = 2000, 50, 0.03, 0.05
WORDS = (
    *(word for word in TRAINING if not word.startswith("training.steps=")),
    f"training.steps={STEPS}",
    "strategy.verify=never",
)
RUN = (
    "strategy=data", "nodes=2", "launcher=local", f"launcher.max_restarts={FAULTS}", "run_dir=run",
    "cluster.hang_timeout_s=8", "model._target_=tests.models.Slow", f"+model.pause_s={PAUSE_S}",
)  # fmt: skip


def test_fifty_faults(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """On this machine, because on a cluster a host that fails twice is left out."""
    seed = int(os.environ.get("CHAOS_SEED", "") or int.from_bytes(os.urandom(3)))
    row, dice, folder = Row(seed), Random(seed), tmp_path / "run"
    record_property("chaos", vars(row))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    command = [sys.executable, "-m", "hpc_parallel.run", *WORDS, *RUN]
    with (tmp_path / "told").open("w") as told:
        running = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=told, stderr=told)
    stood_s = [harm(folder, dice, row) for _ in range(FAULTS)]
    assert running.wait() == 0, (tmp_path / "told").read_text()

    summary, lines = read(folder, "summary.json"), lines_of(folder)
    row.restarts, row.lost = summary["restarts"], summary["lost_steps"]
    assert (summary["outcome"], summary["restarts"]) == ("completed", FAULTS)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    alone = [*command[:3], *WORDS, "strategy=single", "launcher=local", "run_dir=alone"]
    subprocess.run(alone, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    curves = [[line["loss"] for line in of_run] for of_run in (lines, lines_of(tmp_path / "alone"))]
    assert largest_difference(*curves) < EQUAL

    step_s, use = median(line["step_time_s"] for line in lines), summary["time_use_s"]
    useful_s, repeated_s = STEPS * step_s, summary["lost_steps"] * step_s
    lost_s = repeated_s + sum(stood_s) + use["saving"] + use["start"] / (FAULTS + 1)
    expected = useful_s / (useful_s + lost_s)
    row.done.append(f"useful {summary['useful_share']:.1%}, expected {expected:.1%}")
    assert abs(summary["useful_share"] - expected) < POINTS


def harm(folder: Path, dice: Random, row: Row) -> float:
    """Kill or stop a rank some steps later; the seconds until a step that the next start computed."""
    goal = step_of(folder) + dice.randint(2, STEPS // FAULTS - 5)
    wait_for(lambda: step_of(folder) >= goal)
    rank, number = dice.randrange(2), dice.choices((signal.SIGKILL, signal.SIGSTOP), (4, 1))[0]
    before = starts_of(folder)
    worker_of(folder, rank).send_signal(number)
    began = time.monotonic()
    row.done.append(f"{number.name[3:].lower()} {rank} at {step_of(folder)}")
    wait_for(lambda: len(found := starts_of(folder)) > len(before) and step_of(folder) > found[-1])
    return time.monotonic() - began


def worker_of(folder: Path, rank: int) -> psutil.Process:
    """The process that writes the rank's log: ranks of a local run are forks of its agent."""
    log, agents = str(folder / f"logs/rank-{rank}.out"), []
    for process in psutil.process_iter(["cmdline"]):
        if str(folder) in (process.info["cmdline"] or ()):
            with suppress(OSError):
                agents += [process] if os.readlink(f"/proc/{process.pid}/fd/1") == log else []
    (found,) = agents
    return found


def lines_of(folder: Path) -> list[dict[str, float]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def step_of(folder: Path) -> int:
    return int(max((line["step"] for line in lines_of(folder)), default=0))


def starts_of(folder: Path) -> list[int]:
    """After which step each start went on."""
    path = folder / "attempts.jsonl"
    lines = [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []
    return [line["after_step"] or 0 for line in lines if "began" in line]
