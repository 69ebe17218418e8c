"""The names of runs and sweeps on a command line."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

RUN_COMMAND = ("python", "-m", "hpc_parallel.run")
RUNS = Path("runs")  # the default folder of the command `run`


def label(path: Path) -> str:
    """The short name of a run or sweep: its path relative to `runs/`, or else as in `from_here`.

    Commands accept the name: it is never a flag, a job id, another existing path, or a home folder.
    """
    short = _from(RUNS.absolute(), path)
    if short is not None and not is_job_id(short) and not os.path.lexists(short):
        return short
    return from_here(path)


def from_here(path: Path) -> str:
    """The path relative to the current folder if it lies inside, or else the full path."""
    return _from(Path.cwd(), path) or str(path)


def is_job_id(name: str) -> bool:
    """Whether `name` is `123`, or `123_4` of an array."""
    return name.replace("_", "", 1).isdecimal()


def command_on(path: Path, command: str, *flags: str) -> str:
    """The shell command line that applies `command` (status, logs, cancel) to the run or sweep at `path`."""
    return shlex.join(["python", "-m", "hpc_parallel", command, label(path), *flags])


def _from(root: Path, path: Path) -> str | None:
    if path == root or not path.is_relative_to(root):
        return None
    name = str(path.relative_to(root))
    return None if name[0] in "-~" else name
