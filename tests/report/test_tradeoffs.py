"""Latency by batch size and the bubble by microbatches, read back from reports."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest
import yaml

from hpc_parallel.__main__ import main
from hpc_parallel.failure.summary import summarise
from hpc_parallel.record import attempts, owner
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.report import bubble, latency
from hpc_parallel.report.gather import gather
from tests.report.measured_runs import BEGAN, ended, note, written

SIZES = {1: (0.004, 0.0051), 4: (0.0102, 0.02), 16: (0.031, 0.0325)}  # median and 99th percentile, seconds
KEYS = ("batch_size", "latency_s", "latency_p99_s", "samples_per_s")


def timing(path: Path, *words: str, sizes: dict[int, tuple[float, float]]) -> RunFolder:
    """A run of task=infer that goes on, with a line for its validation and one for each of these sizes."""
    folder = written(path, "task=infer", *words)
    note(folder.attempts, began=BEGAN.isoformat(), job_id=None, after_step=0, lost_steps=0, warnings=[])
    common = {"peak_memory_bytes": 10**8, "time": BEGAN.isoformat()}
    note(folder.metrics, step=1, samples=512, validation_loss=5.3, samples_per_s=300.0, **common)
    for step, (size, (median, p99)) in enumerate(sizes.items(), start=2):
        note(folder.metrics, step=step, batch_size=size, latency_s=median, latency_p99_s=p99,
             samples_per_s=size / median, **common)  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def inferred(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reported: a run that has ended, one that goes on (a torn line at its end), one of a single size."""
    root = tmp_path_factory.mktemp("inferred") / "runs"
    whole = timing(root / "a", "strategy=single", sizes=SIZES)
    lines = [json.loads(line) for line in whole.metrics.read_text().splitlines()]
    summary = summarise(
        yaml.safe_load(whole.config.read_text()), outcome="completed", lines=lines,
        history=vars(attempts.history(whole, environment={})),
    )  # fmt: skip
    write_json(whole.summary, summary)
    going_on = timing(root / "b", "strategy=data", "nodes=2", sizes={2: (0.5, 0.6)})
    owner.take(going_on)
    with going_on.metrics.open("a") as file:
        file.write('{"step": 3, "batch_size": 4, "laten')
    timing(root / "c", "strategy=tensor", "nodes=2", sizes={1: (0.05, 0.08)})
    ended(root / "trained", "strategy=data", "nodes=2")
    assert main(["report", str(root)]) == 0
    return root


def test_latencies_are_those_of_the_run_folders(inferred: Path) -> None:
    """In the CSV, in the page and in Markdown, one line a whole line of metrics with a batch."""
    expected = {}
    for name in "abc":
        texts = (inferred / name / "metrics.jsonl").read_text().splitlines()
        lines = [json.loads(text) for text in texts if text.endswith("}")]
        for line in lines[1:]:
            expected[str(inferred / name), line["batch_size"]] = [line[key] for key in KEYS]
    assert len(expected) == 5
    text = (inferred / "report/latency.csv").read_text()
    found = list(csv.DictReader(io.StringIO(text)))
    assert {
        (line["folder"], int(line["batch_size"])): [float(line[key]) for key in KEYS] for line in found
    } == expected
    assert [line["state"] for line in found] == [*["completed"] * 3, "running", "broken off"]
    page = (inferred / "report/index.html").read_text()
    rows = re.findall(r'<tr data-run="([^"]+)">(.*?)</tr>', page.split('id="latency" class="sortable"')[1])
    shown = {}
    for path, cells in rows[:5]:
        values = dict(re.findall(r'data-key="(\w+)" data-value="([^"]*)"', cells))
        shown[path, int(values["batch_size"])] = [float(values[key]) for key in KEYS]
    assert shown == expected
    markdown = (inferred / "report/report.md").read_text()
    assert "| run | batch size | latency, ms | 99th percentile, ms | throughput, samples/s |" in markdown
    assert "| single 1 x 1 | 4 | 10.2 | 20.0 | 392 |" in markdown


def test_a_plot_of_latencies_names_units_runs_and_batch_sizes(inferred: Path) -> None:
    page = (inferred / "report/index.html").read_text()
    texts = set(re.findall(r">([^<>]+)</text>", page.split('<figure id="latency">')[1].split("</figure>")[0]))
    runs = {"single 1 x 1", "data 2 x 1", "tensor 2 x 1"}
    assert {"throughput, samples/s", "latency of a batch, ms", "1", "4", "16", "2", *runs} <= texts


def test_no_strangers_line_is_a_latency(tmp_path: Path) -> None:
    folder = timing(tmp_path / "runs" / "a", sizes={})
    good = {"batch_size": 4, "latency_s": 0.5, "latency_p99_s": 0.75, "samples_per_s": 8.0}
    for key in KEYS:
        for value in ("x", -7, [1], None, True, float("nan")):
            note(folder.metrics, step=2, **{**good, "batch_size": 8, key: value})
    (curve,) = latency.curves(gather([tmp_path]).rows)  # a percentile may be away, what it belongs to is not
    assert [(point.batch_size, point.latency_s, point.latency_p99_s) for point in curve.points] == [
        (8, 0.5, None)
    ]
    note(folder.metrics, step=2, **good)
    note(folder.metrics, step=2, **{**good, "latency_s": 0.25})  # started again
    (curve,) = latency.curves(gather([tmp_path]).rows)
    assert [(point.batch_size, point.latency_s) for point in curve.points] == [(4, 0.25), (8, 0.5)]


def test_without_latencies_there_is_no_table_of_them(tmp_path: Path) -> None:
    ended(tmp_path / "a", "strategy=data", "nodes=2")
    assert main(["report", str(tmp_path / "a")]) == 0
    made = tmp_path / "a" / "report"
    assert not (made / "latency.csv").exists()
    assert "- Latency against throughput: no run has timed a batch" in (made / "report.md").read_text()


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches", "share"),  # the first three by list scheduling, facts of the house
    [("gpipe", 4, 8, 0.273), ("1f1b", 4, 16, 0.158), ("1f1b", 8, 32, 0.179), ("naive", 4, 8, 0.75),
     ("interleaved", 4, 8, None), ("zbv", 4, 8, None), ("mine", 4, 8, None)],
)  # fmt: skip
def test_the_formula(schedule: str, stages: int, microbatches: int, share: float | None) -> None:
    found = bubble.closed_form(schedule, stages=stages, microbatches=microbatches)
    assert found == (None if share is None else pytest.approx(share, abs=5e-4))


def test_pipelines_that_differ_in_microbatches_alone_are_one_line(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    for name, words, share, memory in (
        ("a", ("strategy.schedule=gpipe", "strategy.microbatches=8"), 0.3, 3e8),
        ("b", ("strategy.schedule=gpipe", "strategy.microbatches=4"), 0.45, 2e8),
        ("c", ("strategy.schedule=1f1b",), 0.2, 1e8),  # 16 of 16 samples: four a stage
        ("d", ("strategy.schedule=gpipe", "training.microbatch_size=1", "seed=7"), 0.25, 4e8),
        ("e", ("strategy.schedule=gpipe", "training.global_batch_size=32"), 0.25, 4e8),
    ):
        ended(root / name, "strategy=pipeline", "nodes=4", *words, bubble_share=share,
              peak_memory_bytes=int(memory))  # fmt: skip
    ended(root / "failed", "strategy=pipeline", "nodes=4", outcome="failed", bubble_share=0.1)
    ended(root / "data", "strategy=data", "nodes=4", bubble_share=0.0)
    found = [
        [(p.microbatches, p.bubble_share, p.peak_memory_bytes, p.formula) for p in family.points]
        for family in bubble.families(gather([root]).rows)
    ]
    assert found == [
        [(4, 0.45, 2e8, 3 / 7), (8, 0.3, 3e8, 3 / 11), (16, 0.25, 4e8, 3 / 19)],
        [(16, 0.2, 1e8, 3 / 19)],
        [(16, 0.25, 4e8, 3 / 19)],
    ]
    assert main(["report", str(root)]) == 0
    figure = (root / "report/index.html").read_text().split('<figure id="bubble">')[1].split("</figure>")[0]
    texts = set(re.findall(r">([^<>]+)</text>", figure))
    assert {"bubble, %", "memory per device, MB", "4", "8", "16", "formula: (P-1)/(M+P-1)"} <= texts
    assert {"gpipe", "1f1b"} <= texts
    assert len(bubble.families(gather([root / "a"]).rows)) == 0  # one run alone compares with nothing
