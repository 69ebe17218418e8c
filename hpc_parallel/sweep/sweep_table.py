"""What a sweep is and became, as tables."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpc_parallel.record.job_state import JobState
from hpc_parallel.record.sweep_folder import SkippedRun, common
from hpc_parallel.sweep.plan import SweepPlan

_WIDE = 100_000  # into a file or a pipe, nothing is cut or folded


def console() -> Console:
    shown = Console(highlight=False)
    return shown if shown.is_terminal else Console(highlight=False, width=_WIDE)


def submitted(
    plan: SweepPlan, jobs: Mapping[Path, str], states: Mapping[str, JobState], *, word: str = ""
) -> Table:
    """Run, overrides, nodes, job id, state; `word`: the state of runs without a job."""
    rows: list[Sequence[str]] = []
    for planned in plan.runs:
        path = planned.run.folder.path
        job = jobs.get(path, "")
        state = str(states.get(job, "submitted")) if job else word
        where = os.path.relpath(path) if job or word != "refused" else ""
        rows.append((where, planned.label, str(planned.run.config.nodes), job, state))
    for kept in plan.kept:
        label, job = " ".join(kept.swept), kept.run.job_id or ""
        rows.append((os.path.relpath(kept.run.run_dir), label, str(kept.run.nodes), job, kept.state))
    return table(("run", "overrides", "nodes", "job", "state"), rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Plain columns; a value is shown as it is (no markup) and whole."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for name in head:
        made.add_column(name, justify="right" if name == "nodes" else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    return made


def notes(plan: SweepPlan) -> list[str]:
    """Lines on what was left out: each impossible combination with its reasons, and duplicates."""
    lines = skipped(plan.skipped, [each.overrides for each in plan.runs])
    if plan.duplicates:
        lines.append(f"dropped {plan.duplicates} duplicate{'s' * (plan.duplicates > 1)}")
    return lines


def skipped(left_out: Sequence[SkippedRun], runs: Sequence[Sequence[str]]) -> list[str]:
    """Lines on impossible combinations; `runs`: the overrides of those that are possible."""
    count = len(left_out)
    lines = [f"skipped {count} combination{'s' * (count > 1)} that can't run:"] if left_out else []
    all_of_them = [each.overrides for each in left_out]
    fixed = common([*all_of_them, *runs])
    for each in left_out:
        words = " ".join(word for word in each.overrides if word not in fixed)
        lines += [f"  {words or ' '.join(each.overrides)}: {problem}" for problem in each.problems]
    return lines
