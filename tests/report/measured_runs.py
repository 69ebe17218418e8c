"""Run folders with figures that a test chooses, written as the command and the worker write them."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml

from hpc_parallel.failure.summary import summarise
from hpc_parallel.record import attempts
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json, write_text
from tests.composed import prepared

BEGAN = datetime(2026, 11, 22, 1, tzinfo=UTC)
LINES = 4  # of metrics, one a step


def state(*totals: int) -> list[dict[str, int]]:
    """`rank_state_bytes` of ranks that hold these totals: AdamW's quarters."""
    return [{"parameters": n // 4, "gradients": n // 4, "optimizer": n // 2} for n in totals]


def written(path: Path, *words: str) -> RunFolder:
    """A run that nobody has started or owns."""
    run = prepared(f"run_dir={path}", "launcher=local", "launcher.snapshot=false", "training.steps=4", *words)
    run.folder.create()
    write_text(run.folder.config, yaml.safe_dump(run.values, sort_keys=False))
    return run.folder


def started(
    path: Path, *words: str, samples_per_s: float = 100.0, peak_memory_bytes: int = 10**8
) -> RunFolder:
    """The same with a line of metrics for each of its steps, as if it went on."""
    folder = written(path, *words)
    config = yaml.safe_load(folder.config.read_text())
    batch = config["training"]["global_batch_size"]
    note(folder.attempts, began=BEGAN.isoformat(), job_id=None, after_step=0, lost_steps=0, warnings=[])
    for step in range(1, LINES + 1):
        note(
            folder.metrics, step=step, samples=step * batch, loss=4.0 / step,
            step_time_s=batch / samples_per_s, samples_per_s=samples_per_s,
            peak_memory_bytes=peak_memory_bytes, time=(BEGAN + timedelta(minutes=step)).isoformat(),
        )  # fmt: skip
    return folder


def ended(
    path: Path,
    *words: str,
    samples_per_s: float = 100.0,
    peak_memory_bytes: int = 10**8,
    outcome: str = "completed",
    hours: float = 1.0,
    **measured: Any,
) -> RunFolder:
    """The same after its end, with these figures in its summary."""
    folder = started(path, *words, samples_per_s=samples_per_s, peak_memory_bytes=peak_memory_bytes)
    config = yaml.safe_load(folder.config.read_text())
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    summary = summarise(
        config, outcome=outcome, lines=lines, history=vars(attempts.history(folder, environment={}))
    )
    end = (BEGAN + timedelta(hours=hours)).isoformat()
    write_json(folder.summary, {**summary, "ended": end, **measured})
    return folder


def note(path: Path, **line: Any) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
