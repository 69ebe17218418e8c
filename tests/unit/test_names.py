"""What is printed to follow and to cancel means that run or sweep, and no other, when it is pasted."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from hpc_parallel.launch import slurm_launcher
from hpc_parallel.problems import ConfigError, Problem
from hpc_parallel.record import owner
from hpc_parallel.record.find import NoRunError, find_all, find_run
from hpc_parallel.record.names import command_on
from hpc_parallel.record.sweep_folder import Sweep, SweepRun, write_sweep
from hpc_parallel.slurm.jobs import Job
from tests.composed import prepared
from tests.recorded_runs import finished

AWKWARD = (
    "runs/data/1", "runs/it's $(touch pwned)/1", "runs/-yes", "runs/~root", "runs/41", "-x/1", "~nobody/1",
    "here/1", "runs/here/1", "../outside/1",
)  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_each_name_leads_back(here: Path) -> None:
    """Flags, homes, job ids, the same path twice: all of them at once."""
    paths = [Path(here, path).resolve() for path in AWKWARD]
    for path in paths:
        owner.hand_to_job(finished(path), Job("41" if path.name == "1" else "7"))
    for path in paths:
        words = shlex.split(command_on(path, "logs", "--follow"))
        assert words[:4] == ["python", "-m", "hpc_parallel", "logs"]
        assert words[4][0] != "-"
        assert find_run(words[4]).path == path
    assert shlex.split(command_on(paths[0], "cancel"))[4] == "data/1"


@pytest.mark.parametrize("place", ["runs/sweeps/1", "runs/my own/x", "elsewhere", "../outside"])
def test_a_sweep_is_named_wherever_it_lies(place: str, here: Path) -> None:
    run = finished(here / "runs/a/1").path
    folder = Path(here, place).resolve()
    folder.mkdir(parents=True)
    gone = here / "runs/a/2"
    runs = tuple(SweepRun((), path, nodes=1, gpus_per_node=1) for path in (run, gone))
    write_sweep(folder, Sweep(("-m",), "2026-11-22T01:00:00+00:00", None, runs, ()))
    (named,) = find_all([shlex.split(command_on(folder, "cancel"))[4]])
    assert (named.path, [each.path for each in named.runs]) == (folder, [run, gone])


@pytest.mark.parametrize(
    ("key", "longest", "too_long"),
    [("name", "a" * 100, "a" * 300), ("name", "運" * 85, "運" * 86), ("run_dir", "a" * 255, "a" * 256),
     ("run_dir", "/tmp" + "/aaa" * 949, "/tmp" + "/aaa" * 949 + "b")],
    ids=["the rule", "three bytes", "a part", "a path"],
)  # fmt: skip
def test_names_that_linux_can_not_hold_are_refused(key: str, longest: str, too_long: str) -> None:
    assert max(map(len, longest.encode().split(b"/"))) <= os.pathconf("/", "PC_NAME_MAX") == 255
    words = ("launcher=local", "launcher.snapshot=false")
    prepared(f"{key}='{longest}'", *words)
    with pytest.raises(ConfigError) as raised:
        prepared(f"{key}='{too_long}'", *words)
    (problem,) = raised.value.problems
    assert isinstance(problem, Problem)
    assert (problem.key, problem.value) == (key, too_long)
    prepared(f"{key}='{problem.legal[0]}'", *words)


def test_a_submission_prints_these_lines(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slurm_launcher, "submit", lambda run: Job("17"))
    run = prepared("run_dir='runs/my run/1'", "launcher.snapshot=false")
    assert slurm_launcher.SlurmLauncher().launch(run) == 0
    assert capsys.readouterr().out.splitlines() == [
        "job         17",
        f"run folder  {here}/runs/my run/1",
        "follow      python -m hpc_parallel logs 'my run/1' --follow",
        "cancel      python -m hpc_parallel cancel 'my run/1'",
    ]


def test_a_job_id_is_no_name_of_another_run(here: Path) -> None:
    finished(here / "runs/41")
    owner.hand_to_job(finished(here / "runs/data/1"), Job("41"))
    assert find_run("41").path == here / "runs/data/1"
    assert find_run(shlex.split(command_on(here / "runs/41", "show"))[4]).path == here / "runs/41"


def test_a_folder_in_a_word_is_a_whole_name(here: Path) -> None:
    """`cancel a/` means no run of `data`."""
    run = finished(here / "runs" / "data" / "20261122-01")
    assert find_run("data/2026").path == find_run("data/").path == run.path
    with pytest.raises(NoRunError):
        find_run("a/2026")
