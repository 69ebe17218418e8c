"""Where copies of a run's state are kept in the memory of a host, from one start in a job to the next.

Every user can write to /dev/shm, so a folder there counts only if no other user can have put something in it.
This module does not import torch: the end of a job removes the copies.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from xxhash import xxh3_64 as Digest

from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import is_real_folder, list_folder, read_lines
from hpc_parallel.record.trust import require_private
from hpc_parallel.slurm.jobs import NO_ACCOUNTING, Job, job_of, job_states, run_on_hosts

ROOT = Path("/dev/shm")
LOCAL = "local"  # in place of a job
_NAME = re.compile(r"hpc_parallel-(\d+)-(\d+(?:_\d+)?|local)-([0-9a-f]{16})-(\d+)\.(\d+)")


def name_of(run: RunFolder, environment: Mapping[str, str]) -> str:
    """The name of the run's folder: another one for each user, job, requeue, and start by a user.

    A new job or a start by hand may continue from an older step, so it never finds copies of the one before.
    """
    by_hand = sum("resumed" in line for line in read_lines(run.attempts))
    path = Digest(os.path.realpath(run.path).encode()).hexdigest()
    requeues = environment.get("SLURM_RESTART_COUNT", "0")
    return f"hpc_parallel-{os.geteuid()}-{job_of(environment) or LOCAL}-{path}-{requeues}.{by_hand}"


def open_folder(name: str, *, host: str) -> Path:
    """The folder for the copies on this host, which only this user can enter.

    host: its name; with simulated nodes another one for each.

    Raises UntrustedError if another user could have written in it, and OSError.
    """
    folder = ROOT / name / host
    for path in (folder.parent, folder):
        path.mkdir(mode=0o700, exist_ok=True)
        require_private(path)
    return folder


def remove(name: str) -> None:
    """Remove the run's copies from the memory of this host."""
    shutil.rmtree(ROOT / name, ignore_errors=True)


def remove_from_hosts(name: str, environment: Mapping[str, str]) -> None:
    """The same on each host of this job. A host that does not answer keeps them until `remove_leftovers`."""
    run_on_hosts("rm", "-rf", "--", str(ROOT / name), environment=environment)


def remove_leftovers(name: str) -> None:
    """Remove what this user's killed jobs and earlier starts of this run have left in this host's memory."""
    others = [(path, match) for path, match in _folders() if path.name != name]
    of_run = (_NAME.fullmatch(name) or [""] * 4)[3]
    jobs = {Job(match[2]) for _, match in others if match[2] != LOCAL and match[3] != of_run}
    states = job_states(jobs) if jobs else {}
    for path, match in others:
        state = None if match[2] == LOCAL or match[3] == of_run else states[Job(match[2])]
        # A requeued job would use another name, so a job that the queue does not list needs no copies.
        if match[3] == of_run or (state and (state.ended or state.reason == NO_ACCOUNTING)):
            shutil.rmtree(path, ignore_errors=True)


def _folders() -> Iterator[tuple[Path, re.Match[str]]]:
    """This user's folders of copies."""
    user = os.geteuid()
    for entry in list_folder(ROOT):
        match = _NAME.fullmatch(entry.name)
        if match and is_real_folder(entry) and entry.stat(follow_symlinks=False).st_uid == user:
            yield Path(entry.path), match
