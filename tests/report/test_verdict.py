"""The verdict at the top of a report, and the spread of a throughput, against numbers made by hand."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.report import page
from hpc_parallel.report.figures import Spread, meet, throughput_spread
from hpc_parallel.report.gather import Gathered, Row, gather
from hpc_parallel.report.page import render, table
from hpc_parallel.report.tables import compare, scaling
from hpc_parallel.report.verdict import scope, verdicts
from tests.report.measured_runs import ended, note, started, state

DATA, PIPELINE = ("strategy=data", "nodes=2"), ("strategy=pipeline", "nodes=2")


def rows(tmp_path: Path) -> Sequence[Row]:
    return gather([tmp_path / "runs"]).rows


def texts(tmp_path: Path) -> dict[str, str]:
    return {verdict.title: verdict.text for verdict in verdicts(rows(tmp_path))}


def timed(folder: RunFolder, *rates: float, steps: int = 5) -> RunFolder:
    """Replace its lines of metrics: a slow warm-up, then one line of `steps` steps for each rate."""
    folder.metrics.unlink()
    note(folder.metrics, step=1, samples_per_s=1.0, timed_steps=1, loss=2.0, samples=16)
    for number, rate in enumerate(rates, start=1):
        note(folder.metrics, step=1 + steps * number, samples_per_s=rate, timed_steps=steps)
    return folder


def line(rate: Any, **more: Any) -> dict[str, Any]:
    return {"samples_per_s": rate, **more}


@pytest.mark.parametrize(
    ("rates", "limits"),
    [
        ((30.0, 10.0), None),
        ((30.0, 10.0, 20.0), (10.0, 30.0)),
        ((30.0, 10.0, 20.0, 40.0, 90.0), (20.0, 40.0)),
        (range(1, 10), (3, 7)),
    ],
)
def test_the_spread_has_the_middle_half_of_all_lines_after_the_first(
    rates: Sequence[float], limits: tuple[float, float] | None
) -> None:
    lines = [line(1.0, timed_steps=9), *(line(rate, timed_steps=5) for rate in rates)]
    assert throughput_spread(lines) == Spread(5 * len(rates), limits)


def test_a_line_without_a_timed_step_is_left_out() -> None:
    lines = [line(1.0), *(line(rate, timed_steps=2) for rate in (10, 20, 30)), line(500, timed_steps=0)]
    assert throughput_spread(lines) == Spread(6, (10, 30))


def test_speeds_of_different_batch_sizes_are_no_spread() -> None:
    """Of task=infer: its throughput is that of the best batch size."""
    assert throughput_spread([line(rate, batch_size=rate) for rate in (1, 2, 4, 8, 16)]) == Spread()


@pytest.mark.parametrize("value", ["x", None, True, [1], {}, -1, 0, 2**70, 1e300, float("nan"), 5e-324])
@pytest.mark.parametrize("key", ["samples_per_s", "timed_steps"])
def test_no_strangers_line_is_a_speed(key: str, value: Any) -> None:
    good = [line(rate, timed_steps=1) for rate in (10.0, 20.0, 30.0)]
    assert throughput_spread([{}, *good, {**good[0], key: value}]) == Spread(3, (10.0, 30.0))


def test_ranges_meet_if_they_have_a_value_in_common_or_nearly() -> None:
    others = {(20.0, 30.0): True, (5.0, 40.0): True, (21.0, 30.0): False, (1.0, 9.0): False}
    assert {other: meet((10.0, 20.0), other) for other in others} == others
    assert [meet((10.0, 20.0), (least, 30.0), noise=0.1) for least in (23.0, 23.1)] == [True, False]


def test_three_lines_name_the_winner_the_lead_and_the_spread(tmp_path: Path, new: Callable[[], Path]) -> None:
    timed(ended(new(), *DATA, samples_per_s=40, peak_memory_bytes=400_000, traffic_bytes=9000), 39, 40, 41)
    timed(
        ended(new(), *PIPELINE, samples_per_s=50, peak_memory_bytes=300_000, traffic_bytes=3000), 48, 50, 51
    )
    timed(ended(new(), "strategy=single", samples_per_s=30, peak_memory_bytes=500_000, traffic_bytes=0), 30)
    assert texts(tmp_path) == {
        "Fastest": "pipeline 2 x 1: 50.0 samples/s, 1.25 times as much as data 2 x 1 (40.0 samples/s). It is "
        "the median of the logged means of 15 timed steps; the middle half of them is 48.0 to 51.0 "
        "samples/s.",
        "Leanest": "pipeline 2 x 1: 300 kB on the fullest device, 75.0 % of data 2 x 1 (400 kB). It is the "
        "peak of the run, and has no spread.",
        "Quietest": "pipeline 2 x 1: 3.00 kB sent by all devices in one step, 33.3 % of data 2 x 1 (9.00 "
        "kB). It is counted in one step, and has no spread.",
    }
    assert scope(rows(tmp_path)) == ""


def test_speeds_that_cannot_be_told_apart_have_no_star(tmp_path: Path, new: Callable[[], Path]) -> None:
    timed(ended(new(), *DATA, samples_per_s=40), 38, 40, 44)
    timed(ended(new(), *PIPELINE, samples_per_s=42), 41, 42, 43)
    timed(ended(new(), "strategy=single", samples_per_s=30), 29, 30, 31)
    comparison = compare(rows(tmp_path))
    assert [cells[0].best for cells in comparison.cells] == [False, False, False]
    assert [(cells[0].text, cells[0].spread) for cells in comparison.cells] == [
        ("40.0", "38.0 to 44.0"), ("42.0", "41.0 to 43.0"), ("30.0", "29.0 to 31.0"),
    ]  # fmt: skip
    assert [column.key for column in comparison.columns][:2] == ["samples_per_s", "step_time_s"]
    assert texts(tmp_path)["Fastest"].startswith(
        "pipeline 2 x 1; data 2 x 1 (can't be told apart): 42.0 samples/s, 1.40 times as much as single 1 x "
        "1 (30.0 samples/s). "
    )
    timed(ended(new(), *DATA, "strategy.bucket_mb=1", samples_per_s=50), 49, 50, 51)
    comparison = compare(rows(tmp_path))
    assert [cells[0].best for cells in comparison.cells] == [False, False, False, True]


def test_runs_that_differ_in_keys_of_the_site_have_a_star(tmp_path: Path, new: Callable[[], Path]) -> None:
    """The settings of a star are model, data, task, global batch, precision, optimizer and device."""
    timed(ended(new(), *DATA, samples_per_s=40), 39, 40, 41)
    site = ("cluster.hang_timeout_s=400", "preflight.act=off", "seed=1", "optimizer.learning_rate=0.01")
    timed(ended(new(), *DATA, *site, samples_per_s=50), 49, 50, 51)
    slower, faster = rows(tmp_path)
    assert (slower.settings == faster.settings, scope(rows(tmp_path))) == (True, "")
    assert [cells[0].best for cells in compare(rows(tmp_path)).cells] == [False, True]


@pytest.mark.parametrize("word", ["seed=1", "optimizer.learning_rate=0.01"])
def test_losses_of_runs_with_another_start_or_rate_are_not_compared(
    tmp_path: Path, new: Callable[[], Path], word: str
) -> None:
    for words in ((), ("cluster.hang_timeout_s=400",), (word,)):
        ended(new(), *DATA, *words)
    usual, site, other = rows(tmp_path)
    assert usual.loss_settings == site.loss_settings != other.loss_settings


def test_a_cpu_is_judged_by_the_state_that_is_counted(tmp_path: Path, new: Callable[[], Path]) -> None:
    """The peak of a process includes the interpreter; without counted states it says so."""
    for words, memory, states in ((DATA, 100, state(800, 800)), (PIPELINE, 900, state(400, 600))):
        folder = ended(new(), *words, peak_memory_bytes=memory, rank_state_bytes=states)
        write_json(folder.environment, {"cuda": None})
    assert texts(tmp_path)["Leanest"] == (
        "pipeline 2 x 1: 600 B of weights, gradients and optimizer state on the fullest device, 75.0 % of "
        "data 2 x 1 (800 B). It is counted, and has no spread; activations come on top."
    )
    folder = ended(new(), "strategy=single", peak_memory_bytes=500)
    write_json(folder.environment, {"cuda": None})
    assert texts(tmp_path)["Leanest"] == (
        "not measured: on a CPU the peak of a process contains the interpreter, and not every run has "
        "counted its state."
    )


def test_what_is_not_measured_or_alone_or_alike_is_said(tmp_path: Path, new: Callable[[], Path]) -> None:
    ended(new(), "strategy=single", traffic_bytes=0)
    assert texts(tmp_path) == {
        "Fastest": "single 1 x 1: 100 samples/s, and no other run has this figure. It is the median of the "
        "logged means of 3 timed steps; the middle half of them is 100 to 100 samples/s.",
        "Leanest": "single 1 x 1: 100 MB on the fullest device, and no other run has this figure. It is the "
        "peak of the run, and has no spread.",
        "Quietest": "no completed run with several devices has counted its bytes (training.measure_steps).",
    }
    ended(new(), "strategy=single", "strategy.bucket_mb=3")
    assert texts(tmp_path)["Fastest"].startswith(
        "single 1 x 1, bucket_mb=25; single 1 x 1, bucket_mb=3 (equal): 100 samples/s, like all other runs. "
    )


def test_a_column_without_a_figure_is_left_out(tmp_path: Path, new: Callable[[], Path]) -> None:
    """One device has no bubble and waits for nobody: its zero is no figure."""
    zero = {"bubble_share": 0.0, "exposed_communication_share": 0.0}
    ended(new(), "strategy=single", traffic_bytes=0, **zero)
    absent = {"latency_s", "state_bytes", "bubble_share", "exposed_communication_share", "traffic_bytes"}
    assert not absent & {column.key for column in compare(rows(tmp_path)).columns}
    ended(new(), *PIPELINE, traffic_bytes=0, **zero)
    assert absent & {column.key for column in compare(rows(tmp_path)).columns} == {*zero, "traffic_bytes"}


def test_the_verdict_is_about_completed_runs_of_the_same_work(
    tmp_path: Path, new: Callable[[], Path]
) -> None:
    started(new(), *DATA, samples_per_s=900)
    ended(new(), *DATA, outcome="failed", samples_per_s=900)
    assert verdicts(rows(tmp_path)) == []
    assert scope(rows(tmp_path)) == ""
    assert "None: no run has completed." in render(gather([tmp_path / "runs"])).markdown
    for words, batch, rate in ((DATA, 16, 10), (PIPELINE, 16, 20), (DATA, 64, 900)):
        ended(new(), *words, f"training.global_batch_size={batch}", samples_per_s=rate)
    assert "20.0 samples/s, 2.00 times as much as" in texts(tmp_path)["Fastest"]
    assert scope(rows(tmp_path)).startswith("The verdict is about 2 of 3 completed runs")


@pytest.mark.parametrize("value", [0, 1e18, 1e-18], ids=str)
def test_the_largest_and_smallest_figures_have_a_verdict(
    tmp_path: Path, new: Callable[[], Path], value: float
) -> None:
    ended(new(), *DATA, traffic_bytes=value, peak_memory_bytes=10)
    ended(new(), *PIPELINE, traffic_bytes=10, peak_memory_bytes=10)
    (folder,) = [row.run.path for row in rows(tmp_path) if row.strategy == "data"]
    summary = RunFolder(folder).summary
    write_json(summary, {"outcome": "completed", "samples_per_s": value, "traffic_bytes": value})
    assert len(texts(tmp_path)) == 3


def test_every_form_of_the_report_has_verdict_and_spread(tmp_path: Path, new: Callable[[], Path]) -> None:
    timed(ended(new(), *DATA, samples_per_s=40), 38, 40, 44)
    timed(ended(new(), *PIPELINE, samples_per_s=42), 41)
    gathered = gather([tmp_path / "runs"])
    report = render(gathered)
    for form in (report.html, report.markdown):
        before, _, _ = form.partition("Comparison")
        assert [title in before for title in ("Fastest", "Leanest", "Quietest")] == [True] * 3
        assert "latency" not in form.partition("How to read it")[0].partition("Latency against")[0]
    lines = csv.DictReader(io.StringIO(table(gathered, scaling(gathered.rows))))
    keys = ("samples_per_s_low", "samples_per_s_high", "timed_steps")
    assert [[values[key] for key in keys] for values in lines] == [["38", "44", "15"], ["", "", "5"]]


def test_what_is_not_measured_has_a_title_only_if_there_is_any(
    tmp_path: Path, new: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended(new(), *DATA)
    gathered = gather([tmp_path / "runs"])
    monkeypatch.setattr(page, "_plots", lambda rows, **_: [])
    claim = page._open(page.judged(page.Runs(gathered.rows, [])))[0]
    for claims, text in (([], None), ([claim], "1 claim about"), ([claim] * 2, "2 claims about")):
        monkeypatch.setattr(page, "_open", lambda _, claims=claims: claims)
        report = render(gathered)
        assert ('id="open-claims"' in report.html, "Common claims" in report.markdown) == (bool(claims),) * 2
        assert text is None or text in report.html
    monkeypatch.setattr(page, "_open", lambda _: [])
    monkeypatch.setattr(page, "_unmeasured", lambda drawn: [])
    report = render(gathered)
    assert ("<h2>Not measured" in report.html, "## Not measured" in report.markdown) == (False, False)


def test_a_name_in_the_verdict_is_text(tmp_path: Path, new: Callable[[], Path]) -> None:
    folder = ended(new(), *DATA)
    text = folder.config.read_text()
    folder.config.write_text(text.replace("name: data", "name: '<b>[x](http://y)'"))
    report = render(gather([tmp_path / "runs"]))
    assert "&lt;b&gt;[x](http://y) 2 x 1: 100 samples/s" in report.html
    assert r"&lt;b&gt;\[x\](http&#58;//y) 2 x 1: 100 samples/s" in report.markdown


def test_gathered_without_runs_has_no_verdict() -> None:
    assert verdicts(Gathered([], []).rows) == []


def test_losses_of_other_statistics_of_batch_norm_are_not_compared(
    tmp_path: Path, new: Callable[[], Path]
) -> None:
    ended(new(), *DATA)  # without BatchNorm
    for words, count in ((DATA, 12), (DATA, 12), (PIPELINE, 2)):
        ended(new(), *words, statistics_samples=count)
    told = scope(rows(tmp_path))
    assert told.startswith("Losses can't be compared: BatchNorm takes its statistics over 2 samples in pipe")
    assert "; 12 samples in data" in told
    assert told.endswith("training.microbatch_size (times the replicas) decides it.")
    assert told in page.render(gather([tmp_path / "runs"])).markdown.replace("\\", "")


def test_losses_of_runs_that_keep_other_parts_in_bfloat16_are_not_compared(
    tmp_path: Path, new: Callable[[], Path]
) -> None:
    for kept in (None, "weights", "weights"):
        ended(new(), *DATA, in_bfloat16=kept)
    told = scope(rows(tmp_path))
    assert "runs keep other parts in bfloat16: nothing in data" in told
    assert "; weights in data" in told


@pytest.mark.parametrize(
    ("first", "second", "differences"),
    [
        ({"torch": "2.11.0"}, {"torch": "2.13.0"}, ("torch 2.11.0 in data", "torch 2.13.0 in data")),
        ({"git_commit": "a" * 40}, {"git_commit": "b" * 40}, ("commit aaaaaaaa in", "commit bbbbbbbb in")),
        (
            {"git_commit": "a" * 40, "git_diff": "+1\n"},
            {"git_commit": "a" * 40, "git_diff": "+2\n"},
            ("aaaaaaaa with changes edd19ebf", "aaaaaaaa with changes c6fccd7c"),
        ),
        ({"torch": "2.11.0"}, {"torch": 7}, ()),  # not known
    ],
)
def test_runs_of_other_software_are_named(
    first: dict[str, Any],
    second: dict[str, Any],
    differences: Sequence[str],
    tmp_path: Path,
    new: Callable[[], Path],
) -> None:
    for values in (first, second):
        write_json(ended(new(), *DATA).environment, values)
    note = scope(rows(tmp_path))
    assert bool(note) == bool(differences)
    assert all(text in note for text in differences)


def test_runs_that_share_a_gpu_are_not_compared_with_others(tmp_path: Path, new: Callable[[], Path]) -> None:
    for runs, rate in ((1, 100), (1, 110), (2, 60)):
        folder = ended(new(), *DATA, samples_per_s=rate)
        content = folder.config.read_text()
        folder.config.write_text(content.replace("runs_per_gpu: 1", f"runs_per_gpu: {runs}"))
    assert scope(rows(tmp_path)).startswith("The verdict is about 2 of 3 completed runs")
