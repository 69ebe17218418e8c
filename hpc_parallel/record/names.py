"""What runs and sweeps are called on a command line."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

RUNS = Path("runs")  # where the command `run` puts them


def label(path: Path) -> str:
    """What a run or sweep is called here: its place in `runs/`, else from this folder, else in full.

    Always a word by which it is found again: no flag, no other's path, job id or home.
    """
    short = _from(RUNS.absolute(), path)
    if short is not None and not is_job_id(short) and not os.path.lexists(short):
        return short
    return _from(Path.cwd(), path) or str(path)


def is_job_id(word: str) -> bool:
    """`123`, or `123_4` of an array."""
    return word.replace("_", "", 1).isdecimal()


def command_on(path: Path, command: str, *flags: str) -> str:
    """The line that does `command` (status, logs, cancel) to this run or sweep, as a shell takes it."""
    return shlex.join(["python", "-m", "hpc_parallel", command, label(path), *flags])


def _from(root: Path, path: Path) -> str | None:
    if path == root or not path.is_relative_to(root):
        return None
    word = str(path.relative_to(root))
    return None if word[0] in "-~" else word
