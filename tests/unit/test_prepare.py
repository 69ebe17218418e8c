"""A run folder that can't be written whole leaves nothing behind, and the command says why."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_parallel.launch import run_files
from hpc_parallel.launch.prepare import PreparedRun
from hpc_parallel.launch.run_files import write
from hpc_parallel.problems import ConfigError
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_text
from hpc_parallel.record.snapshot import Snapshot
from tests.composed import prepared
from tests.security.disk import fill, small_disk

QUIET = ("launcher=local", "launcher.snapshot=false", "name=mine")


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def raising(error: BaseException) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


UNREADABLE = PermissionError(13, "Permission denied", "/src/model.py")
FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize("error", [UNREADABLE, FULL])
def test_source_that_cannot_be_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    run = prepared("launcher=local", "name=mine", f"run_dir={tmp_path / 'run'}")
    monkeypatch.setattr(Snapshot, "take", raising(error))
    with pytest.raises(ConfigError, match=str(error.filename or error.strerror)):
        write(run)
    assert not (tmp_path / "run").exists()


def test_ctrl_c_while_copying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = prepared("launcher=local", "name=mine", f"run_dir={tmp_path / 'run'}")
    monkeypatch.setattr(Snapshot, "take", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        write(run)
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_there_is_left_alone(tmp_path: Path) -> None:
    run = prepared(*QUIET, f"run_dir={tmp_path / 'run'}")
    write_text_in(tmp_path / "run", "mine")
    with pytest.raises(ConfigError, match="not empty"):
        write(run)
    assert contents(tmp_path) == {"run/notes": b"mine"}


def write_text_in(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "notes").write_text(text)


def ended(tmp_path: Path, *resume: str) -> tuple[RunFolder, PreparedRun]:
    """A run that is over, and the same prepared to be resumed."""
    first = prepared(*QUIET, f"run_dir={tmp_path / 'run'}")
    write(first)
    first.folder.owner.unlink()
    write_text(first.folder.summary, "{}")
    second = prepared(*QUIET, f"run_dir={tmp_path / 'other'}")
    values = {**second.values, "resume": str(first.folder.path)}
    config = second.config
    config.resume = str(first.folder.path)
    again = PreparedRun(config, values, plan=second.plan, folder=first.folder,
                        snapshot=None, overrides=[], config_dir=None)  # fmt: skip
    return first.folder, again


@pytest.mark.parametrize("place", ["set_aside", "write"])
def test_a_resume_that_fails_leaves_the_run_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    folder, again = ended(tmp_path)
    folder.set_aside()  # an earlier resume, whose files must stay where they are
    write_text(folder.summary, '{"second": 1}')
    before = contents(folder.path)
    full = raising(OSError(28, "No space left on device"))
    if place == "write":
        monkeypatch.setattr(run_files, "write_text", full)
    else:
        monkeypatch.setattr("hpc_parallel.record.run_folder.write_text", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        write(again)
    assert contents(folder.path) == before


def test_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", bytes_=40960) as disk:
        run = prepared(*QUIET, f"run_dir={disk / 'run'}")
        fill(disk)
        os.truncate(disk / "filler", os.path.getsize(disk / "filler") - 8192)
        with pytest.raises(ConfigError, match="No space left on device"):
            write(run)
        assert [path.name for path in disk.iterdir()] == ["filler"]


def test_a_configuration_that_the_job_could_not_read_is_refused(here: Path) -> None:
    run = prepared("launcher.snapshot=false", "run_dir=run")
    for odd, reason in (["x" * 2**18], "it has more than 256 KiB"), (math.inf, "is not finite"):
        run.values["seed"] = odd
        with pytest.raises(ConfigError, match=reason):
            write(run)
        assert not (here / "run").exists()


def test_equal_parts_are_written_without_aliases(here: Path) -> None:
    run = prepared("launcher.snapshot=false", "run_dir=run")
    shared = ["a", "b"]
    run.values["task"] = {"name": "train", "first": shared, "second": shared}
    write(run)
    assert run.folder.read_config()["task"] == run.values["task"]
