"""What a sweep shows: its runs in one display, then tables, notes, and the commands that can follow."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import TaskID
from rich.table import Table

from hpc_parallel.layout.holdings import model_facts
from hpc_parallel.layout.step_facts import rounded_parts
from hpc_parallel.problems import printable
from hpc_parallel.record.endings import (
    COMPLETED,
    PRUNED,
    Failure,
    Stop,
    Summary,
    other_state,
    other_statistics,
)
from hpc_parallel.record.metrics_file import (
    MetricsLine,
    MetricsReader,
    described,
    figure,
    fitting,
    per_second,
)
from hpc_parallel.record.names import command_on, from_here
from hpc_parallel.record.run_folder import RunFolder, read_phase
from hpc_parallel.record.sweep_folder import SkippedRun, common
from hpc_parallel.slurm.jobs import JobState
from hpc_parallel.sweep.earlier import resume_command
from hpc_parallel.sweep.sweep_plan import PlannedRun, SweepPlan
from hpc_parallel.terminal import cell, progress_bars, room_beside_bar, stdout_console


class SweepView:
    """Shows runs from their start to their end; a context manager.

    On a terminal each active run has a bar, and all runs have one; otherwise each start and end is a line.
    """

    def __init__(self, count: int, *, console: Console | None = None) -> None:
        self._console = console or stdout_console()
        self._count = count
        self._ended: list[str] = []
        self._readers: dict[Path, MetricsReader] = {}
        self._tasks: dict[Path, TaskID] = {}
        self._notes: dict[Path, str] = {}
        self._begun: set[Path] = set()  # runs that have shown a step
        self._bars = progress_bars(self._console)
        self._total = self._bars.add_task(f"0 of {count} ended", total=count)

    def __enter__(self) -> SweepView:
        self._bars.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._bars.stop()

    def start(self, planned: PlannedRun, note: str = "starting") -> None:
        """Add a run that was started or waits in a queue."""
        path = planned.run.folder.path
        self._readers[path] = MetricsReader(planned.run.folder.metrics)
        self._tasks[path] = self._bars.add_task("", total=planned.run.steps)
        self.note(planned, note)

    def note(self, planned: PlannedRun, note: str) -> None:
        """Show what a run waits for, or its job's state; each change is printed once."""
        path = planned.run.folder.path
        if self._notes.get(path) == note:
            return
        self._notes[path] = note
        self._bars.update(self._tasks[path], description=f"{planned.label}: {note}")
        if not self._console.is_terminal:
            self.say(f"{planned.label}: {note}")

    def poll(self, planned: PlannedRun) -> None:
        """Show the newest logged step of a run; before the first one, what its start does."""
        path = planned.run.folder.path
        lines = self._readers[path].read()
        if not lines and path not in self._begun and (phase := read_phase(planned.run.folder)):
            start = f"{planned.label}: starting: {phase}"
            self._bars.update(self._tasks[path], description=start[: room_beside_bar(self._console)])
        if lines:
            self._begun.add(path)
            newest = MetricsLine.of(lines[-1])
            parts = [f"{planned.label}:", *described(newest, steps=planned.run.steps)]
            self._bars.update(
                self._tasks[path], description=fitting(parts, columns=room_beside_bar(self._console)),
                completed=newest.step, total=newest.steps or planned.run.steps,
            )  # fmt: skip

    def end(self, planned: PlannedRun) -> bool:
        """Print how a run ended, with the cause of a failure. Returns whether it ended well."""
        self.poll(planned)
        del self._readers[planned.run.folder.path]
        self._bars.remove_task(self._tasks.pop(planned.run.folder.path))
        outcome, line = outcome_line(planned.run.folder)
        self._print_end(planned, outcome, line)
        return outcome in (COMPLETED, PRUNED)

    def skip(self, planned: PlannedRun) -> None:
        """Print that a run was cancelled before it started."""
        self._print_end(planned, "cancelled", "cancelled before its turn")

    def _print_end(self, planned: PlannedRun, outcome: str, line: str) -> None:
        self._ended.append(outcome)
        text = f"{len(self._ended)} of {self._count} ended"
        self._bars.update(self._total, completed=len(self._ended), description=text)
        self.say(f"[{len(self._ended)}/{self._count}] {planned.label}: {line}")

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def counts(self) -> str:
        """The number of runs by outcome: `5 completed, 1 failed`."""
        counts = {outcome: self._ended.count(outcome) for outcome in dict.fromkeys(sorted(self._ended))}
        return ", ".join(f"{count} {outcome}" for outcome, count in counts.items())


def outcome_line(folder: RunFolder) -> tuple[str, str]:
    """The outcome of a run, and one line with the outcome and the loss or the cause."""
    summary = Summary.read(folder) or Summary()
    outcome = summary.outcome or "failed"
    if outcome == "failed" and (failure := Failure.read(folder)) is not None:
        return outcome, printable(f"failed: {failure.line}" if failure.line else outcome)
    if outcome == "cancelled" and (stopped := Stop.read(folder)) is not None:
        return outcome, printable(stopped.line or outcome)
    early = printable(summary.ended_early or "")
    parts = [early if early and outcome == PRUNED else f"{outcome}{early and f' early: {early}'}"]
    if summary.final_loss is not None:
        parts.append(f"loss {figure(summary.final_loss)}")
    if summary.samples_per_s is not None:
        parts.append(f"{per_second(summary.samples_per_s)} samples/s")
    return outcome, ", ".join(parts)


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
        plain.add_row(*map(cell, row))
    return plain


def notes(plan: SweepPlan) -> list[str]:
    """Lines about impossible combinations, duplicates, earlier runs, and losses that can't be compared."""
    lines = skipped(plan.skipped, [planned.overrides for planned in plan.runs])
    if plan.duplicates:
        lines.append(f"dropped {plan.duplicates} duplicate{'s' * (plan.duplicates > 1)}")
    statistics = _other_statistics(plan)
    state = other_state((rounded_parts(planned.run.config), planned.label) for planned in plan.runs)
    return [*lines, *_of_earlier_runs(plan), *filter(None, (*statistics, state))]


def _of_earlier_runs(plan: SweepPlan) -> list[str]:
    """A line about the runs of the sweep that `sweep.resume` names: which of them run again, and how."""
    again = [planned for planned in plan.runs if planned.before is not None]
    continued = sum(planned.run.config.resume is not None for planned in again)
    gone = sum(not os.path.isdir(planned.before.run_dir) for planned in again if planned.before is not None)
    counts = Counter(kept.state for kept in plan.kept)
    counts.update({"from a checkpoint": continued, "from the start": len(again) - continued - gone})
    counts.update({"from the start, without a folder": gone})
    texts = [f"{count} {text}" for text, count in counts.items() if count]
    return [f"earlier runs: {', '.join(texts)}"] if texts else []


def _other_statistics(plan: SweepPlan) -> list[str]:
    """A line for each model, data and global batch whose runs have other statistics of BatchNorm."""
    groups: dict[str, list[tuple[int | None, str]]] = {}
    for planned in plan.runs:
        config = planned.run.config
        same = repr((config.model, config.data, config.training.global_batch_size))
        has_statistics = config.task.name == "train" and model_facts(config.model).batch_norm
        samples = planned.run.plan.batch.samples_per_microbatch if has_statistics else None
        groups.setdefault(same, []).append((samples, planned.label))
    return [*map(other_statistics, groups.values())]


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
