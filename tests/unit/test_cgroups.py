"""A process that the kernel ends for want of memory, in files as cgroups(7) describes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_parallel.failure import failure, oom
from hpc_parallel.machine.world import World
from hpc_parallel.record.run_folder import RunFolder

EVENTS = "low 0\nhigh 0\nmax 9\noom 1\noom_kill {kills}\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n"
STEP = "/slurm/job_7/step_0"


@pytest.mark.parametrize(
    ("line", "mount", "file", "text"),
    [
        (f"0::{STEP}/task_1", "", "memory.events", EVENTS),
        (f"4:cpu,memory:{STEP}/task_1", "memory", "memory.oom_control", CONTROL),
    ],
)
def test_the_innermost_cgroup_that_has_ended_a_process_is_named(
    tmp_path: Path, line: str, mount: str, file: str, text: str
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"9:pids:/elsewhere\n{line}\n")
    for place, kills in ((f"{STEP}/task_1", 0), (STEP, 2), ("/slurm/job_7", 2)):
        folder = tmp_path / "sys/fs/cgroup" / mount / place.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text.format(kills=kills))
    before = oom.cgroup_kills(tmp_path)
    assert before == {f"{STEP}/task_1": 0, STEP: 2, "/slurm/job_7": 2}
    assert oom.killing_cgroup(before, tmp_path) is None
    step = tmp_path / "sys/fs/cgroup" / mount / STEP.lstrip("/")
    for folder in (step, step.parent):
        (folder / file).write_text(text.format(kills=3))
    assert oom.killing_cgroup(before, tmp_path) == STEP


def test_without_cgroups_nothing_is_named(tmp_path: Path) -> None:
    assert oom.cgroup_kills(tmp_path) == {}
    assert oom.killing_cgroup({}, tmp_path) is None


@pytest.mark.parametrize(
    ("returncode", "kind", "message"),
    [
        (-9, failure.OUT_OF_MEMORY, f"killed by SIGKILL: out of memory in cgroup {STEP}"),
        (-11, failure.KILLED, "killed by SIGSEGV"),
    ],
)
def test_the_record_of_a_killed_rank_names_its_cgroup(
    tmp_path: Path, returncode: int, kind: str, message: str
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    failure.record_death(folder, world=World.discover({}), returncode=returncode, cgroup=STEP)
    record = json.loads((folder.logs / "rank-0.failure.json").read_text())
    assert (record["kind"], record["message"]) == (kind, message)
