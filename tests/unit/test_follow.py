"""What a follower shows of a run: its steps as they come, its end, and the cause as the last line."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hpc_parallel.launch.follow import RunFollower
from hpc_parallel.record import attempts
from hpc_parallel.record.checkpoint_index import MARKER
from hpc_parallel.record.collectives_file import CollectiveRow, row_cells
from hpc_parallel.record.metrics_file import SEPARATOR, MetricsLine, MetricsReader, described, figure, fitting
from hpc_parallel.record.rank_output import OutputTail
from hpc_parallel.record.run_folder import RunFolder, note_phase
from hpc_parallel.record.safe_write import write_json

LINE = {"step": 120, "samples": 1920, "loss": 2.41318, "samples_per_s": 512.4}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run [1]")  # brackets are no markup
    made.create()
    made.config.touch()
    return made


def add(folder: RunFolder, text: str) -> None:
    with folder.metrics.open("a") as file:
        file.write(text)


def follower(
    folder: RunFolder, *, terminal: bool = False, columns: int = 100
) -> tuple[RunFollower, io.StringIO]:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=terminal, width=columns)
    return RunFollower(folder, steps=600, console=console), shown


def test_a_reader_that_has_ended_is_an_error(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher saves the run after it, as with `| head`; rich's own exit killed the ranks."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(BrokenPipeError):
            RunFollower(folder, steps=600).note("starting")


def test_half_a_line_waits_for_its_end(folder: RunFolder) -> None:
    reader = MetricsReader(folder.metrics)
    assert reader.read() == []  # not even a file
    text = json.dumps(LINE) + "\n"
    for cut in range(1, len(text)):
        add(folder, text[:cut])
        assert reader.read() == []
        add(folder, text[cut:])
        assert reader.read() == [LINE]


def test_a_long_file_takes_the_memory_of_its_lines_once(folder: RunFolder) -> None:
    """A line that a reader has returned costs it a hash, not its step and its time."""
    count, keys = 20_000, [f"key_{number}" for number in range(8)]
    for step in range(count):
        add(folder, json.dumps({"step": step, "time": f"t{step}", **dict.fromkeys(keys)}) + "\n")
    reader = MetricsReader(folder.metrics)
    tracemalloc.start()
    lines = reader.read()
    peak = tracemalloc.get_traced_memory()[1]
    parts = (sys.getsizeof(part) for line in lines for part in (line, line["step"], line["time"]))
    assert peak < 1.6 * sum(parts)  # without the keys of each line, and the content of the file
    assert (len(lines), lines[-1]["step"]) == (count, count - 1)
    lines.clear()
    kept_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept_bytes < sys.getsizeof(set(range(count))) + 48 * count  # an integer takes 32 bytes
    assert reader.read() == []


def test_a_torn_line_is_passed_over(folder: RunFolder) -> None:
    reader = MetricsReader(folder.metrics)
    add(folder, '{"step": 1\n' + json.dumps(LINE) + "\n[]\n\n\xff\n")
    assert reader.read() == [LINE]


@pytest.mark.parametrize(
    ("extra", "line"),
    [
        ({}, "step 120/600  loss 2.413  512 samples/s"),
        ({"validation_loss": 2.5}, "step 120/600  loss 2.413  validation loss 2.5  512 samples/s"),
        ({"samples_per_s": 1.2345}, "step 120/600  loss 2.413  1.23 samples/s"),
        ({"samples_per_s": None, "loss": None}, "step 120/600  loss not finite"),
        (
            {"skipped_steps": 3, "skipped_step": 117, "loss_scale_before": 65536.0, "loss_scale": 32768.0},
            "step 120/600  loss 2.413  skipped step 117, which is not finite  loss scale 65536 -> 32768"
            "  512 samples/s",
        ),
    ],
)
def test_a_line_of_metrics(extra: dict[str, Any], line: str) -> None:
    assert described(MetricsLine.of({**LINE, **extra}), steps=600) == line.split(SEPARATOR)


@pytest.mark.parametrize(
    ("metrics", "line"),
    [
        (
            {"step": 1, "validation_loss": 5.5, "samples_per_s": 9.0},
            "step 1/3  validation loss 5.5  9 samples/s",
        ),
        (
            {"step": 2, "batch_size": 4, "latency_s": 0.00312, "samples_per_s": 1282.1, "tokens_per_s": 1e5},
            "step 2/3  batch size 4  latency 3.12 ms  1282 samples/s",
        ),
        ({"step": 3, "step_time_s": 0.1, "tokens_per_s": 160.0}, "step 3/3  160 tokens/s"),
    ],
)
def test_a_line_of_a_task_that_trains_nothing(metrics: dict[str, Any], line: str) -> None:
    assert described(MetricsLine.of(metrics), steps=3) == line.split(SEPARATOR)


@pytest.mark.parametrize(
    "first_step", ["step 1/600  loss 5.5  9 samples/s", "  1/180  fp32 4096  1.2 ms", ""]
)
def test_what_rank_0_says_before_its_first_step_is_shown(folder: RunFolder, first_step: str) -> None:
    following, shown = follower(folder)
    said = "packing: 4 training documents in 5 samples of 8, 95.0% full"
    with folder.log(0, "out").open("a") as log:
        log.write(f"rank 0 of 2 on n1 (10.0.0.1), cpu\n{said}\n")
        log.flush()
        following.poll()
        log.write(f"{first_step}\nof a callback\n" if first_step else "")
    write_json(folder.summary, {"outcome": "completed"})
    following.finish()
    assert shown.getvalue().splitlines()[:2] == [said, "completed: step 0 of 600"]


def test_warnings_of_rank_0_are_shown_whenever_they_come(folder: RunFolder) -> None:
    """Also after the first step, when nothing else of its output is shown; not those of an earlier start."""
    log = folder.log(0, "err")
    log.write_text("WARNING: of an earlier start\n")
    following, shown = follower(folder)
    said = [f"WARNING: the checkpoint of step {step} could not be written (full)" for step in (60, 180)]
    with log.open("a") as file:
        file.write(f"noise\n{said[0]}\n")
    following.poll()
    add(folder, json.dumps(LINE) + "\n")
    with log.open("a") as file:
        file.write(f"{said[1]}\n")
    write_json(folder.summary, {"outcome": "completed"})
    following.finish()
    step = "step 120/600  loss 2.413  512 samples/s"
    assert [line for line in shown.getvalue().splitlines() if line in (*said, step)] == [
        said[0],
        said[1],
        step,
    ]
    assert "noise" not in shown.getvalue()
    assert "earlier" not in shown.getvalue()


def test_plain_lines_of_a_completed_run(folder: RunFolder) -> None:
    following, shown = follower(folder)
    following.note("starting")
    following.note("starting")
    add(folder, json.dumps({**LINE, "validation_loss": 5.5}) + "\n")
    following.poll()
    add(folder, json.dumps({**LINE, "step": 600, "loss": 2.0, "validation_loss": 2.05}) + "\n")
    write_json(folder.summary, {"outcome": "completed"})
    assert following.finish() == 0
    assert shown.getvalue().splitlines() == [
        "starting",
        "step 120/600  loss 2.413  validation loss 5.5  512 samples/s",
        "step 600/600  loss 2  validation loss 2.05  512 samples/s",
        "completed: step 600 of 600, loss 2, validation loss 5.5 -> 2.05",
        f"results: {folder.path}",
        f"plots: python -m hpc_parallel report '{folder.path}'",
    ]


def test_losses_that_are_not_finite_are_named(folder: RunFolder) -> None:
    """The last validation counts at the end, not the last one that was finite."""
    following, shown = follower(folder)
    for step, loss in ((1, 5.5), (2, None)):
        add(folder, json.dumps({"step": step, "loss": loss, "validation_loss": loss}) + "\n")
    following.finish()
    assert shown.getvalue().splitlines()[:3] == [
        "step 1/600  loss 5.5  validation loss 5.5",
        "step 2/600  loss not finite  validation loss not finite",
        "failed: step 2 of 600, loss not finite, validation loss 5.5 -> not finite",
    ]


def test_the_end_names_the_plot_that_was_drawn(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.path.parent)
    following, shown = follower(folder)
    add(folder, json.dumps(LINE) + "\n")
    folder.plots.mkdir()
    (folder.plots / "loss.png").write_bytes(b"")
    following.finish()
    report = "python -m hpc_parallel report 'run [1]'"
    end = f"results: run [1]\nplots: run [1]/plots/loss.png; all: {report}\n"
    assert shown.getvalue().endswith(end)


def test_a_bar_in_a_terminal(folder: RunFolder) -> None:
    following, shown = follower(folder, terminal=True)
    following.note("PENDING (Resources)")
    add(
        folder, json.dumps({**LINE, "validation_loss": 2.5}) + "\n" + json.dumps({**LINE, "step": 130}) + "\n"
    )
    following.poll()
    write_json(folder.summary, {"outcome": "completed"})
    assert following.finish() == 0
    assert "PENDING (Resources)" in shown.getvalue()
    assert "step 130/600  loss 2.413  512 samples/s" in shown.getvalue()
    assert "━" in shown.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_after_a_failure_the_cause_is_the_last_line(folder: RunFolder, terminal: bool) -> None:
    line = "rank 5 on n2 failed first: ValueError: no label; 3 followers"
    words = [f"noise {count}" for count in range(30)] + ["Traceback:", "  [a] = b", "ValueError: no label"]
    write_json(folder.failure, {"rank": 5, "signal": None, "traceback": words, "line": line})
    write_json(folder.summary, {"outcome": "failed"})
    following, shown = follower(folder, terminal=terminal)
    assert following.finish() == 1
    lines = shown.getvalue().splitlines()
    assert lines[:3] == ["noise 21", "noise 22", "noise 23"]
    assert lines[-6:] == [
        "Traceback:",
        "  [a] = b",
        "ValueError: no label",
        "failed: step 0 of 600",
        f"results: {folder.path}",
        line,
    ]


def test_a_run_whose_folder_was_removed_says_so(folder: RunFolder) -> None:
    following, shown = follower(folder)
    shutil.rmtree(folder.path)
    folder.logs.mkdir(parents=True)  # by a rank that was not told
    write_json(
        folder.failure, {"rank": None, "traceback": [], "line": "the job failed before any rank started"}
    )
    assert following.finish() == 1
    assert shown.getvalue().splitlines() == [
        f"failed: {folder.config} is gone. Was the run folder removed or renamed?"
    ]


@pytest.mark.parametrize(("signal", "shown_lines"), [("SIGSEGV", 1), ("SIGKILL", 0)])
def test_a_crash_shows_the_output_of_the_rank(folder: RunFolder, signal: str, shown_lines: int) -> None:
    write_json(folder.failure, {"rank": 5, "signal": signal, "traceback": [], "line": "rank 5"})
    write_json(folder.summary, {"outcome": "failed"})
    folder.log(5, "err").write_text("Fatal Python error: Segmentation fault\n")
    following, shown = follower(folder)
    assert following.finish() == 1
    assert shown.getvalue().count("Segmentation fault") == shown_lines


def test_a_long_line_of_a_rank_is_cut_with_a_mark(folder: RunFolder) -> None:
    log = folder.log(0, "out")
    log.touch()
    tail = OutputTail(log)
    log.write_text(f"{'x' * 500}\n{'y' * 1200}\n")
    assert tail.read() == ["x" * 500, f"{'y' * 500} ... (1,200 characters)"]


def test_a_failure_before_any_rank_shows_its_log(folder: RunFolder) -> None:
    write_json(folder.failure, {"rank": None, "traceback": ["module: not found"], "line": "the job failed"})
    write_json(folder.summary, {"outcome": "failed"})
    following, shown = follower(folder)
    assert following.finish() == 1
    assert shown.getvalue().splitlines()[0] == "module: not found"
    assert shown.getvalue().splitlines()[-1] == "the job failed"


@pytest.mark.parametrize("outcome", ["cancelled", "preempted"])
def test_other_ends(folder: RunFolder, outcome: str) -> None:
    write_json(folder.summary, {"outcome": outcome})
    add(folder, json.dumps(LINE) + "\n")
    following, shown = follower(folder)
    assert following.finish() == 1
    assert f"{outcome}: step 120 of 600, loss 2.413" in shown.getvalue()


ROWS = [
    {"batch_size": 1, "latency_s": 0.0031, "latency_p99_s": 0.00425, "samples_per_s": 322.6},
    {"batch_size": 16, "latency_s": 0.031, "latency_p99_s": 0.125, "samples_per_s": 516.1},
]


def test_an_inference_ends_with_its_table(folder: RunFolder) -> None:
    write_json(folder.summary, {"outcome": "completed", "batch_sizes": ROWS, "weights": "initial"})
    following, shown = follower(folder)
    assert following.finish() == 0
    assert shown.getvalue().splitlines() == [
        "batch size  latency      p99  samples/s",
        "         1   3.1 ms  4.25 ms        323",
        "        16    31 ms   125 ms        516",
        "the weights are the initial ones: nothing was trained or restored",
        "completed: step 0 of 600",
        f"results: {folder.path}",
    ]


def test_a_generation_ends_with_its_first_texts(folder: RunFolder) -> None:
    folder.config.write_text("task: {name: generate, show: 2}\n")
    found = [{"prompt": "a\u2028\x1b[31m", "text": "b\n"}, {"prompt": "é", "text": "\ufffd"}, {}, {}]
    folder.generated.write_text("".join(json.dumps(line) + "\n" for line in found))
    write_json(folder.summary, {"outcome": "completed", "weights": "initial"})
    following, shown = follower(folder)
    assert following.finish() == 0
    assert shown.getvalue().splitlines()[:3] == [
        r"'a\u2028\x1b[31m' -> 'b\n'",
        "'é' -> '\ufffd'",
        "and 2 more in generated.jsonl",
    ]


def line(step: int, *, attempt: int = 1, **figures: Any) -> str:
    """A line of metrics; each attempt has times of its own."""
    loss = round(3 - step / 1000, 3)
    return (
        json.dumps({"step": step, "loss": loss, "time": f"2026-11-25T0{attempt}:00:{step:02}", **figures})
        + "\n"
    )


def test_a_resumed_run_shows_only_its_new_lines(folder: RunFolder) -> None:
    """The start removes the lines of the steps that it trains again, so the file gets shorter."""
    add(folder, line(10, validation_loss=5.5) + line(20) + line(30))
    following, shown = follower(folder)
    following.poll()
    folder.metrics.write_text(line(10, validation_loss=5.5) + line(20))  # it continues after step 20
    following.poll()
    add(folder, line(30, attempt=2) + line(40, attempt=2))
    write_json(folder.summary, {"outcome": "completed"})
    following.finish()
    assert shown.getvalue().splitlines()[:3] == [
        "step 30/600  loss 2.97",
        "step 40/600  loss 2.96",
        "completed: step 40 of 600, loss 2.96, validation loss 5.5",
    ]


def test_a_restart_does_not_show_lines_again(folder: RunFolder) -> None:
    reader = MetricsReader(folder.metrics)
    add(folder, line(10) + line(20) + line(30))
    assert [metrics["step"] for metrics in reader.read()] == [10, 20, 30]
    folder.metrics.write_text(line(10))
    assert reader.read() == []
    add(folder, line(20, attempt=2))
    assert [metrics["step"] for metrics in reader.read()] == [20]


def plain(shown: io.StringIO) -> str:
    """What a terminal got, without control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())


def test_results_stay_in_the_scroll_back(folder: RunFolder) -> None:
    """A bar is drawn over itself (carriage return); a line that stays has its end."""
    following, shown = follower(folder, terminal=True)
    for text in (line(10), line(20, validation_loss=5.5), line(30)):
        add(folder, text)
        following.poll()
    write_json(folder.summary, {"outcome": "completed"})
    following.finish()
    lasting = [text.rpartition("\r")[2] for text in plain(shown).split("\n")]
    assert "step 20/600  loss 2.98  validation loss 5.5" in lasting
    assert "step 10/600  loss 2.99" not in lasting


WHOLE = "step 20/600  loss 2.98  validation loss 5.5  accuracy 0.125  1520 samples/s"


@pytest.mark.parametrize(
    ("columns", "lasting", "beside_bar"),
    [
        (40, "step 20/600  validation loss 5.5", "step 20/600  loss 2.98"),
        (80, WHOLE, "step 20/600  loss 2.98  validation loss 5.5"),
        (120, WHOLE, WHOLE),
    ],
)
def test_a_terminal_gets_as_much_as_it_has_room_for(
    folder: RunFolder, columns: int, lasting: str, beside_bar: str
) -> None:
    following, shown = follower(folder, terminal=True, columns=columns)
    add(folder, line(20, validation_loss=5.5, validation_accuracy=0.125, samples_per_s=1520.4))
    following.poll()
    write_json(folder.summary, {"outcome": "completed"})
    following._bar.stop()
    drawn = [part.rstrip() for text in plain(shown).split("\n") for part in text.split("\r")]
    assert max(map(len, drawn)) <= columns
    assert ("━" in plain(shown)) == (columns >= 60)
    assert drawn[0] == lasting
    newest = next(text for text in reversed(drawn) if text)
    assert newest.lstrip("━╸ ").removesuffix(" -:--:--") == beside_bar


@pytest.mark.parametrize(
    ("value", "digits", "shown"),
    [(1520.4, 3, "1520"), (99.96, 3, "100"), (12345.6, 4, "12346"), (2.41318, 4, "2.413"),
     (0.00031, 3, "0.00031"), (-15200.0, 4, "-15200"), (0.0, 4, "0"), (-1e30, 4, "-1e+30")],
)  # fmt: skip
def test_no_figure_of_a_thousand_has_an_exponent(value: float, digits: int, shown: str) -> None:
    assert figure(value, digits=digits) == shown


def test_the_start_names_what_it_does(folder: RunFolder) -> None:
    following, shown = follower(folder)
    following.note("starting")
    for phase in ("importing torch", "connecting 2 ranks", "connecting 2 ranks"):
        note_phase(folder, phase)
        following.poll()
        following.note("starting")
    add(folder, line(10))
    following.poll()
    note_phase(folder, "drawing the plots")
    following.poll()
    assert shown.getvalue().splitlines() == [
        "starting", "starting: importing torch", "starting: connecting 2 ranks", "step 10/600  loss 2.99",
        "drawing the plots",
    ]  # fmt: skip


def test_a_phase_of_others_is_harmless(folder: RunFolder) -> None:
    following, shown = follower(folder)
    folder.phase.write_bytes(b"\x1b[2J" + b"x" * 10_000)
    following.poll()
    assert "\x1b" not in shown.getvalue()
    assert len(shown.getvalue()) < 200


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGINT, "cancelled by Ctrl-C"), (signal.SIGTERM, "cancelled by SIGTERM")],
)
def test_ctrl_c_is_called_ctrl_c(folder: RunFolder, number: int, words: str) -> None:
    write_json(folder.summary, {"outcome": "cancelled"})
    following, shown = follower(folder)
    assert following.finish([number]) == 1
    assert shown.getvalue().splitlines()[0] == f"{words}: step 0 of 600"


def test_a_new_start_is_announced_with_its_reason(folder: RunFolder) -> None:
    """The steps began again, and nobody was told that a rank had been killed."""
    attempts.end(folder, how="killed", line="an end before this command")
    following, shown = follower(folder)
    for phase in ("importing torch", "first steps"):
        note_phase(folder, phase)
        following.poll()
    attempts.end(folder, how="killed", line="rank 1 on n1 failed first: killed by SIGKILL")
    attempts.end(folder, how="time_limit")
    following.poll()
    attempts.note(folder, "launched")
    attempts.end(folder, how="error", line="the end of this start, which is being written")
    folder.failure.write_text("{}")
    for phase in ("importing torch", "first steps"):
        note_phase(folder, phase)
        following.poll()
    assert shown.getvalue().splitlines() == [
        "starting: importing torch",
        "starting: first steps",
        "rank 1 on n1 failed first: killed by SIGKILL; it starts again",
        "time limit; it starts again",
        "starting: importing torch",
        "starting: first steps",
    ]


def test_a_failed_run_prints_the_line_that_continues_it(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.path.parent)
    for step in (10, 20):
        (folder.checkpoints / f"step-{step}").mkdir(parents=True)
        (folder.checkpoints / f"step-{step}" / MARKER).write_text("x")
    write_json(folder.failure, {"rank": 1, "signal": "SIGKILL", "line": "rank 1 failed first"})
    write_json(folder.summary, {"outcome": "failed"})
    following, shown = follower(folder)
    following.finish()
    assert shown.getvalue().splitlines()[-2:] == [
        """continue after step 20: python -m hpc_parallel.run "resume='run [1]'\"""",
        "rank 1 failed first",
    ]
    plain = folder.path.parent / "runs" / "base" / "2026-1"
    shutil.copytree(folder.path, plain)
    following, shown = follower(RunFolder(plain))
    following.finish()
    hint = "continue after step 20: python -m hpc_parallel.run resume=runs/base/2026-1"
    assert hint in shown.getvalue().splitlines()
    shown = io.StringIO()
    RunFollower(RunFolder(plain), console=Console(file=shown), steps=20).finish()
    assert "resume=" not in shown.getvalue()  # it would be refused: all steps are done


ROW = CollectiveRow(
    group="world", ranks=2, operation="all_reduce", dtype="float32", size_bytes=2**20, time_s=621.7e-6,
    spread=0.1, rounds=8, algbw_bytes_per_s=1e9, busbw_bytes_per_s=1e9,
)  # fmt: skip


def test_measured_rows_are_shown_as_they_come(folder: RunFolder) -> None:
    measured = {"step": 7, "steps": 183, "measured": row_cells(ROW), "time_left_s": 42.0, **ROW.measured}
    parts = described(MetricsLine.of(measured), steps=0)
    assert "  ".join(parts) == (
        "  7/183  all_reduce        1.0 MiB     621.7 us  float32     1.000 GB/s  world"
    )
    assert fitting(parts[1:], columns=40) == "all_reduce        1.0 MiB     621.7 us"
    following, shown = follower(folder, terminal=True, columns=80)
    add(folder, json.dumps(measured) + "\n")
    following.poll()
    assert "all_reduce        1.0 MiB     621.7 us  float32     1.000 GB/s  world\n" in plain(shown)
    assert "7/183 measured  at most 42 s left" in plain(shown)


@pytest.mark.parametrize("cells", [[], "x", None, {}, 3])
def test_a_measured_row_of_others_without_cells_is_a_line_of_progress(
    folder: RunFolder, cells: object
) -> None:
    following, shown = follower(folder, terminal=True)
    add(folder, json.dumps({"step": 1, "steps": 183, "measured": cells}) + "\n")
    following.poll()
    following._bar.stop()
    assert "step 1/600" in plain(shown)
    assert fitting([], columns=80) == ""


def test_a_killed_measurement_shows_the_rows_that_are_done(folder: RunFolder) -> None:
    add(folder, json.dumps({"step": 1, "steps": 183, "measured": row_cells(ROW), **ROW.measured}) + "\n")
    write_json(folder.summary, {"outcome": "cancelled"})
    following, shown = follower(folder)
    following.finish()
    assert "world (2)  all_reduce  float32  621.7 us     1.000 GB/s  1048576 B" in shown.getvalue()
