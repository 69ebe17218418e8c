"""`rerun`: the kept source runs again, bit for bit, whatever has become of the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_parallel.commands.rerun import ONCE, command, differences, main, source
from hpc_parallel.record.recorded_start import RecordedStart
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json
from tests.unit.test_snapshot import git

ROOT = Path(__file__).resolve().parents[2]
MODEL = """
import torch
from torch import nn
from hpc_parallel.models.layered import LayeredModel

SCALE = 1.0

class Mine(LayeredModel):
    def __init__(self, *, width):
        super().__init__(
            stem=nn.Embedding(256, width), blocks=[nn.Linear(width, width)], head=nn.Linear(width, 256)
        )

    def loss(self, output, target):
        return SCALE * nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
"""
WORDS = (
    "model=mine", "strategy=single", "launcher=local", "device=cpu", "training.steps=3",
    "training.log_every=1", "training.global_batch_size=2", "training.validate_every=null",
    "data.max_bytes=100000", "data.sequence_length=8", "training.measure_steps=0", "run_dir='first one'",
)  # fmt: skip


def python(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hpc_parallel", *words], cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True,
    )  # fmt: skip


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_rerun_has_the_same_bits_after_the_checkout_was_edited(tmp_path: Path) -> None:
    """The model, its configuration and its loss are other ones by then; a rerun's rerun is the same too."""
    mine, elsewhere = tmp_path / "my project", tmp_path / "elsewhere"
    (mine / "conf" / "model").mkdir(parents=True)
    elsewhere.mkdir()
    (mine / "mymodel.py").write_text(MODEL)
    (mine / "conf" / "model" / "mine.yaml").write_text("_target_: mymodel.Mine\nwidth: 8\n")
    (mine / ".gitignore").write_text("first one\nruns\n")
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "first")):
        git(mine, *words)
    done = python("run", "--config-dir", "conf", *WORDS, cwd=mine)
    assert done.returncode == 0, done.stdout + done.stderr
    first = mine / "first one"
    before = losses(first)
    assert len(before) == 3

    (mine / "mymodel.py").write_text(MODEL.replace("SCALE = 1.0", "SCALE = 3.0"))
    (mine / "conf" / "model" / "mine.yaml").write_text("_target_: mymodel.Mine\nwidth: 16\n")
    done = python("rerun", str(first), cwd=elsewhere)
    assert done.returncode == 0, done.stdout + done.stderr
    (second,) = (mine / "runs" / "single").iterdir()
    assert losses(second) == before

    # of that run the source is kept again, so that it can be repeated without the first
    shutil.rmtree(first)
    (mine / "mymodel.py").unlink()
    done = python("rerun", str(second), "name=third", "run_dir=third", cwd=elsewhere)
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(mine / "third") == before
    kept, again = (json.loads((run / "environment.json").read_text()) for run in (second, mine / "third"))
    assert (kept["rerun_of"], again["rerun_of"]) == (str(first), str(second))
    assert kept["git_commit"] == again["git_commit"]
    assert kept["git_diff"] == again["git_diff"] == ""  # the source that runs has no change
    assert kept["overrides"] == list(WORDS[:-1])
    assert (mine / "third/code/my project/mymodel.py").read_text() == MODEL
    for run in (second, mine / "third"):
        assert not (run / "code" / "my project" / "runs").exists()
        assert run.stat().st_mode & 0o777 == 0o700
    assert not list(elsewhere.iterdir())


KEPT: dict[str, Any] = {
    "overrides": ["strategy=data", "+run_dir=a", "nodes=2", "run_dir='b c'", "resume=x"],
    "config_dir": None, "import_path": [], "checkouts": {}, "packages": {},
}  # fmt: skip


def recorded(**changes: object) -> RecordedStart:
    values = KEPT | changes
    config_dir = values["config_dir"]
    return RecordedStart(tuple(KEPT["overrides"]), Path(config_dir) if config_dir else None, values)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.create()
    made.config.write_text("nodes: 1\n")
    write_json(made.environment, KEPT | {"working_directory": str(tmp_path)})
    return made


def test_overrides_of_one_run_are_left_out(folder: RunFolder) -> None:
    assert ONCE == ("run_dir", "resume")
    assert command(folder, recorded(), ["nodes=3", "~name"]) == [
        "strategy=data",
        "nodes=2",
        "nodes=3",
        "~name",
    ]


def test_configurations_of_the_users_own_are_the_kept_ones(folder: RunFolder, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    assert command(folder, recorded(config_dir=str(outside)), [])[:2] == ["--config-dir", str(outside)]
    copy = folder.code / "project" / "conf"
    copy.mkdir(parents=True)
    start = recorded(config_dir="/x/y/conf", checkouts={"/x/y": {"copy": "project"}})
    assert command(folder, start, [])[:2] == ["--config-dir", str(copy)]


def test_a_moved_run_imports_from_where_it_is(folder: RunFolder, tmp_path: Path) -> None:
    (folder.code / "mine").mkdir(parents=True)
    folder.path.rename(tmp_path / "moved")
    variables = source(RunFolder(tmp_path / "moved"), recorded(import_path=["code/mine", "/where/i/was"]))
    assert variables["PYTHONSAFEPATH"] == "1"
    assert variables["PYTHONPATH"].split(":")[:2] == [f"{tmp_path}/moved/code/mine", "/where/i/was"]


def test_changed_packages_are_listed() -> None:
    now = differences(recorded(packages={}))
    assert now == []  # the job never began: nothing is known
    (line,) = differences(recorded(packages={"torch": "0.1", "gone": "2"}))
    assert line.startswith("packages are not the run's: ")
    assert " more" in line


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 2
    told = capsys.readouterr()
    assert told.out == ""
    first, problem = told.err.splitlines()
    assert first == "1 problem in the configuration; nothing was started."
    return problem.strip()


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, str(tmp_path)).startswith(f"{tmp_path} is not a run folder")
    assert refusal(capsys, str(tmp_path / "none")).startswith(f"{tmp_path}/none is not a run folder")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"import_path": None}, "With today's source: python -m hpc_parallel run strategy=data"),
        ({"import_path": ["code/lost"]}, "code/lost, the source that the run kept, is gone."),
        ({"working_directory": "/no/such/place"}, "/no/such/place, where the run was started"),
        ({"config_dir": "/no/such/conf"}, "--config-dir /no/such/conf: "),
    ],
)
def test_an_unrepeatable_run_is_reported(
    folder: RunFolder, change: dict[str, object], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(folder.environment, KEPT | {"working_directory": "/"} | change)
    assert told in refusal(capsys, str(folder.path))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("{}", "it does not say how the run was started"),
        ('{"overrides": [1]}', "it does not say how the run was started"),
    ],
)
def test_a_run_without_a_record_of_its_start_is_refused(
    folder: RunFolder, text: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.environment.write_text(text)
    message = refusal(capsys, str(folder.path))
    assert f"environment.json can't be read: {reason}" in message
    assert message.endswith("Start a new run.")


def test_a_run_that_others_may_write_is_not_run(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """pytest's own folder is closed to others; only the owner is wrong then."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(folder.path, 12345, -1)
    assert "is not to be trusted: " in refusal(capsys, str(folder.path))


def test_a_run_inside_a_run_is_refused(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hpc_parallel.run import main as run

    monkeypatch.chdir(folder.path)
    monkeypatch.setattr("sys.argv", ["run"])
    assert run(["launcher=script"]) == 2
    assert f"would lie inside the run folder {folder.path}. Try run_dir={folder.path}-2." in (
        capsys.readouterr().err
    )
