"""A sweep: the keys of `sweep.json`, what the display shows of its runs, and the command to go on with."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from rich.console import Console

from hpc_parallel.launch.run_files import write
from hpc_parallel.record import sweep_folder
from hpc_parallel.record.recorded import find_runs
from hpc_parallel.record.run_folder import note_phase
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.record.sweep_folder import (
    SkippedRun,
    Sweep,
    SweepRun,
    create,
    is_sweep_folder,
    read_sweep,
    write_sweep,
)
from hpc_parallel.sweep.sweep_plan import PlannedRun
from hpc_parallel.sweep.view import SweepView, after_submission, after_the_end, outcome_line
from tests.composed import prepared

pytestmark = pytest.mark.usefixtures("here")

SWEEP = Sweep(
    command=("run", "-m", "nodes=1,2", "name=it's"),
    started="2026-11-21T22:01:00Z",
    parallelism=None,
    runs=(
        SweepRun(("nodes=1",), Path("/runs/data/a"), nodes=1, gpus_per_node=4, job_id="123_0"),
        SweepRun(("nodes=2",), Path("/runs/data/b"), nodes=2, gpus_per_node=4),
    ),
    skipped=(SkippedRun(("nodes=0",), ("nodes = 0 must be at least 1.",)),),
)


def test_the_manifest_has_the_keys_of_the_contract(tmp_path: Path) -> None:
    folder = tmp_path / "sweeps" / "one"
    create(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    write_sweep(folder, SWEEP)
    assert json.loads((folder / "sweep.json").read_text()) == {
        "command": ["run", "-m", "nodes=1,2", "name=it's"],
        "started": "2026-11-21T22:01:00Z",
        "parallelism": None,
        "runs": [
            {"overrides": ["nodes=1"], "run_dir": "/runs/data/a", "nodes": 1, "gpus_per_node": 4,
             "job_id": "123_0"},
            {"overrides": ["nodes=2"], "run_dir": "/runs/data/b", "nodes": 2, "gpus_per_node": 4,
             "job_id": None},
        ],
        "skipped": [{"overrides": ["nodes=0"], "problems": ["nodes = 0 must be at least 1."]}],
    }  # fmt: skip
    assert [path.name for path in folder.iterdir()] == ["sweep.json"]


def test_written_values_are_read_back(tmp_path: Path) -> None:
    write_sweep(tmp_path, SWEEP)
    assert read_sweep(tmp_path) == SWEEP


def test_runs_that_were_copied_or_moved_with_their_sweep_are_those_beside_it(tmp_path: Path) -> None:
    """The manifest has absolute paths: a report on a copy showed each run twice, on a moved one none."""
    old = tmp_path / "old" / "runs"
    ids = {"data": "20261130-071525-1e82e859", "fsdp": "20261130-071525-0b5a4c3d"}
    folders = [old / name / run_id for name, run_id in ids.items()]
    runs = tuple(SweepRun((), folder, nodes=1, gpus_per_node=1) for folder in folders)
    create(old / "sweeps" / "one")
    write_sweep(old / "sweeps" / "one", replace(SWEEP, runs=runs))
    for folder in folders:
        folder.mkdir(parents=True)
        for mark in ("config.yaml", "environment.json"):
            (folder / mark).touch()
    new = [tmp_path / "new" / "runs" / name / run_id for name, run_id in ids.items()]
    assert [run.path for run in find_runs(old)] == folders
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    assert [run.path for run in find_runs(old)] == folders
    for root in (tmp_path / "new", tmp_path / "new" / "runs" / "sweeps" / "one"):
        assert [run.path for run in find_runs(root)] == new
    shutil.rmtree(tmp_path / "old")
    assert [run.run_dir for run in read_sweep(tmp_path / "new" / "runs" / "sweeps" / "one").runs] == new


def test_a_run_with_a_chosen_name_is_not_taken_for_another_one(tmp_path: Path) -> None:
    mine, other = (tmp_path / place / "exp" / "r1" for place in ("scratch", "runs"))
    create(folder := tmp_path / "runs" / "sweeps" / "one")
    run = SweepRun((), mine, nodes=1, gpus_per_node=1)
    write_sweep(folder, replace(SWEEP, runs=(run,)))
    for path in (mine, other):
        path.mkdir(parents=True)
    assert read_sweep(folder).runs == (run,)


def test_a_folder_holds_one_sweep(tmp_path: Path) -> None:
    write_sweep(tmp_path, SWEEP)
    assert is_sweep_folder(tmp_path)
    with pytest.raises(FileExistsError, match="holds a sweep already"):
        create(tmp_path)


def test_a_folder_with_other_files_keeps_its_mode(tmp_path: Path) -> None:
    (empty := tmp_path / "empty").mkdir()
    (shared := tmp_path / "shared").mkdir()
    (shared / "notes.txt").write_text("mine")
    for folder in (empty, shared):
        folder.chmod(0o755)
        create(folder)
    assert [folder.stat().st_mode & 0o777 for folder in (empty, shared)] == [0o700, 0o755]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"command": [], "started": "", "parallelism": null}'])
def test_a_foreign_file_is_reported(text: str, tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(ValueError, match=r"sweep\.json can't be read: "):
        read_sweep(tmp_path)


def test_a_missing_sweep_is_no_foreign_one(tmp_path: Path) -> None:
    assert not is_sweep_folder(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_sweep(tmp_path)


@pytest.fixture
def planned(tmp_path: Path) -> PlannedRun:
    run = prepared(f"run_dir={tmp_path / 'run'}", "launcher=local", "launcher.snapshot=false", "seed=2",
                   "training.steps=60")  # fmt: skip
    write(run)
    return PlannedRun(run, ("seed=2",), ("seed=2",))


@pytest.mark.parametrize("columns", [40, 100])
def test_a_start_names_its_phase_until_the_first_step(planned: PlannedRun, columns: int) -> None:
    shown = io.StringIO()
    with SweepView(1, console=Console(file=shown, force_terminal=True, width=columns)) as view:
        view.start(planned)
        note_phase(planned.run.folder, "importing torch")
        view.poll(planned)
        (task,) = (task for task in view._bars.tasks if "seed=2" in task.description)
        assert task.description == "seed=2: starting: importing torch"[: columns - 8]
        line = {"step": 20, "loss": 12345.6, "samples_per_s": 1520.0}
        planned.run.folder.metrics.write_text(json.dumps(line) + "\n")
        view.poll(planned)
        view.poll(planned)
        assert task.description.startswith("seed=2:  step 20/60")
        assert ("1520 samples/s" in task.description) == (columns == 100)
        write_json(planned.run.folder.summary, {"outcome": "completed"})
        assert view.end(planned)
        assert not view._readers  # each knows all lines of its run
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())
    assert max(len(part.rstrip()) for text in drawn.split("\n") for part in text.split("\r")) <= columns


def test_the_end_of_a_run_has_no_exponents(planned: PlannedRun) -> None:
    folder = planned.run.folder
    write_json(folder.summary, {"outcome": "completed", "final_loss": 12345.6, "samples_per_s": 1520.4})
    assert outcome_line(folder) == ("completed", "completed, loss 12346, 1520 samples/s")
    write_json(folder.summary, {"outcome": "completed", "final_loss": 2.5, "ended_early": "a got worse"})
    assert outcome_line(folder) == ("completed", "completed early: a got worse, loss 2.5")


def test_a_failure_without_a_line_says_that_it_failed(planned: PlannedRun) -> None:
    write_json(planned.run.folder.failure, {})
    assert outcome_line(planned.run.folder) == ("failed", "failed")
    write_json(planned.run.folder.failure, {"line": "rank 1\x1b[2J"})
    assert outcome_line(planned.run.folder)[1] == r"failed: rank 1\x1b[2J"


def test_ctrl_c_is_called_ctrl_c(planned: PlannedRun) -> None:
    folder = planned.run.folder
    write_json(folder.summary, {"outcome": "cancelled"})
    write_json(folder.stopped, {"signal": "SIGTERM", "line": "cancelled by Ctrl-C: saved at step 30"})
    assert outcome_line(folder) == ("cancelled", "cancelled by Ctrl-C: saved at step 30")


GUIDE = Path(__file__).parents[2] / "docs" / "sweep.md"


def test_the_guide_shows_the_end_of_a_sweep(here: Path) -> None:
    lines = after_the_end(here / "runs" / "sweeps" / "20261123-050259", completed=True)
    assert "\n".join(["6 completed", *lines, "```"]) in GUIDE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["runs/sweeps/1", "my (first) sweep", "a'b,c=d"])
def test_the_last_line_is_a_command(name: str, here: Path) -> None:
    report = shlex.split(after_the_end(here / name, completed=True)[-1])
    assert report == ["python", "-m", "hpc_parallel", "report", name]
    ended = after_the_end(here / name, completed=False)
    for lines in (ended, after_submission(here / name, submitted=True)):
        python, flag, module, sweeps, *words = shlex.split(lines[-1])
        assert (python, flag, module, sweeps) == ("python", "-m", "hpc_parallel.run", "-m")
        (override,) = OverridesParser.create().parse_overrides(words)
        assert (override.key_or_group, override.value()) == ("sweep.resume", name)


def test_jobs_that_wait_can_be_followed_and_ended(here: Path) -> None:
    folder = here / "runs" / "sweeps" / "1"
    lines = [line.strip() for line in after_submission(folder, submitted=True)]
    assert "python -m hpc_parallel status sweeps/1 --watch" in lines
    assert "python -m hpc_parallel cancel sweeps/1" in lines
    assert len(after_submission(folder, submitted=False)) == 3  # Slurm refused all


def test_what_runs_have_in_common_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest of others may list 60,000 runs, and status names each that has no folder."""
    asked: list[int] = []
    common = sweep_folder.common
    monkeypatch.setattr(sweep_folder, "common", lambda runs: asked.append(len(runs)) or common(runs))
    runs = tuple(SweepRun(("nodes=1", f"seed={seed}"), Path(f"/r/{seed}"), 1, 1) for seed in range(3))
    sweep = Sweep((), "", None, runs, (SkippedRun(("nodes=1", "seed=9"), ()),))
    assert [sweep.distinct_overrides(run.overrides) for run in runs] == ["seed=0", "seed=1", "seed=2"]
    assert asked == [4]
