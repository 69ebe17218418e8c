"""The last lines of a sweep: its folder, and what can be done with it, as commands to paste into a shell."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from hpc_parallel.record.names import command_on, from_here
from hpc_parallel.sweep.earlier import resume_command


def after_submission(folder: Path, *, submitted: bool) -> list[str]:
    """The lines after the submission; `submitted`: whether Slurm accepted any job."""
    commands = {"to run those that failed": resume_command(folder)}
    if submitted:
        commands = {
            "to follow the runs": command_on(folder, "status", "--watch"),
            "to end them": command_on(folder, "cancel"),
            **commands,
        }
    return _lines(folder, commands)


def after_the_end(folder: Path, *, completed: bool) -> list[str]:
    """The lines after the last run; `completed`: whether all runs completed, so that none is left to run."""
    if not completed:
        return _lines(folder, {"to run those that are missing or failed": resume_command(folder)})
    return _lines(folder, {"to compare the runs": report_command(folder)})


def report_command(folder: Path) -> str:
    """The shell command that makes the report of a sweep."""
    return shlex.join(["python", "-m", "hpc_parallel", "report", from_here(folder)])


def _lines(folder: Path, commands: Mapping[str, str]) -> list[str]:
    lines = [f"sweep folder: {from_here(folder)}"]
    for purpose, command in commands.items():
        lines += [f"{purpose}:", f"  {command}"]
    return lines
