"""Run folders in every condition, as the worker half leaves them, for those who read them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from hpc_parallel.config.resolve import resolve
from hpc_parallel.record import attempts, owner
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json, write_text
from tests.composed import composed

GONE = {"host": owner.this_process().host, "pid": 2**22 + 1, "began": "never"}  # past the largest pid


def prepared(path: Path, *overrides: str) -> RunFolder:
    """Written by the launcher, and no more."""
    folder = RunFolder(path)
    folder.create()
    write_json(folder.owner, GONE)
    write_text(folder.config, _config(overrides))
    write_json(folder.environment, {"overrides": list(overrides)})
    return folder


def started(path: Path, *overrides: str, hosts: Mapping[int, str] | None = None) -> RunFolder:
    """With three logged steps of 0.5 s; `hosts`: of each rank."""
    folder = prepared(path, *overrides)
    attempts.begin(folder, step=0, environment={})
    lines = [
        {"step": step, "samples": 16 * step, "loss": 4 / step, "step_time_s": 0.5, "samples_per_s": 32.0,
         "peak_memory_bytes": 2**30}
        for step in (10, 20, 30)
    ]  # fmt: skip
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for rank, host in (hosts or {0: "n1", 1: "n1"}).items():
        folder.log(rank, "out").write_text(f"rank {rank} on {host}\n")
        folder.log(rank, "err").write_text("")
    told = [{"host": host, "address": "10.0.0.1", "device": "cpu"} for host in (hosts or {}).values()]
    write_json(folder.environment, {"overrides": list(overrides), "ranks": told})
    return folder


def finished(path: Path, *overrides: str, **more: Any) -> RunFolder:
    folder = started(path, *overrides, **more)
    attempts.end(folder, how="completed")
    _sum_up(folder, "completed")
    return folder


def failed(path: Path, *overrides: str) -> RunFolder:
    folder = started(path, *overrides)
    folder.log(1, "err").write_text("Traceback\nValueError: [no]\n")
    attempts.end(folder, how="error")
    line = "rank 1 on n1 failed first: ValueError: [no]; 1 follower"
    write_json(folder.failure, {"rank": 1, "kind": "error", "line": line, "traceback": []})
    _sum_up(folder, "failed")
    return folder


def half_written(path: Path) -> RunFolder:
    """Its launcher was killed while it wrote the folder."""
    folder = RunFolder(path)
    folder.create()
    write_json(folder.owner, GONE)
    folder.config.write_text("nodes: 2\nstrategy:\n  na")
    folder.metrics.write_text('{"step": 1, "lo')
    return folder


def foreign(path: Path) -> RunFolder:
    """A finished run into which a stranger has put files under the run's own names, and others."""
    folder = finished(path)
    folder.failure.write_bytes(b"\xff\x00 not ours")
    folder.environment.write_text("[1, 2]")
    folder.owner.write_text('{"pid": "none"}')
    (folder.logs / "rank-x.out").write_text("?")
    (folder.logs / "notes").mkdir()
    (folder.path / "thesis.pdf").write_bytes(b"%PDF")
    with folder.attempts.open("a") as file:
        file.write("17\n")
    return folder


def own(folder: RunFolder, process: int) -> None:
    """Make a living process the run's owner, as the agent of a local run is."""
    began = owner._began(process)
    inode = folder.path.stat().st_ino
    write_json(folder.owner, {"host": GONE["host"], "pid": process, "began": began, "folder": inode})


@contextmanager
def living() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for a signal."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@cache
def _config(overrides: tuple[str, ...]) -> str:
    """On this machine by default: a first test inside an allocation must not decide for all later ones."""
    return yaml.safe_dump(resolve(composed("launcher=local", *overrides))[1], sort_keys=False)


def _sum_up(folder: RunFolder, outcome: str) -> None:
    write_json(
        folder.summary,
        {
            "outcome": outcome, "steps": 30, "samples": 480, "final_loss": 4 / 30, "samples_per_s": 31.0,
            "step_time_s": 0.5, "peak_memory_bytes": 2**30, "bubble_share": 0.125, "restarts": 0,
            "started": "2026-11-22T01:00:00+00:00", "ended": "2026-11-22T01:02:05+00:00", "job_ids": [],
        },
    )  # fmt: skip
