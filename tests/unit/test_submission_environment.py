"""A job is what its script says: neither the job around it nor SBATCH_* of the shell changes it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_parallel.slurm import submit
from hpc_parallel.slurm.client import announcements, command_environment, submission_environment
from hpc_parallel.slurm.submitit_executor import Executor

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
    "SBATCH_CPUS_PER_GPU": "9", "SBATCH_ACCOUNT": "mine", "SBATCH_SIGNAL": "TERM@1", "SLURM_JWT": "secret",
    "SBATCH_ARRAY_INX": "0-2", "SBATCH_WAIT": "1", "SBATCH_ERROR": "/dev/null", "SBATCH_CLUSTERS": "other",
    "SBATCH_REQUEUE": "1", "SBATCH_EXCLUSIVE": "1",
}  # fmt: skip
OVERRIDDEN = [
    "SBATCH_CPUS_PER_GPU", "SBATCH_MEM_PER_CPU", "SBATCH_NO_REQUEUE", "SBATCH_REQUEUE", "SBATCH_TIMELIMIT",
]  # fmt: skip
REFUSED = ["SBATCH_ARRAY_INX", "SBATCH_CLUSTERS", "SBATCH_ERROR", "SBATCH_WAIT"]
PASSED_ON = ["SBATCH_ACCOUNT", "SBATCH_EXCLUSIVE", "SBATCH_SIGNAL"]


def test_every_request_of_the_shell_is_announced_and_those_that_change_the_run_are_dropped() -> None:
    same = "the same flag"
    assert announcements(SHELL, script=SCRIPT) == [
        f"{', '.join(OVERRIDDEN)} of this shell: not used, because the job's configuration sets {same}",
        f"{', '.join(REFUSED)} of this shell: not used, because this flag would break the run (another "
        "cluster: set SLURM_CLUSTERS)",
        f"{', '.join(PASSED_ON)} of this shell: passed on to sbatch, because the job's configuration does "
        f"not set {same}",
    ]
    left = {"HOME", "SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", *PASSED_ON}
    assert submission_environment(SHELL, script=SCRIPT).keys() == left
    unset = submission_environment(SHELL)
    assert "SBATCH_TIMELIMIT" in unset
    assert not unset.keys() & set(REFUSED)


def test_no_variable_of_the_shell_changes_a_question() -> None:
    """The input variables that the sources of Slurm's commands read (getenv)."""
    inputs = {
        "squeue": "ACCOUNT ALL ARRAY FEDERATION FORMAT FORMAT2 LICENSES LOCAL NAMES PARTITION PRIORITY QOS "
                  "SIBLING SORT STATES USERS",
        "sacct": "FEDERATION FORMAT LOCAL", "scontrol": "ALL FEDERATION FUTURE LOCAL SIBLING",
        "sinfo": "ALL FEDERATION FORMAT FUTURE LOCAL PARTITION SORT",
        "scancel": "ACCOUNT BATCH CRON CTLD FULL HURRY INTERACTIVE NAME PARTITION QOS STATE USER VERBOSE "
                   "WCKEY",
    }  # fmt: skip
    common = {"SLURM_TIME_FORMAT": "%s", "SLURM_DEBUG_FLAGS": "all", "SLURM_BITSTR_LEN": "9"}
    for command, names in inputs.items():
        shell = SHELL | common | {f"{command.upper()}_{name}": "x" for name in names.split()}
        kept = {name: value for name, value in SHELL.items() if not name.startswith("SLURM_")}
        kept |= {"SLURM_CONF": "/etc/s.conf", "SLURM_CLUSTERS": "east", "SLURM_JWT": "secret"}
        kept |= {"SLURM_BITSTR_LEN": "0"}  # an array is listed to its end
        assert command_environment(command, shell) == kept
        assert command_environment(command, shell, cluster="west") == kept | {"SLURM_CLUSTERS": "west"}


def test_the_sbatch_of_submitit_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in SHELL.items():
        monkeypatch.setenv(name, value)
    executor = Executor(tmp_path, script=SCRIPT, time_minutes=60)
    *words, sbatch, script = executor._make_submission_command(tmp_path / "it is")
    assert (sbatch, script) == ("sbatch", str(tmp_path / "it is"))
    environment = dict(os.environ)  # not what a C library has added
    printed = subprocess.run([*words, "env", "-0"], env=environment, capture_output=True, text=True).stdout
    found = dict(line.split("=", 1) for line in printed.split("\0") if line)
    assert found == submission_environment(os.environ, script=SCRIPT)


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
