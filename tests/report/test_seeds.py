"""Runs with different seeds are pooled by mean and standard deviation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_parallel.record.safe_write import write_json
from hpc_parallel.report.gather import gather
from hpc_parallel.report.page import render
from hpc_parallel.report.tables import compare, records
from hpc_parallel.report.verdict import pools, verdicts
from tests.recorded_runs import finished
from tests.report.measured_runs import ended


def test_equal_runs_with_different_seeds_are_pooled(tmp_path: Path) -> None:
    for seed, loss in ((1, 2.0), (2, 2.4), (3, 2.2)):
        folder = finished(tmp_path / "runs" / f"a{seed}", "strategy=data", "nodes=2", f"seed={seed}")
        summary = json.loads(folder.summary.read_text())
        losses = {"final_loss": loss, "validation_loss": loss - 3}  # negative: an own loss may be
        folder.summary.write_text(json.dumps({**summary, **losses}))
    finished(tmp_path / "runs" / "b", "strategy=fsdp", "nodes=2", "seed=1")
    finished(tmp_path / "runs" / "c", "strategy=data", "nodes=2", "seed=4", "optimizer.learning_rate=0.5")
    gathered = gather([tmp_path / "runs"])
    (pool,) = pools(gathered.rows)
    assert pool.seeds == [1, 2, 3]
    loss_figure = pool.figures[0]
    assert (loss_figure.key, loss_figure.mean) == ("final_loss", pytest.approx(2.2))
    assert loss_figure.deviation == pytest.approx(0.2)
    assert str(pool.figures[1]) == "-0.8000 ± 0.20"
    assert [row["validation_loss"] for row in records(gathered.rows, [])[:3]] == [2.0 - 3, 2.4 - 3, 2.2 - 3]
    report = render(gathered)
    assert f"| {pool.label} | 1, 2, 3 | final_loss | 2.200 ± 0.20 |" in report.markdown
    assert report.html.count("2.200 ± 0.20") == 1


def test_a_figure_is_no_better_than_what_its_repeats_reach(tmp_path: Path) -> None:
    """Each run is steady, but the seeds of `data` have 60 and 140 samples/s: 100 is neither more nor less."""
    runs = {"data": ((60, 0.2), (140, 0.4)), "fsdp": ((100, 0.3),), "hsdp": ((50, 0.1),)}
    for name, figures in runs.items():
        for seed, (rate, share) in enumerate(figures):
            words = (f"strategy={name}", "nodes=2", f"seed={seed}")
            ended(
                tmp_path / "runs" / f"{name}{seed}", *words, samples_per_s=rate,
                exposed_communication_share=share,
            )  # fmt: skip
    rows = gather([tmp_path / "runs"]).rows
    assert [row.range_of("samples_per_s") for row in rows] == [(60, 140), (60, 140), (100, 100), (50, 50)]
    comparison = compare(rows)
    at = {column.key: index for index, column in enumerate(comparison.columns)}
    best = {key: [cells[at[key]].best for cells in comparison.cells] for key in at}
    assert not any(best["samples_per_s"] + best["step_time_s"])
    assert best["exposed_communication_share"] == [False, False, False, True]  # 0.1, and 0.2 to 0.4 overlaps
    (line, *_) = verdicts(rows)
    assert line.text.startswith(
        "data 2 x 1, seed=1; fsdp 2 x 1; data 2 x 1, seed=0 (can't be told apart): 140"
    )


def test_speeds_of_different_devices_are_not_pooled(tmp_path: Path) -> None:
    for seed, device in ((1, "A100"), (2, "H100")):
        folder = finished(tmp_path / "runs" / f"a{seed}", "strategy=data", "nodes=2", f"seed={seed}")
        write_json(folder.environment, {"device": device, "cuda": "13.0"})
    (pool,) = pools(gather([tmp_path / "runs"]).rows)
    assert [figure.key for figure in pool.figures] == ["final_loss"]


def test_without_seeds_there_is_no_section(tmp_path: Path) -> None:
    finished(tmp_path / "runs" / "a", "strategy=data", "nodes=2", "seed=1")
    assert "different seeds" not in render(gather([tmp_path / "runs"])).html
