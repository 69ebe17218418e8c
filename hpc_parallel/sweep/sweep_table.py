"""What a sweep prints: tables and notes about its runs, and the commands that can follow."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpc_parallel.record.names import command_on, from_here
from hpc_parallel.record.sweep_folder import SkippedRun, common
from hpc_parallel.slurm.jobs import JobState
from hpc_parallel.sweep.earlier import resume_command
from hpc_parallel.sweep.sweep_plan import SweepPlan

_UNLIMITED = 100_000  # columns: in a file or a pipe, nothing is truncated or wrapped


def console() -> Console:
    """A console that wraps lines only on a terminal."""
    default = Console(highlight=False)
    return default if default.is_terminal else Console(highlight=False, width=_UNLIMITED)


def submitted(
    plan: SweepPlan, jobs: Mapping[Path, str], states: Mapping[str, JobState], *, without_job: str = ""
) -> Table:
    """A table of run, overrides, nodes, job id and state. without_job: the state of runs that have no job."""
    rows: list[Sequence[str]] = []
    for planned in plan.runs:
        path = planned.run.folder.path
        job = jobs.get(path, "")
        state = str(states.get(job, "submitted")) if job else without_job
        run_dir = os.path.relpath(path) if job or without_job != "refused" else ""
        rows.append((run_dir, planned.label, str(planned.run.config.nodes), job, state))
    for kept in plan.kept:
        label, job = " ".join(kept.swept), kept.run.job_id or ""
        rows.append((os.path.relpath(kept.run.run_dir), label, str(kept.run.nodes), job, kept.state))
    return table(("run", "overrides", "nodes", "job", "state"), rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table of plain columns; values are shown complete and without markup."""
    plain = Table(box=None, pad_edge=False, header_style="bold")
    for name in head:
        plain.add_column(name, justify="right" if name == "nodes" else "left", overflow="fold")
    for row in rows:
        plain.add_row(*(Text(cell) for cell in row))
    return plain


def notes(plan: SweepPlan) -> list[str]:
    """Lines about what was left out: impossible combinations with their reasons, and duplicates."""
    lines = skipped(plan.skipped, [planned.overrides for planned in plan.runs])
    if plan.duplicates:
        lines.append(f"dropped {plan.duplicates} duplicate{'s' * (plan.duplicates > 1)}")
    return lines


def skipped(impossible: Sequence[SkippedRun], runs: Sequence[Sequence[str]]) -> list[str]:
    """Lines about impossible combinations. runs: the overrides of the possible ones."""
    count = len(impossible)
    lines = [f"skipped {count} combination{'s' * (count > 1)} that can't run:"] if impossible else []
    fixed = common([*(run.overrides for run in impossible), *runs])
    for run in impossible:
        distinct = " ".join(override for override in run.overrides if override not in fixed)
        lines += [f"  {distinct or ' '.join(run.overrides)}: {problem}" for problem in run.problems]
    return lines


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
    report = shlex.join(["python", "-m", "hpc_parallel", "report", from_here(folder)])
    return _lines(folder, {"to compare the runs": report})


def _lines(folder: Path, commands: Mapping[str, str]) -> list[str]:
    lines = [f"sweep folder: {from_here(folder)}"]
    for purpose, command in commands.items():
        lines += [f"{purpose}:", f"  {command}"]
    return lines
