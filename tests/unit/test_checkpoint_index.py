"""What counts as a checkpoint on disk, what is damage, what is removed."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash

from hpc_parallel.record import checkpoint_index
from hpc_parallel.record.checkpoint_index import (
    clear,
    complete,
    prune,
    publish,
    set_aside_after,
    unfinished_folder,
)


def write(folder: Path, step: int, content: bytes = b"weights") -> None:
    path = unfinished_folder(folder, step)
    path.mkdir(parents=True)
    (path / "part").write_bytes(content)
    described = {"bytes": len(content), "xxh3_128": xxhash.xxh3_128(content).hexdigest()}
    publish(folder, step=step, files={"part": described}, about={"samples": 16 * step})


def steps(folder: Path) -> list[int]:
    return [checkpoint.step for checkpoint in complete(folder)]


def test_complete_checkpoints_are_listed_newest_first(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        write(tmp_path, step)
    (tmp_path / "step-100" / checkpoint_index.MARKER).unlink()
    (tmp_path / ".step-200").mkdir()
    (tmp_path / "notes").mkdir()
    assert steps(tmp_path) == [10, 9]
    assert steps(tmp_path / "nowhere") == []
    newest = complete(tmp_path)[0]
    assert (newest.manifest["step"], newest.manifest["samples"], newest.damage()) == (10, 160, None)


@pytest.mark.parametrize("at", range(len(b"weights")))
def test_any_flipped_byte_is_damage(tmp_path: Path, at: int) -> None:
    write(tmp_path, 1)
    content = bytearray(b"weights")
    content[at] ^= 0x10
    (tmp_path / "step-1" / "part").write_bytes(content)
    assert complete(tmp_path)[0].damage() == "part is not what was written (its checksum differs)"


def test_other_damage_is_named(tmp_path: Path) -> None:
    for step in range(1, 5):
        write(tmp_path, step)
    (tmp_path / "step-1" / "part").write_bytes(b"weigh")
    (tmp_path / "step-2" / "part").unlink()
    (tmp_path / "step-3" / "manifest.json").write_text("{}")
    damage = {checkpoint.step: checkpoint.damage() for checkpoint in complete(tmp_path)}
    assert damage[1] == "part has 5 of 7 bytes"
    assert damage[2] == "part is missing"
    assert damage[3] == "manifest.json is not what was written"
    assert damage[4] is None


def test_each_rank_looks_at_its_part(tmp_path: Path) -> None:
    path = unfinished_folder(tmp_path, 1)
    path.mkdir()
    files = {}
    for name in "abcde":
        (path / name).write_bytes(b"x")
        files[name] = {"bytes": 1, "xxh3_128": xxhash.xxh3_128(b"x").hexdigest()}
    publish(tmp_path, step=1, files=files, about={})
    (tmp_path / "step-1" / "d").write_bytes(b"y")
    found = [complete(tmp_path)[0].damage(part=part, parts=3) for part in range(3)]
    assert found == ["d is not what was written (its checksum differs)", None, None]


def test_the_last_and_the_milestones_are_kept(tmp_path: Path) -> None:
    for step in range(10, 80, 10):
        write(tmp_path, step)
    prune(tmp_path, keep_last=2, keep_every=30)
    assert steps(tmp_path) == [70, 60, 30]
    prune(tmp_path, keep_last=1, keep_every=None)
    assert steps(tmp_path) == [70]
    assert [path.name for path in tmp_path.iterdir()] == ["step-70"]


def test_remains_of_a_dead_run_are_removed(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / ".step-2").mkdir()
    (tmp_path / "step-3").mkdir()
    (tmp_path / "mine").mkdir()
    clear(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "step-1"]


def test_a_damaged_checkpoint_is_written_again(tmp_path: Path) -> None:
    write(tmp_path, 1, b"old")
    (tmp_path / "step-1" / "part").write_bytes(b"odd")
    write(tmp_path, 1, b"new")
    (found,) = complete(tmp_path)
    assert found.damage() is None
    assert (found.path / "part").read_bytes() == b"new"


def test_a_damaged_newer_one_does_not_cost_the_sound_ones(tmp_path: Path) -> None:
    for step in (80, 100):
        write(tmp_path, step)
    (tmp_path / "step-100" / "part").write_bytes(b"odd")
    set_aside_after(tmp_path, step=80)
    write(tmp_path, 95)
    prune(tmp_path, keep_last=1, keep_every=None)
    assert steps(tmp_path) == [95]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged-step-100", "step-95"]
    write(tmp_path, 110)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-110", "step-95"]
