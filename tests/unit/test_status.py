"""`status`: the state, pace and time left of runs in every condition, with few looks at files and Slurm."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hpc_parallel.__main__ import main
from hpc_parallel.commands.status import _page, _table, rows_of
from hpc_parallel.record import attempts, owner
from hpc_parallel.record.metrics_file import duration
from hpc_parallel.record.recorded import read_run
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.record.sweep_folder import SkippedRun, Sweep, SweepRun, write_sweep
from hpc_parallel.slurm.jobs import Job, JobState, _parsed
from tests.recorded_runs import GONE, failed, finished, foreign, half_written, living, own, prepared, started

PIPELINE = ("strategy=pipeline", "nodes=2", "training.steps=100")
_events: list[str] | None = None
pytestmark = pytest.mark.usefixtures("silent_slurm")


def rows(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(["status", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def row(capsys: pytest.CaptureFixture[str], path: Path) -> dict[str, Any]:
    (found,) = rows(capsys, str(path))
    return found


def test_a_finished_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = finished(tmp_path / "runs/pipeline/1", *PIPELINE)
    assert row(capsys, folder.path) == {
        "run": "pipeline/1", "path": str(folder.path), "strategy": "pipeline", "nodes": 2, "gpus_per_node": 1,
        "state": "completed", "reason": "", "ended": True, "step": 30, "steps": 100, "loss": 4 / 30,
        "samples_per_s": 31.0, "time_left_s": None, "job_left_s": None, "restarts": 0, "useful_share": None,
        "job_id": None, "failure": None, "last_line": None, "damaged": {},
    }  # fmt: skip


def test_a_run_that_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = started(tmp_path / "runs/pipeline/1", *PIPELINE)
    attempts.begin(folder, step=20, environment={})  # after a failure: ten steps were lost
    own(folder, os.getpid())
    found = row(capsys, folder.path)
    assert (found["state"], found["ended"], found["restarts"]) == ("running", False, 1)
    assert (found["step"], found["time_left_s"]) == (20, 80 * 0.5)
    assert (found["loss"], found["samples_per_s"]) == (0.2, 32.0)


def test_a_new_layout_has_no_speed_before_its_first_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = started(tmp_path / "runs/pipeline/1", *PIPELINE)
    attempts.begin(folder, step=30, environment={}, layout={"nodes": 4})
    own(folder, os.getpid())
    expected: list[tuple[float | None, ...]] = [(30, None, None, None), (40, 64.0, 60 * 0.25, 0.25)]
    for step, rate, left_s, step_time_s in expected:
        found = row(capsys, folder.path)
        assert main(["show", "--json", str(folder.path)]) == 0
        figures = json.loads(capsys.readouterr().out)["figures"]
        assert (found["step"], found["samples_per_s"], found["time_left_s"]) == (step, rate, left_s)
        assert (figures["samples"], figures.get("step_time_s")) == (16 * step, step_time_s)
        line = {"step": 40, "samples": 640, "loss": 0.1, "step_time_s": 0.25, "samples_per_s": 64.0}
        with folder.metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")


def test_nobody_knows_how_long_a_broken_run_was_useful(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All the time since it broke would count as lost."""
    found = row(capsys, started(tmp_path / "runs/pipeline/1", *PIPELINE).path)
    assert (found["state"], found["useful_share"]) == ("broken off", None)


def test_a_failed_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = failed(tmp_path / "runs/pipeline/1", *PIPELINE)
    found = row(capsys, folder.path)
    assert (found["state"], found["reason"], found["time_left_s"]) == ("failed", "error", None)
    assert found["failure"] == "rank 1 on n1 failed first: ValueError: [no]; 1 follower"
    assert main(["status", "1"]) == 0
    out = capsys.readouterr().out
    assert "failed (error)" in out
    assert "pipeline/1: rank 1 on n1 failed first: ValueError: [no]; 1 follower\n" in out


def test_a_half_written_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = row(capsys, half_written(tmp_path / "runs/a/1").path)
    assert (found["state"], found["ended"], found["strategy"], found["nodes"]) == (
        "not started",
        True,
        None,
        2,
    )
    assert (found["step"], found["steps"], found["loss"]) == (None, None, None)


def test_a_stranger_in_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = row(capsys, foreign(tmp_path / "runs/a/1").path)
    assert (found["state"], found["step"], found["failure"], found["restarts"]) == ("completed", 30, None, 0)
    assert main(["status"]) == 0
    assert "completed" in capsys.readouterr().out


def test_a_living_process_gives_the_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    waits = prepared(tmp_path / "runs/a/1")
    began = started(tmp_path / "runs/a/2")
    assert row(capsys, waits.path)["state"] == "not started"
    assert [row(capsys, began.path)[key] for key in ("state", "ended")] == ["broken off", True]
    with living() as process:
        for folder in (waits, began):
            own(folder, process.pid)
        assert row(capsys, waits.path)["state"] == "starting"
        assert row(capsys, began.path)["state"] == "running"
    assert row(capsys, began.path)["state"] == "broken off"  # the number of a process that is gone
    write_json(began.owner, {"host": "elsewhere", "pid": 1, "began": "x"})
    found = row(capsys, began.path)
    assert (found["state"], found["reason"], found["ended"]) == (
        "unknown",
        "its process is on elsewhere",
        False,
    )


def test_without_slurm_the_folder_gives_the_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = started(tmp_path / "runs/a/1")
    write_json(folder.owner, {"job_id": "17"})
    found = row(capsys, folder.path)
    assert (found["state"], found["reason"], found["job_id"]) == ("unknown", "Slurm does not answer", "17")
    done = finished(tmp_path / "runs/a/2")
    write_json(done.owner, {"job_id": "18"})
    assert row(capsys, done.path)["state"] == "completed"


def test_a_job_of_another_cluster_has_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its number means nothing to the Slurm that this shell asks, so nobody takes the run."""
    folder = started(tmp_path / "runs/pipeline/1")
    monkeypatch.setenv("SLURM_CLUSTERS", "big")
    owner.hand_to_job(folder, Job("7"))
    monkeypatch.delenv("SLURM_CLUSTERS")
    reason = "its job is on another cluster. Try export SLURM_CLUSTERS=big"
    assert (row(capsys, folder.path)["state"], row(capsys, folder.path)["reason"]) == ("unknown", reason)
    with pytest.raises(owner.OwnedError, match=re.escape(f"job 7 ({reason})")):
        owner.claim(folder)
    assert main(["cancel", str(folder.path)]) != 0
    assert reason in capsys.readouterr().err
    owner.hold_by_job(folder, "7")  # in the job, whose environment may lack the variable
    assert json.loads(folder.owner.read_text()) == {"job_id": "7", "clusters": "big"}


def test_slurms_lists() -> None:
    """As sacct 22.05 and squeue print them; an array's task is known by both of its ids."""
    text = (
        "7|7|CANCELLED by 1000|00:00:09|01:00:00\n9_0|10|RUNNING|00:01:30|01:00:00\n"
        "9_[1-2,5%2]|9|PENDING|0:00|1:00:00|N/A|Resources\n"
    )
    listed = _parsed(text.splitlines())
    assert [listed[job].left_s for job in ("7", "9_0", "9_1")] == [None, 3510, None]
    assert listed == {
        "7": JobState("CANCELLED"), "9_0": JobState("RUNNING"), "10": JobState("RUNNING"),
        **{job: JobState("PENDING", "Resources") for job in ("9", "9_1", "9_2", "9_5")},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("passed", "limit", "left_s"),
    [
        ("0:07", "1:00", 53), ("1-02:00:00", "2-00:00:30", 22 * 3600 + 30), ("00:05:00", "00:04:00", 0),
        ("3:00", "UNLIMITED", None), ("3:00", "Partition_Limit", None), ("INVALID", "1:00", None),
    ],
)  # fmt: skip
def test_the_time_until_slurms_limit(passed: str, limit: str, left_s: float | None) -> None:
    assert _parsed([f"7|7|RUNNING|{passed}|{limit}|N/A|None"])["7"].left_s == left_s


def test_a_run_that_goes_on_shows_its_last_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That of the log which was written last, as a terminal would show it; and it cannot write to one."""
    folder = started(tmp_path / "runs/pipeline/1")
    assert row(capsys, folder.path)["last_line"] is None  # it has ended
    own(folder, os.getpid())
    assert row(capsys, folder.path)["last_line"] == "rank 0 on n1"
    out, err = folder.log(0, "out"), folder.log(0, "err")
    err.write_bytes(b"x\n" * 10**6 + b"10 %\r20 %\x1b[2J\xff" + b"y" * 200 + b"\r\n\n")
    os.utime(out, (1, 1))
    expected = "20 %\\x1b[2J\ufffd" + "y" * 200
    assert row(capsys, folder.path)["last_line"] == expected
    assert main(["status"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"pipeline/1: {expected}"  # a file has room
    shown = io.StringIO()
    Console(file=shown, width=80).print(_page(rows_of([read_run(folder.path)]), columns=80))
    assert shown.getvalue().splitlines()[-1] == f"pipeline/1: {expected}"[:79] + "…"
    err.unlink()
    os.mkfifo(err)  # in place of a log
    assert row(capsys, folder.path)["last_line"] == "rank 0 on n1"


def test_many_last_lines_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(12):
        own(started(tmp_path / f"runs/a/{number:02}"), os.getpid())
    assert main(["status", "--all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "what 2 more have printed last: --json"
    assert [line.partition(": ")[2] for line in lines[-11:-1]] == ["rank 0 on n1"] * 10


def test_the_newest_and_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(12):
        folder = finished(tmp_path / f"runs/a/{number:02}")
        os.utime(folder.config, (number, number))
    assert [found["run"] for found in rows(capsys)] == [f"a/{number:02}" for number in range(11, 1, -1)]
    assert len(rows(capsys, "--all")) == 12
    assert main(["status"]) == 0
    assert "2 older ones: --all" in capsys.readouterr().out


def test_a_sweep_in_its_own_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [finished(tmp_path / "runs/b/2").path, failed(tmp_path / "runs/a/1").path]
    runs = tuple(SweepRun(("nodes=1",), path, nodes=1, gpus_per_node=1) for path in paths)
    skipped = (SkippedRun(("nodes=3", "strategy=x"), ("nodes = 3 is odd.",)),)
    sweep = tmp_path / "runs/sweeps/20261122"
    sweep.mkdir(parents=True)
    write_sweep(sweep, Sweep(("-m",), "2026-11-22T01:00:00+00:00", None, runs, skipped))
    assert [found["run"] for found in rows(capsys, "20261122")] == ["b/2", "a/1"]
    assert main(["status", str(sweep)]) == 0
    out = capsys.readouterr().out
    assert "1 completed, 1 failed" in out
    assert "left out: nodes=3 strategy=x: nodes = 3 is odd.\n" in out


def test_runs_of_a_sweep_without_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = RunFolder(tmp_path / "sweep")
    sweep.path.mkdir()
    runs = tuple(
        SweepRun((f"seed={seed}",), tmp_path / f"runs/a/{seed}", nodes=1, gpus_per_node=1, job_id=job)
        for seed, job in ((1, None), (2, "7_1"))
    )
    write_sweep(sweep.path, Sweep(("-m",), "2026-11-22T01:00:00+00:00", None, runs, ()))

    def told() -> list[str]:
        assert main(["status", str(sweep.path)]) == 0
        return capsys.readouterr().out.splitlines()[-2:]

    assert told() == ["not started, or its folder is gone: seed=1", "its folder is gone: seed=2"]
    owner.take(sweep)  # a command that starts the runs
    assert told() == ["not started yet: seed=1", "its folder is gone: seed=2"]
    write_json(sweep.owner, GONE)  # a command that was killed
    assert told()[0] == "not started, or its folder is gone: seed=1"


def test_a_stranger_in_place_of_a_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished(tmp_path / "runs/sweeps/1/a")
    (tmp_path / "runs/sweeps/1/sweep.json").write_text("[1, 2]")
    assert [found["state"] for found in rows(capsys, "runs/sweeps/1")] == ["completed"]
    assert main(["status", "runs/sweeps/1"]) == 0


def test_watching_ends_with_the_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = started(tmp_path / "runs/a/1")
    with living() as process:
        own(folder, process.pid)
        process.terminate()
        process.wait()
        assert main(["status", "--watch"]) == 0
    assert "broken off" in capsys.readouterr().out


def test_no_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 0
    assert "no runs in" in capsys.readouterr().out
    assert rows(capsys) == []


@pytest.mark.parametrize("words", [["--all", "a"], ["--watch", "--json"], ["--no-such"]])
def test_wrong_usage(words: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["status", *words])
    assert left.value.code == 2


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0 s"), (59.6, "1 min 0 s"), (3599, "59 min 59 s"), (18420, "5 h 7 min"), (183600, "2 d 3 h")],
)
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_few_looks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a list of many runs costs: five files and a folder a run, and Slurm is asked once for all."""
    looks = {}
    for count in (10, 30):
        for number in range(count):
            path = tmp_path / f"runs/a/{number:02}"
            if not path.exists():
                write_json(finished(path).owner, {"job_id": str(number + 1)})
        looks[count] = observed(lambda: rows(capsys, "--all"), under=str(tmp_path / "runs"))
    opened = (looks[30]["open"] - looks[10]["open"]) / 20
    listed = (looks[30]["os.scandir"] - looks[10]["os.scandir"]) / 20
    assert (opened, listed) == (5, 1)  # config, owner, attempts, metrics, summary
    assert looks[10]["subprocess.Popen"] == looks[30]["subprocess.Popen"] == 2  # sacct, squeue


def observed(work: Any, *, under: str) -> dict[str, int]:
    """How often Python opens files and lists folders under a path, and starts programs."""
    global _events
    if _events is None:
        _events = []
        sys.addaudithook(lambda event, given: _note(event, given, under))
    _events.clear()
    work()
    return {event: _events.count(event) for event in ("open", "os.scandir", "subprocess.Popen")}


def _note(event: str, given: tuple[Any, ...], under: str) -> None:
    if event == "subprocess.Popen" or (event in ("open", "os.scandir") and str(given[0]).startswith(under)):
        _events.append(event)


@pytest.mark.parametrize(
    ("columns", "headings"),
    [
        (200, {"run", "strategy", "state", "step", "loss", "samples/s"}),
        (80, {"run", "strategy", "state", "step", "loss", "samples/s"}),
        (40, {"run", "state", "step"}),
    ],
)
def test_a_narrow_terminal_gets_fewer_columns(columns: int, headings: set[str], tmp_path: Path) -> None:
    run = read_run(finished(tmp_path / "runs/pipeline/20261125-214720-1d7d574a", *PIPELINE).path)
    shown = io.StringIO()
    Console(file=shown, width=columns).print(_table(rows_of([run]), columns=columns))
    lines = shown.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    words = set(" ".join(lines[: 1 + next(i for i, line in enumerate(lines) if "─" in line)]).split())
    assert words & {"run", "strategy", "state", "step", "loss", "samples/s"} == headings
    assert "completed" in shown.getvalue()  # not folded
