"""A job is what its script says: neither the job around it nor SBATCH_* of the shell changes it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from hpc_parallel.slurm import submit
from hpc_parallel.slurm.sbatch_environment import as_submitter, overrides, submission_environment

SCRIPT = """#!/bin/bash
#SBATCH --time=60
#SBATCH --mem='4096M'
#SBATCH --requeue
#SBATCH --cpus-per-task=2
srun a
"""
SHELL = {
    "HOME": "/home/a", "SLURM_CONF": "/etc/s.conf", "SLURM_CLUSTERS": "east", "SLURM_JOB_ID": "7",
    "SLURM_MEM_PER_CPU": "100", "SBATCH_TIMELIMIT": "5", "SBATCH_MEM_PER_CPU": "1G", "SBATCH_NO_REQUEUE": "1",
    "SBATCH_CPUS_PER_GPU": "9", "SBATCH_ACCOUNT": "mine", "SBATCH_SIGNAL": "TERM@1",
}  # fmt: skip


def test_only_what_the_script_does_not_set_is_left() -> None:
    names = ["SBATCH_CPUS_PER_GPU", "SBATCH_MEM_PER_CPU", "SBATCH_NO_REQUEUE", "SBATCH_TIMELIMIT"]
    assert overrides(SHELL, script=SCRIPT) == names
    left = {"HOME", "SLURM_CONF", "SLURM_CLUSTERS", "SBATCH_ACCOUNT", "SBATCH_SIGNAL"}
    assert submission_environment(SHELL, script=SCRIPT).keys() == left
    assert "SBATCH_TIMELIMIT" in submission_environment(SHELL)


def test_processes_started_meanwhile_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SHELL.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with as_submitter(SCRIPT):
        assert dict(os.environ) == submission_environment(before, script=SCRIPT)
    assert dict(os.environ) == before


@pytest.fixture
def _not_yet_warned() -> Iterator[None]:
    submit._warn_of.cache_clear()
    yield
    submit._warn_of.cache_clear()


@pytest.mark.usefixtures("_not_yet_warned")
def test_what_is_not_used_is_announced_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SBATCH_TIMELIMIT", "5")
    for _ in range(2):
        submit.warn_of_overrides(SCRIPT)
    assert capsys.readouterr().err == (
        "warning     SBATCH_TIMELIMIT of this shell: not used, because the job's configuration sets the same "
        "flag\n"
    )
