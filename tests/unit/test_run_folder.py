"""The run folder is the user's alone, never overwritten, and never half-written."""

from __future__ import annotations

import json
import stat
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from hpc_parallel.record.run_folder import RunFolder, new_run_id
from hpc_parallel.record.safe_read import DamagedError, read_json
from hpc_parallel.record.safe_write import write_json, write_text


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("exists", [False, True])
def test_only_the_user_may_enter(tmp_path: Path, exists: bool) -> None:
    folder = RunFolder(tmp_path / "deep" / "run")
    if exists:
        folder.path.mkdir(parents=True, mode=0o755)
    folder.create()
    assert {path.name: mode(path) for path in (folder.path, folder.logs, folder.rendezvous)} == {
        "run": 0o700, "logs": 0o700, "rendezvous": 0o700,
    }  # fmt: skip


def test_a_run_is_never_overwritten(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    with pytest.raises(FileExistsError, match="not empty"):
        folder.create()


def test_names_are_those_of_the_contract(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    names = {path.relative_to(tmp_path).as_posix() for path in (
        folder.config, folder.environment, folder.batch_script, folder.metrics, folder.summary,
        folder.failure, folder.log(3, "err"),
    )}  # fmt: skip
    assert names == {
        "config.yaml", "environment.json", "batch_script.sh", "metrics.jsonl", "summary.json", "failure.json",
        "logs/rank-3.err",
    }  # fmt: skip


def test_a_reader_sees_the_old_or_the_new(tmp_path: Path) -> None:
    file = tmp_path / "value.json"
    texts = [{"value": letter * 100_000} for letter in "ab"]
    write_json(file, texts[0])
    done = threading.Event()

    def write() -> None:
        for turn in range(60):
            write_json(file, texts[turn % 2])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    reads = 0
    while not done.is_set():
        assert read_json(file) in texts
        reads += 1
    writer.join()
    assert reads > 1
    assert [path.name for path in tmp_path.iterdir()] == ["value.json"]


def test_a_failed_write_leaves_the_old_and_no_litter(tmp_path: Path) -> None:
    file = tmp_path / "value.json"
    write_text(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(file, "\ud800")
    with pytest.raises(ValueError, match="JSON"):
        write_json(file, {"loss": float("nan")})
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["value.json"]


def test_nothing_there_is_none_and_half_there_is_an_error(tmp_path: Path) -> None:
    assert read_json(tmp_path / "none.json") is None
    (tmp_path / "half.json").write_text('{"a": ')
    with pytest.raises(DamagedError):
        read_json(tmp_path / "half.json")


def test_run_ids_sort_by_time_and_differ_within_a_second() -> None:
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    ids = [new_run_id(now + timedelta(seconds=second)) for second in range(60)]
    assert ids == sorted(ids)
    assert ids[0].startswith("20260102-030405-")
    assert len({new_run_id(now) for _ in range(20)}) > 15


def test_files_set_aside_can_still_be_read(tmp_path: Path) -> None:
    """Of two that resume a run at once, one looks while the other has begun."""
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.code.mkdir()
    for number in (1, 2):
        write_text(folder.config, f"start: {number}\n")
        write_json(folder.environment, {"start": number})
        folder.set_aside()
        assert (folder.path / f"config-{number}.yaml").read_text() == folder.config.read_text()
        assert read_json(folder.path / f"environment-{number}.json") == {"start": number}
        assert read_json(folder.environment) == {"start": number}
    assert [path.name for path in folder.path.glob("code*")] == ["code-1"]
    (folder.path / "config-1.yaml").unlink()  # somebody tidied up
    write_text(folder.config, "start: 3\n")
    folder.set_aside()
    assert {path.name: path.read_text() for path in folder.path.glob("config-*")} == {
        "config-2.yaml": "start: 2\n", "config-3.yaml": "start: 3\n",
    }  # fmt: skip


def test_a_folder_named_phase_stops_no_new_start(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.phase.mkdir()
    folder.config.write_text("a: 1\n")
    folder.set_aside()
    assert (tmp_path / "run/config-1.yaml").read_text() == "a: 1\n"


def test_files_set_aside_are_put_back(tmp_path: Path) -> None:
    """Twice: of a third start that came to nothing no trace is left, and the first stays under its number."""
    folder = RunFolder(tmp_path / "run")
    folder.create()

    def start(number: int) -> None:
        folder.code.mkdir()
        write_text(folder.code / "train.py", f"{number}\n")
        write_text(folder.config, f"start: {number}\n")
        write_json(folder.environment, {"start": number})

    def content() -> dict[str, str]:
        files = (path for path in folder.path.rglob("*") if path.is_file())
        return {str(path.relative_to(folder.path)): path.read_text() for path in files}

    start(1)
    write_json(folder.failure, {"line": "rank 1 failed"})
    folder.set_aside()
    start(2)
    write_json(folder.summary, {"outcome": "completed"})
    before = content()
    assert json.loads(before["failure-1.json"]) == {"line": "rank 1 failed"}
    folder.set_aside()
    assert not folder.summary.exists()
    start(3)
    folder.put_back()
    assert content() == before
    folder.put_back()
    assert read_json(folder.failure) == {"line": "rank 1 failed"}
    assert folder.config.read_text() == "start: 1\n"
    assert (folder.code / "train.py").read_text() == "1\n"
