"""`rerun`: the command that runs the kept source, and the runs that it refuses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hpc_parallel.commands.rerun import ONCE, command, differences, main, source
from hpc_parallel.record.recorded_start import RecordedStart
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json

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
        (
            {"import_path": None, "config_dir": "/"},
            "With today's source: python -m hpc_parallel run --config-dir / strategy=data",
        ),
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
