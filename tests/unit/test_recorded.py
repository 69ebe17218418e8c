"""What a run folder says, whole, half-written or with a stranger's files in it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hpc_parallel.record import attempts, recorded
from hpc_parallel.record.metrics_file import last_line
from hpc_parallel.record.recorded import find_runs, read_run
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.record.sweep_folder import MANIFEST, Sweep, SweepRun, write_sweep
from hpc_parallel.report.labels import labels_of

CONFIG = """\
nodes: 2
gpus_per_node: 4
name: mine
strategy:
  name: pipeline
  cuts:
  - 1
  - 3
model:
  layers: 4
training:
  steps: 600
launcher:
  kind: local
task:
  name: train
"""


def made(path: Path, config: str | None = CONFIG) -> RunFolder:
    folder = RunFolder(path)
    folder.create()
    if config is not None:
        folder.config.write_text(config)
    return folder


def line(step: int, **more: Any) -> str:
    return json.dumps({"step": step, "loss": 1 / step, **more}) + "\n"


def test_a_complete_run(tmp_path: Path) -> None:
    folder = made(tmp_path / "runs" / "mine" / "20261122-0101")
    attempts.begin(folder, step=0, environment={"SLURM_JOB_ID": "17"})
    folder.metrics.write_text(line(10) + line(20))
    attempts.begin(folder, step=10, environment={"SLURM_JOB_ID": "18"})
    write_json(folder.summary, {"outcome": "completed"})
    write_json(folder.owner, {"job_id": "19"})
    run = read_run(folder.path)
    assert (run.name, run.run_id, run.strategy, run.task) == ("mine", "20261122-0101", "pipeline", "train")
    assert (run.nodes, run.gpus_per_node, run.head["training"]) == (2, 4, {"steps": 600})
    assert (run.summary, run.failure, run.damaged) == ({"outcome": "completed"}, None, {})
    assert (run.attempts.restarts, run.attempts.lost_steps) == (1, 10)
    assert run.job_ids == ["17", "18", "19"]
    assert run.metrics == [{"step": 10, "loss": 0.1}]
    assert run.last_metrics == run.metrics[-1]
    assert run.config["model"] == {"layers": 4}
    assert "model" not in run.head


def test_a_half_written_or_foreign_file_reads_as_none(tmp_path: Path) -> None:
    folder = made(tmp_path / "data" / "1", config="nodes: [2\nstrategy: {")
    folder.summary.write_text('{"outcome": "comp')
    folder.failure.mkdir()
    folder.owner.write_text("[1]")
    folder.environment.write_bytes(b"\xff\xfe\x00")
    folder.attempts.write_bytes(b'17\n{"began": "today"}\n\xff\n')  # a stranger's keys
    folder.metrics.write_bytes(b"\x80\n" + line(10).encode() + b'{"step": 2')
    run = read_run(folder.path)
    assert (run.config, run.head, run.summary, run.failure, run.owner) == (None, {}, None, None, None)
    assert (run.name, run.nodes, run.strategy, run.job_ids) == ("data", None, None, [])
    assert run.attempts == attempts.History()
    assert run.last_metrics == {"step": 10, "loss": 0.1}
    damaged = run.damaged
    assert list(damaged) == ["config.yaml", "summary.json", "failure.json", "environment.json", "owner.json"]
    assert damaged["failure.json"] == "it is a folder, not a regular file"
    assert damaged["owner.json"] == "it holds a list, not a table"
    assert damaged["environment.json"] == "it is not UTF-8 (byte 0)"


def test_a_configuration_in_another_hand(tmp_path: Path) -> None:
    """Someone wrote it in flow style, which the quick look at its head does not know."""
    run = read_run(made(tmp_path / "a", config="{nodes: 3, strategy: {name: fsdp}, name: 5}").path)
    assert (run.nodes, run.strategy, run.name) == (3, "fsdp", tmp_path.name)


def test_nothing_is_constructed(tmp_path: Path) -> None:
    config = f"nodes: 1\nmodel: !!python/object/apply:os.mkdir ['{tmp_path / 'harm'}']\n"
    run = read_run(made(tmp_path / "a", config=config).path)
    assert run.config is None
    assert run.nodes == 1
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("long", [1, 3000, 100_000])
def test_the_last_line_from_the_end(tmp_path: Path, long: int) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + line(2, text="x" * long) + '{"step": 3, "torn')
    assert last_line(path) == {"step": 2, "loss": 0.5, "text": "x" * long}
    path.write_text("x" * long)
    assert last_line(path) is None


def test_only_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(map(line, range(1, 100_001))))
    seen: list[bytes] = []
    parse = json.loads
    monkeypatch.setattr(json, "loads", lambda text, **rules: seen.append(text) or parse(text, **rules))
    found = last_line(path)
    assert (found["step"], len(seen)) == (100_000, 1)


def test_labels_read_the_strategy_of_each_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report of thousands of runs compares them in pairs."""
    runs = []
    for number in range(12):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        text = f"nodes: 1\nstrategy:\n  name: s{number % 3}\nmodel:\n  width: {8 if number < 9 else number}\n"
        (folder / "config.yaml").write_text(text)
        runs.append(read_run(folder))
    read: list[Any] = []
    monkeypatch.setattr(recorded, "text", lambda value: read.append(value) or value)
    labels = [str(label) for label in labels_of(runs, [""] * 12)]
    assert [read.count(f"s{number}") for number in range(3)] == [4, 4, 4]
    assert labels[9:] == [f"s{n % 3} 1 x ?, width={n}" for n in (9, 10, 11)]
    assert labels[3:6] == ["s0 1 x ? (3)", "s1 1 x ? (4)", "s2 1 x ? (5)"]


def test_runs_of_a_tree(tmp_path: Path) -> None:
    first = made(tmp_path / "runs" / "a" / "1")
    made(first.path / "code" / "runs" / "b" / "1")  # a run of the checkout that the run kept
    waiting = made(tmp_path / "runs" / "b" / "2", config=None)
    write_json(waiting.owner, {"job_id": "7"})
    copied = tmp_path / "copies" / "c"  # by something that leaves empty folders out
    copied.mkdir(parents=True)
    (copied / "config.yaml").write_text(CONFIG)
    (copied / "metrics.jsonl").write_text(line(1))
    for foreign in ("runs/notes.txt", "conf/config.yaml", ".hidden/config.yaml", ".hidden/summary.json"):
        (tmp_path / foreign).parent.mkdir(exist_ok=True)
        (tmp_path / foreign).write_text("?")
    os.symlink(tmp_path, tmp_path / "runs" / "loop")
    assert [run.path for run in find_runs(tmp_path)] == [copied, first.path, waiting.path]
    assert [run.path for run in find_runs(first.path)] == [first.path]
    assert find_runs(tmp_path / "conf") == find_runs(tmp_path / "nowhere") == []
    assert find_runs(tmp_path / "runs" / "notes.txt") == []


def test_runs_of_a_sweep(tmp_path: Path) -> None:
    second, first = made(tmp_path / "b"), made(tmp_path / "a")
    sweep = tmp_path / "sweeps" / "1"
    sweep.mkdir(parents=True)
    runs = [SweepRun((), tmp_path / name, nodes=1, gpus_per_node=1) for name in ("b", "gone", "a")]
    write_sweep(
        sweep, Sweep(("-m",), "2026-11-22T01:01:01+00:00", parallelism=None, runs=tuple(runs), skipped=())
    )
    assert [run.path for run in find_runs(sweep)] == [second.path, first.path]
    assert [run.path for run in find_runs(tmp_path)] == [first.path, second.path]  # each once
    (sweep / MANIFEST).write_text("{")
    assert find_runs(sweep) == []


def test_lines_that_are_too_many_to_read_are_announced(tmp_path: Path) -> None:
    run = read_run(tmp_path)
    text = "x" * 2**20
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f'{{"step": {n}, "x": "{text}"}}\n' for n in range(1, 41))
    )
    steps = [line["step"] for line in run.logged]
    assert steps == list(range(10, 41))  # 31 lines of a little more than 1 MiB are in the last 32 MiB
    assert "before step 10," in run.damaged["metrics.jsonl"]
    assert "32 MiB" in run.damaged["metrics.jsonl"]
