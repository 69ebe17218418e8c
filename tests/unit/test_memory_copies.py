"""Copies in the memory of hosts: which step counts, whose folder it is, and when copies are removed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_parallel.record import attempts, host_memory
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import map_pages
from hpc_parallel.record.trust import UntrustedError
from hpc_parallel.slurm.jobs import ELSEWHERE, FORGOTTEN, NO_ACCOUNTING, SILENT, UNKNOWN, JobState
from hpc_parallel.training.memory_copies import CopyKey, choose, partners
from tests.security.users import ATTACKER, needs_root


def copies(*held: str) -> list[list[CopyKey]]:
    """For each rank the copies on its host, as `step start rank`."""
    return [
        [CopyKey(int(step), start, int(rank)) for step, start, rank in map(str.split, of_rank.split(", "))]
        if of_rank
        else []
        for of_rank in held
    ]


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        # Two hosts of one rank: each has its own part and that of the other.
        (("20 a 0, 20 a 1", "20 a 1, 20 a 0"), (20, "a", [0, 1])),
        (("20 a 0, 10 a 0", "20 a 1, 10 a 1"), (20, "a", [0, 1])),
        # One part of step 20 is lacking.
        (("20 a 0, 10 a 0", "10 a 1"), (10, "a", [0, 1])),
        (("20 a 0", "10 a 1"), None),
        # A new host has nothing: its parts come from the partner.
        (("20 a 0, 20 a 1", ""), (20, "a", [0, 0])),
        (("", "20 a 1, 20 a 0"), (20, "a", [1, 1])),
        # The same step, which two starts computed, is not one state.
        (("20 a 0", "20 b 1"), None),
        (("20 a 0, 10 b 0", "20 b 1, 10 b 1"), (10, "b", [0, 1])),
        # Two ranks on each host: those of the other host share the work.
        (("5 a 0, 5 a 1, 5 a 2, 5 a 3",) * 2 + ("", ""), (5, "a", [0, 1, 0, 1])),
        (("", ""), None),
    ],
)
def test_only_a_step_with_the_parts_of_all_ranks_counts(held: tuple[str, ...], expected: Any) -> None:
    assert choose(copies(*held)) == expected


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("a b", [1, 0]),
        ("a a b b c c", [2, 3, 4, 5, 0, 1]),
        ("a b a b", [1, 0, 3, 2]),
        ("a a a b", [3, 3, 3, 0]),
        ("a a", [None, None]),
    ],
)
def test_the_next_host_keeps_the_second_copy(hosts: str, expected: list[int | None]) -> None:
    assert partners(hosts.split()) == expected


def test_another_job_requeue_or_start_by_hand_has_another_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    attempts.note(folder, "submitted")
    environments: list[dict[str, str]] = [
        {}, {"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "8"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"},
    ]  # fmt: skip
    names = [host_memory.name_of(folder, environment) for environment in environments]
    attempts.end(folder, how="killed")  # a restart in the same job finds its copies
    assert [host_memory.name_of(folder, environment) for environment in environments] == names
    attempts.note(folder, "resumed")
    names += [host_memory.name_of(folder, environment) for environment in environments]
    names.append(host_memory.name_of(RunFolder(tmp_path / "other"), {}))
    assert len(set(names)) == 9


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to which every user can write, as /dev/shm."""
    with tempfile.TemporaryDirectory(dir=host_memory.ROOT) as name:
        folder = Path(name)
        folder.chmod(0o1777)
        monkeypatch.setattr(host_memory, "ROOT", folder)
        yield folder


def test_only_this_user_can_enter_the_folder(root: Path) -> None:
    folder = host_memory.open_folder("name", host="n1")
    assert folder == root / "name" / "n1"
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o700, 0o700]
    host_memory.open_folder("name", host="n1")
    folder.parent.chmod(0o777)
    with pytest.raises(UntrustedError, match=r"name \(mode 0777\) can be written by anyone"):
        host_memory.open_folder("name", host="n1")


@needs_root
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_folder_of_another_user_is_refused(root: Path, kind: str) -> None:
    (root / "mine").mkdir(mode=0o700)
    path = root / "name"
    if kind == "link":
        path.symlink_to(root / "mine")
    else:
        path.mkdir(mode=0o755)
    os.lchown(path, ATTACKER, ATTACKER)
    with pytest.raises(UntrustedError, match="name belongs to"):
        host_memory.open_folder("name", host="n1")
    assert not list((root / "mine").iterdir())


def test_what_ended_jobs_left_is_removed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = {
        "5": JobState("CANCELLED"), "6": JobState("RUNNING"), "8_1": JobState("FAILED"),
        "9": JobState(UNKNOWN, NO_ACCOUNTING), "10": JobState(SILENT), "11": JobState(FORGOTTEN),
        "12": JobState(UNKNOWN, ELSEWHERE),
    }  # fmt: skip
    monkeypatch.setattr(host_memory, "job_states", lambda jobs: {job: states[job.id] for job in jobs})
    user, of_run = os.geteuid(), "0123456789abcdef"
    now = f"hpc_parallel-{user}-7-{of_run}-1.0"
    left = {
        now: True,
        f"hpc_parallel-{user}-7-{of_run}-0.0": False,  # of this run before its requeue
        f"hpc_parallel-{user}-local-{of_run}-0.0": False,
        f"hpc_parallel-{user}-5-fedcba9876543210-0.0": False,
        f"hpc_parallel-{user}-8_1-fedcba9876543210-0.0": False,
        f"hpc_parallel-{user}-6-fedcba9876543210-0.0": True,
        f"hpc_parallel-{user}-9-fedcba9876543210-0.0": False,  # the queue does not list it
        f"hpc_parallel-{user}-10-fedcba9876543210-0.0": True,
        f"hpc_parallel-{user}-11-fedcba9876543210-0.0": False,
        f"hpc_parallel-{user}-12-fedcba9876543210-0.0": True,
        f"hpc_parallel-{user}-local-fedcba9876543210-0.0": True,  # nobody knows whether it runs
        "somebody's": True,
    }
    for name in left:
        (root / name / "n1").mkdir(parents=True)
    host_memory.remove_leftovers(now)
    assert {name: (root / name).exists() for name in left} == left
    host_memory.remove(now)
    assert not (root / now).exists()


def test_pages_keep_their_content_and_are_there(tmp_path: Path) -> None:
    path = tmp_path / "pages"
    first = torch.frombuffer(map_pages(path, 4096), dtype=torch.uint8)
    assert path.stat().st_blocks * 512 >= 4096  # not a hole
    first.fill_(7)
    assert torch.frombuffer(map_pages(path, 4096), dtype=torch.uint8).eq(7).all()
    assert not torch.frombuffer(map_pages(path, 8192), dtype=torch.uint8).any()
    assert first.eq(7).all()  # who maps the old file keeps it
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        map_pages(path, 8192)
