"""`python -m hpc_parallel report`: what it writes, where, and what it refuses."""

from __future__ import annotations

import csv
import html
import io
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from hpc_parallel.__main__ import main
from tests.recorded_runs import failed, finished, foreign, half_written, own
from tests.recorded_runs import started as recorded_start
from tests.report.measured_runs import ended, note, started, written

PARTS = {"compute": 0.2, "communication": 0.03, "bubble": 0.0, "data": 0.001, "other": 0.01}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with one run."""
    ended(tmp_path / "runs" / "data-1", "strategy=data", "nodes=2")
    return tmp_path / "runs"


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a run of each kind that a plot is made for, one that broke off, one that never began, and
    the report on them."""
    root = tmp_path_factory.mktemp("reported") / "runs"
    for nodes, rate in ((1, 100), (2, 170)):
        ended(
            root / f"data-{nodes}", "strategy=data", f"nodes={nodes}", samples_per_s=rate, step_parts_s=PARTS
        )
        ended(
            root / f"weak-{nodes}", "strategy=tensor", f"nodes={nodes}",
            f"training.global_batch_size={16 * nodes}", samples_per_s=rate,
        )  # fmt: skip
    pipeline = ended(
        root / "pipeline", "strategy=pipeline", "nodes=2", bubble_share=0.25, step_parts_s=PARTS,
        predicted={"samples_per_s": 120.0},
    )  # fmt: skip
    chunks = [[0.0, 0.1, 0, "forward", 0], [0.1, 0.3, 0, "backward", 0]]
    ranks = [{"rank": rank, "length_s": 0.4, "chunks": chunks, "waiting": []} for rank in (0, 1)]
    pipeline.timeline.write_text(json.dumps({"ranks": ranks}))
    started(root / "going_on", "strategy=data", "nodes=2")
    written(root / "waiting", "strategy=data", "nodes=2", "strategy.bucket_mb=7")
    assert report(str(root)) == 0
    return root


def report(*words: str) -> int:
    return main(["report", *words])


def test_it_writes_a_page_markdown_csv_and_plots(reported: Path) -> None:
    made = reported / "report"
    assert sorted(path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file()) == [
        "index.html", "plots/loss.png", "plots/memory.png", "plots/predicted.png", "plots/step_parts.png",
        "plots/strong_scaling.png", "plots/timeline_1.png", "plots/weak_scaling.png", "report.csv",
        "report.md",
    ]  # fmt: skip
    assert [path.name for path in reported.iterdir() if path.name[0] == "."] == []  # nothing beside
    markdown = (made / "report.md").read_text()
    images = re.findall(r"!\[.*?\]\((.*?)\)", markdown)
    assert len(images) == 7
    assert all((made / image).is_file() for image in images)
    assert "| pipeline 2 x 1 | completed | pipeline 2 | 100 (100 to 100) | 160 |" in markdown
    assert "| strong | data, batch 16 | 2 | 16 | 170 | 1.70 | 2.00 | 85.0 |" in markdown


def test_the_table_has_every_figure_in_its_own_unit(reported: Path) -> None:
    lines = {
        Path(line["folder"]).name: line
        for line in csv.DictReader(io.StringIO((reported / "report/report.csv").read_text()))
    }
    assert {*lines, "report"} == {path.name for path in reported.iterdir()}
    for name, line in lines.items():
        summary = reported / name / "summary.json"
        said = json.loads(summary.read_text()) if summary.exists() else {}
        for key in (
            "samples_per_s",
            "step_time_s",
            "peak_memory_bytes",
            "bubble_share",
            "final_loss",
            "restarts",
        ):
            if said:
                assert (float(line[key]) if line[key] else None) == said[key], (name, key)
        parts = said.get("step_parts_s") or {}
        assert line["compute_s"] == (str(parts["compute"]) if parts else "")
    assert [lines["data-2"][key] for key in ("strong_efficiency", "weak_efficiency")] == ["0.85", ""]
    assert [lines["weak-2"][key] for key in ("strong_efficiency", "weak_efficiency")] == ["", "0.85"]
    assert (lines["going_on"]["state"], lines["waiting"]["samples_per_s"]) == ("broken off", "")


def test_plots_name_their_units_and_take_the_pages_ink(reported: Path) -> None:
    page = (reported / "report/index.html").read_text()
    plots = {
        name: ElementTree.fromstring(svg)
        for name, svg in re.findall(r'<figure id="(\w+)">.*?(<svg.*?</svg>)', page, re.DOTALL)
    }
    texts = {
        name: " ".join("".join(text.itertext()) for text in svg.iter("{http://www.w3.org/2000/svg}text"))
        for name, svg in plots.items()
    }
    units = {
        "strong_scaling": ["devices", "throughput, samples/s", "efficiency, % of 1 device", "ideal"],
        "weak_scaling": ["devices", "throughput, samples/s"],
        "step_parts": ["time of one step, ms", "compute", "communication", "data", "other"],
        "memory": ["memory per device, MB"],
        "loss": ["samples consumed", "loss"],
        "timeline_1": ["time since the step's start, ms", "rank 1, stage 0", "forward", "backward"],
        "predicted": ["measured / predicted", "pipeline 2 x 1, throughput", "0.833"],
    }
    assert set(texts) == set(units)
    for name, expected in units.items():
        assert [text for text in expected if text not in texts[name]] == [], name
        assert "currentColor" in ElementTree.tostring(plots[name], encoding="unicode"), name
        assert "#0a0b0c" not in page


def test_text_of_a_run_is_text_in_the_page(runs: Path) -> None:
    broken = ended(runs / "failed", "strategy=data", "nodes=2", outcome="failed")
    broken.failure.write_text(json.dumps({"line": "<script>alert(1)</script> | a\nb"}))
    assert report(str(runs)) == 0
    page = (runs / "report/index.html").read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert (
        r"| failed | &lt;script&gt;alert(1)&lt;/script&gt; \| a b |"
        in (runs / "report/report.md").read_text()
    )


def test_a_report_takes_the_place_of_a_report_only(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = runs.parent / "out"
    out.mkdir()
    assert report(str(runs), "--output", str(out)) == 0  # an empty folder
    assert capsys.readouterr().out == f"1 run: {out}/index.html\n"
    (out / "plots" / "old.png").write_text("of a run that is gone")
    assert report(str(runs / "data-1"), "--output", str(out)) == 0
    assert [path.name for path in runs.parent.iterdir() if path.name[0] == "."] == []
    assert not (out / "plots" / "old.png").exists()
    assert "Report on data-1" in (out / "index.html").read_text()
    mine = runs.parent / "mine"
    mine.mkdir()
    (mine / "index.html").write_text("my own page")
    capsys.readouterr()
    assert report(str(runs), "--output", str(mine)) == 2
    assert capsys.readouterr().err == (
        f"1 problem; nothing was written.\n  --output = {mine} is there and is no report, which alone would "
        f"be replaced. Try --output={mine}-1.\n"
    )
    assert [path.name for path in mine.iterdir()] == ["index.html"]


def test_a_label_of_status_is_found(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs.parent)
    assert report("data-1") == 2
    assert capsys.readouterr().err.endswith(f"{runs.parent}/data-1 is not there. Try runs/data-1.\n")
    (runs.parent / "a b").mkdir()
    assert report("../a b") == 2
    assert capsys.readouterr().err.endswith("/a b is not there. Try 'a b'.\n")


def test_all_errors_are_reported_at_once(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (runs.parent / "empty").mkdir()
    (runs.parent / "file").write_text("")
    monkeypatch.chdir(runs.parent)
    before = sorted(runs.parent.rglob("*"))
    assert report("rums", "empty", "file", "--output", "file/out") == 2
    assert capsys.readouterr().err.splitlines() == [
        "4 problems; nothing was written.",
        f"  {runs.parent}/rums is not there. Try {runs}.",
        f"  {runs.parent}/empty holds no run, nor does any folder in it. Try runs, where `run` puts them.",
        f"  {runs.parent}/file is a file, and a report is on folders.",
        f"  --output = {runs.parent}/file/out can't be made: {runs.parent}/file is no folder that you may "
        "write. Try --output=report.",
    ]
    assert sorted(runs.parent.rglob("*")) == before


@pytest.mark.processes
def test_without_matplotlib_the_tables_are_the_same(reported: Path, tmp_path: Path) -> None:
    hidden = "import sys; sys.modules['matplotlib'] = None; from hpc_parallel.__main__ import main; "
    words = ["report", str(reported), "--output", str(tmp_path / "plain")]
    done = subprocess.run(
        [sys.executable, "-c", f"{hidden}sys.exit(main(sys.argv[1:]))", *words],
        capture_output=True,
        text=True,
    )
    missing = 'No plots: they need matplotlib (pip install "hpc_parallel[report]", or matplotlib itself).'
    assert (done.returncode, done.stderr) == (0, f"{missing}\n")
    plain, whole = tmp_path / "plain", reported / "report"
    assert sorted(path.name for path in plain.rglob("*") if path.is_file()) == [
        "index.html", "report.csv", "report.md",
    ]  # fmt: skip
    assert (plain / "report.csv").read_text() == (whole / "report.csv").read_text()
    tables = [
        [line for line in (folder / "report.md").read_text().splitlines() if line.startswith("|")]
        for folder in (plain, whole)
    ]
    assert len(tables[0]) > 10
    assert tables[0] == tables[1]
    assert missing in html.unescape((plain / "index.html").read_text())
    assert missing not in html.unescape((whole / "index.html").read_text())


def test_runs_in_every_condition(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page and --json tell the same of each; a script needs no page for it."""
    root = tmp_path / "runs"
    folders = [recorded(root / "a" / recorded.__name__) for recorded in
               (finished, failed, recorded_start, half_written, foreign)]  # fmt: skip
    own(folders[2], os.getpid())
    assert report(str(root), "--json") == 0
    rows = {Path(row["folder"]).name: row for row in json.loads(capsys.readouterr().out)}
    assert {name: (row["state"], row["samples_per_s"], row["nodes"]) for name, row in rows.items()} == {
        "finished": ("completed", 31.0, 1),
        "failed": ("failed", 31.0, 1),
        "started": ("running", 32.0, 1),
        "half_written": ("not started", None, 2),
        "foreign": ("completed", 31.0, 1),
    }
    assert not (root / "report").exists()
    assert report(str(root)) == 0
    lines = csv.DictReader(io.StringIO((root / "report" / "report.csv").read_text()))
    for line in lines:
        row = rows[Path(line["folder"]).name]
        assert line == {key: "" if value is None else str(value) for key, value in row.items()}
    page = (root / "report" / "index.html").read_text()
    assert "rank 1 on n1 failed first: ValueError: [no]; 1 follower" in page
    assert "be read: failure.json (it is not UTF-8 (byte 0)), environment.json (it holds a list" in page


def test_json_goes_to_stdout_alone(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        report(str(runs), "--json", "--output", "x")
    assert left.value.code == 2
    assert report("~no_such_user", "--json") == 2
    assert "~no_such_user is not there." in capsys.readouterr().err


def test_a_report_without_any_figure(tmp_path: Path) -> None:
    written(tmp_path / "runs" / "a")
    note(tmp_path / "runs" / "a" / "metrics.jsonl", other=1)
    assert report(str(tmp_path / "runs" / "a")) == 0
    made = tmp_path / "runs" / "a" / "report"
    assert list((made / "plots").iterdir()) == []
    assert "not measured" in (made / "report.md").read_text()


def test_torch_is_not_imported(runs: Path) -> None:
    code = "import sys; from hpc_parallel.__main__ import main; code = main(sys.argv[1:]); "
    code += "sys.exit(code or 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "report", str(runs)],
        env=os.environ, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_a_report_that_is_passed_on_names_no_place_of_the_machine(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs.parent)
    assert report(str(runs), "--output", "out") == 0
    (line,) = csv.DictReader(io.StringIO(Path("out/report.csv").read_text()))
    (run,) = runs.iterdir()
    assert line["folder"] == f"{runs.name}/{run.name}"
    for name in ("index.html", "report.md", "report.csv"):
        assert str(runs) not in Path("out", name).read_text()
