"""A report on runs whose files say what no run would: each is there, without what can't be."""

from __future__ import annotations

import csv
import json
import re
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpc_parallel.commands.report import main
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.report.gather import PARTS, gather
from hpc_parallel.report.page import markdown, to_csv
from tests.report.measured_runs import ended, started

PIPELINE = ("strategy=pipeline", "nodes=2", "strategy.microbatches=4")
CHUNK = [0.0, 0.5, 0, "forward", 0]
FIGURES = {"bubble_share": 0.2, "step_parts_s": dict.fromkeys(PARTS, 0.1), "predicted": {"step_time_s": 0.2}}
HUGE = 2**62


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs with every plot there is, of which tests take copies."""
    place = tmp_path_factory.mktemp("pair")
    for name, microbatches in (("a", 4), ("b", 8)):
        folder = ended(place / name, *PIPELINE[:2], f"strategy.microbatches={microbatches}", **FIGURES)
        ranks = [{"rank": rank, "length_s": 1.0, "chunks": [CHUNK]} for rank in (0, 1)]
        folder.timeline.write_text(json.dumps({"ranks": ranks}))
    return place


def copied(pair: Path, place: Path, run: str = "a") -> RunFolder:
    shutil.copytree(pair / run, place / run)
    return RunFolder(place / run)


def put(values: dict[str, Any], key: str, value: Any) -> None:
    *tables, last = key.split(".")
    for table in tables:
        values = values.setdefault(table, {})
    values[last] = value


CONFIG: Sequence[tuple[str, Any]] = [
    ("strategy", "no table"), ("strategy.pipeline", 0), ("strategy.pipeline", -1),
    ("strategy.name", r"$\frac{1}$"), ("strategy.name", "=cmd\x1b[31m\r\n|"), ("nodes", -2), ("nodes", HUGE),
    ("training.global_batch_size", HUGE), ("training.microbatch_size", 0), ("strategy.microbatches", 0),
    ("training", []), ("model", {1: 2, "a": 3}),
    ("model._target_", "_" * 5000), ("optimizer", {"learning_rate": -1e308}), ("strategy.shard", 1e308),
]  # fmt: skip
SUMMARY: Sequence[tuple[str, Any]] = [
    ("layout", {"pipeline": 0}), ("layout", dict.fromkeys(
        ("pipeline", "replicate", "shard", "context", "tensor", "tile"), 0)),
    ("layout.pipeline", -3), ("samples_per_s", 0), ("samples_per_s", -1.0), ("samples_per_s", 1e308),
    ("samples_per_s", 5e-324), ("peak_memory_bytes", -1), ("peak_memory_bytes", 0), ("bubble_share", 1e308),
    ("step_parts_s.compute", 1e308), ("step_parts_s", dict.fromkeys(PARTS, -1.0)),
    ("predicted", {"step_time_s": -1}), ("predicted.step_time_s", 1e-308),
    ("predicted", []), ("world_size", -1), ("restarts", "many"), ("final_loss", [1]),
]  # fmt: skip
TIMELINES: Sequence[Any] = [
    [], {}, [{}], [{"rank": 0, "length_s": 0, "chunks": [CHUNK]}],
    [{"rank": 0, "length_s": -1, "chunks": []}],
    [{"rank": 0, "length_s": 1e308, "chunks": [[0, 1e308, 0, "forward", None]]}],
    [{"rank": "x", "length_s": 1, "chunks": [CHUNK]}], [{"rank": 0, "length_s": 1, "chunks": [[1]]}],
    [{"rank": 0, "length_s": "1", "chunks": [CHUNK]}], [{"rank": 0, "length_s": 1, "chunks": 3}],
    [{"rank": 0, "length_s": 1, "chunks": [[0, 1, "a", "forward", None]]}],
    [{"rank": 0, "length_s": 1, "chunks": [[0, 1, 0, 3, None]]}],
    [{"rank": 0, "length_s": 1, "chunks": [[0, 1, 0, "forward", r"$\frac{1}$"]]}],
    [{"rank": 0, "length_s": 1, "chunks": [[n / 900, n / 900, n, "$x$", None] for n in range(900)]}],
    [{"rank": 0, "length_s": 1, "chunks": [[0, 1, 0, "forward", None]] * 5000}],
    [{"rank": 0, "length_s": 1, "chunks": [CHUNK] * 50_000}],
]  # fmt: skip


def reported(place: Path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns of what it can't draw
        assert main([str(place)]) == 0
    return (place / "report" / "report.csv").read_text()


@pytest.mark.full
def test_odd_configurations_and_timelines(pair: Path, tmp_path: Path) -> None:
    """One run each, all in one report: drawing is what takes time."""
    for place, (key, value) in enumerate(CONFIG):
        folder = copied(pair, tmp_path / f"config-{place}")
        values = yaml.safe_load(folder.config.read_text())
        put(values, key, value)
        folder.config.write_text(yaml.safe_dump(values))
        folder.timeline.unlink()
    for place, ranks in enumerate(TIMELINES):
        folder = copied(pair, tmp_path / f"timeline-{place}")
        folder.timeline.write_text(json.dumps({"ranks": ranks}))
    table = reported(tmp_path)
    assert len(list(csv.reader(table.splitlines()))) == len(CONFIG) + len(TIMELINES) + 1
    assert len(list((tmp_path / "report" / "plots").glob("timeline_*"))) == 1


def test_odd_figures(pair: Path, tmp_path: Path) -> None:
    for place, (key, value) in enumerate(SUMMARY):
        folder = copied(pair, tmp_path / f"{place}")
        summary = json.loads(folder.summary.read_text())
        put(summary, key, value)
        folder.summary.write_text(json.dumps(summary))
        if key == "peak_memory_bytes":  # drawn for GPUs only
            folder.environment.write_text(json.dumps({"cuda": "12.8"}))
        folder.timeline.unlink()
    assert len(reported(tmp_path).splitlines()) == len(SUMMARY) + 1


def test_a_figure_that_is_odd_is_left_out_alone(pair: Path, tmp_path: Path) -> None:
    folder = copied(pair, tmp_path)
    copied(pair, tmp_path, "b")
    summary = json.loads(folder.summary.read_text())
    folder.summary.write_text(json.dumps({**summary, "samples_per_s": 1e300, "peak_memory_bytes": -5}))
    figures = {row.run.path.name: row.figures for row in gather([tmp_path]).rows}
    assert figures["a"]["samples_per_s"] is None
    assert figures["a"]["peak_memory_bytes"] is None
    assert figures["a"]["step_time_s"] == figures["b"]["step_time_s"] == pytest.approx(0.16)
    assert figures["b"]["samples_per_s"] == 100.0


def test_names_are_text_in_every_form(pair: Path, tmp_path: Path) -> None:
    folder = copied(pair, tmp_path)
    values = yaml.safe_load(folder.config.read_text())
    hostile = "=cmd()[a](http://evil)<script>x</script>\x1b]0;t\x07`|$\\frac{1}$"
    values["strategy"]["name"] = hostile
    folder.config.write_text(yaml.safe_dump(values))
    table = reported(tmp_path)
    made = tmp_path / "report"
    markdown, page = (made / "report.md").read_text(), (made / "index.html").read_text()
    for content in (table, markdown, page):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", content)
    assert "<script>x" not in markdown + page
    assert r"\[a\](http&#58;//evil)" in markdown
    assert "[a](" not in markdown.replace(r"\[", "").replace(r"\]", "")
    cells = [cell for line in csv.reader(table.splitlines()) for cell in line]
    assert any(cell.startswith("'=cmd()") for cell in cells)
    assert not any(cell.startswith(("=", "+", "@")) for cell in cells)


def test_numbers_of_a_table_stay_numbers() -> None:
    rows = [["-cmd", -1.5, None, 3], ["\t=x", 1e-7, "+1", "a@b"]]
    assert to_csv(["a", "b", "c", "d"], rows) == "a,b,c,d\n'-cmd,-1.5,,3\n'\\t=x,1e-07,'+1,a@b\n"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("plain gpus_per_node=2", "plain gpus_per_node=2"),
        ("![x](y)", r"!\[x\](y)"),
        ("a\n\n# b | c", r"a # b \| c"),
        ("<b>&amp;", "&lt;b&gt;&amp;amp;"),
        ("`x` *y* \\", r"\`x\` \*y\* " + "\\\\"),
        ("www.evil https://evil", "www&#46;evil https&#58;//evil"),
    ],
)
def test_markdown_of_a_text(value: str, shown: str) -> None:
    assert markdown(value) == shown


def test_many_batch_sizes_take_no_time(tmp_path: Path) -> None:
    folder = started(tmp_path / "run", "strategy=data")
    lines = (
        {"step": 1, "batch_size": size, "latency_s": 0.1, "samples_per_s": 10.0} for size in range(1, 30_000)
    )
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(reported(tmp_path).splitlines()) == 2
    assert len((tmp_path / "report" / "latency.csv").read_text().splitlines()) == 201
