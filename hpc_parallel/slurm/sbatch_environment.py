"""The environment of sbatch. A job follows its script, wherever it is submitted from."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

KEPT = ("SLURM_CONF", "SLURM_CLUSTERS")  # they select a Slurm installation and do not describe a job
# The flag of `SBATCH_<name>` if it differs from the name (man sbatch, "Input environment variables").
_FLAGS = {"TIMELIMIT": "time", "NO_REQUEUE": "requeue", "ARRAY_INX": "array", "MEM_PER_NODE": "mem"}
# Slurm accepts only one flag of each of these sets.
_ALTERNATIVES = (
    {"mem", "mem-per-cpu", "mem-per-gpu"},
    {"gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket"},
    {"cpus-per-task", "cpus-per-gpu"},
)
_SET_FLAG = re.compile(r"^#SBATCH\s+--([a-z-]+)", re.MULTILINE)


def submission_environment(environment: Mapping[str, str], *, script: str = "") -> dict[str, str]:
    """The environment without the variables of the job of this process and `overrides` of the script.

    In an interactive job SLURM_* describes that job. sbatch and srun would read these variables as requests
    (memory, tasks).
    """
    dropped = overrides(environment, script=script)
    return {
        name: value for name, value in environment.items()
        if (name in KEPT or not name.startswith("SLURM_")) and name not in dropped
    }  # fmt: skip


def overrides(environment: Mapping[str, str], *, script: str) -> list[str]:
    """The variables SBATCH_* that sbatch would prefer to a flag in the script."""
    flags = set(_SET_FLAG.findall(script))
    for alternatives in _ALTERNATIVES:
        if flags & alternatives:
            flags |= alternatives
    return sorted(
        name for name in environment
        if name.startswith("SBATCH_") and _flag(name.removeprefix("SBATCH_")) in flags
    )  # fmt: skip


def _flag(name: str) -> str:
    return _FLAGS.get(name, name.lower().replace("_", "-"))


@contextmanager
def as_submitter(script: str) -> Iterator[None]:
    """Give the processes that start inside this context the environment of sbatch."""
    before = dict(os.environ)
    for name in before.keys() - submission_environment(before, script=script).keys():
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(before)
