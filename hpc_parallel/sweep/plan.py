"""What a sweep will start: every combination composed and checked before any of them is written."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omegaconf import open_dict, read_write

from hpc_parallel.config.compose import UnresolvedError
from hpc_parallel.config.schema import SweepConfig
from hpc_parallel.config.sweep_compose import Cell, Cells
from hpc_parallel.launch.prepare import PreparedRun, prepare
from hpc_parallel.problems import ConfigError, Problem, quoted, spell
from hpc_parallel.record.snapshot import Snapshot, plan_snapshot
from hpc_parallel.record.sweep_folder import SkippedRun, Sweep, SweepRun, is_sweep_folder
from hpc_parallel.sweep.earlier import Earlier, State

OF_THE_SWEEP = ("sweep.", "dry_run=")  # what is said to the whole, and no part of a run


@dataclass(frozen=True, eq=False)
class PlannedRun:
    """One run that is to start; `swept`: those of its overrides in which the runs of the sweep differ;
    `before`: what it was at an earlier start of the sweep."""

    run: PreparedRun
    overrides: tuple[str, ...]
    swept: tuple[str, ...]
    before: SweepRun | None = None

    @property
    def label(self) -> str:
        return " ".join(self.swept) or self.run.config.name

    def recorded(self, job_id: str | None = None) -> SweepRun:
        config = self.run.config
        return SweepRun(self.overrides, self.run.folder.path, config.nodes, config.gpus_per_node, job_id)


@dataclass(frozen=True)
class KeptRun:
    """A run of an earlier start of the sweep that is not started again: completed, or going on."""

    run: SweepRun
    swept: tuple[str, ...]
    state: str


@dataclass(frozen=True)
class SweepPlan:
    """All of a sweep: what starts, what need not, what can't and why, and how often one was said twice."""

    folder: Path
    command: tuple[str, ...]
    settings: SweepConfig
    runs: list[PlannedRun]
    kept: list[KeptRun] = field(default_factory=list)
    skipped: list[SkippedRun] = field(default_factory=list)
    duplicates: int = 0
    earlier: Earlier | None = None
    started: str = field(default_factory=lambda: f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}")

    def manifest(self, jobs: Mapping[Path, str]) -> Sweep:
        """`jobs`: run folder -> job id. Runs of an earlier start keep their place."""
        recorded = {each: each.recorded(jobs.get(each.run.folder.path)) for each in self.runs}
        again = {each.before: record for each, record in recorded.items() if each.before is not None}
        known = self.earlier.sweep.runs if self.earlier is not None else ()
        new = [record for each, record in recorded.items() if each.before is None]
        return Sweep(
            command=self.command,
            started=self.earlier.sweep.started if self.earlier is not None else self.started,
            parallelism=self.settings.parallelism,
            runs=(*(again.get(run, run) for run in known), *new),
            skipped=tuple(self.skipped),
        )


def plan_sweep(
    cells: Cells,
    *,
    command: Sequence[str],
    config_dir: str | None = None,
    earlier: Earlier | None = None,
) -> SweepPlan:
    """Check all combinations; those that can't run are left out, or stop the sweep (`sweep.on_invalid`).

    `earlier`: the sweep to go on with. Raises ConfigError where nothing may start, with the problems of
    all, and UnresolvedError where the command itself is wrong.
    """
    runs: list[PlannedRun] = []
    kept: list[KeptRun] = []
    errors: list[tuple[Cell, ConfigError]] = []
    seen: set[str] = set()
    duplicates = 0
    plan = remembered()
    for cell in cells.cells:
        try:
            run = prepare(cell.config, overrides=own(cell.overrides), config_dir=config_dir, plan=plan)
        except UnresolvedError:
            raise
        except ConfigError as error:
            errors.append((cell, error))
            if earlier is not None:  # said, and so not left out
                earlier.find(own(cell.overrides))
            continue
        same = repr({**run.values, "run_dir": run.config.run_dir})
        if same in seen:
            duplicates += 1
            continue
        seen.add(same)
        before = earlier.find(own(cell.overrides)) if earlier is not None else None
        if before is not None and earlier is not None:
            state = earlier.state(before)
            if state.settled:
                kept.append(KeptRun(before, tuple(own(cell.swept)), state.words))
                continue
            run = _gone_on(cell, before=before, state=state, config_dir=config_dir, plan=plan) or run
        runs.append(PlannedRun(run, tuple(own(cell.overrides)), tuple(own(cell.swept)), before))
    settings = SweepConfig(**cells.settings)
    if earlier is not None:
        earlier.require_all_found()
    if errors and (settings.on_invalid == "stop" or not (runs or kept)):
        problems = {str(problem): problem for _, error in errors for problem in error.problems}
        raise ConfigError(list(problems.values()))
    _require_one_whole([planned.run for planned in runs], settings)
    return SweepPlan(
        folder=earlier.folder if earlier is not None else cells.folder,
        command=tuple(command),
        settings=settings,
        runs=runs,
        kept=kept,
        skipped=list(
            dict.fromkeys(
                SkippedRun(tuple(own(cell.overrides)), tuple(map(str, error.problems)))
                for cell, error in errors
            )
        ),
        duplicates=duplicates,
        earlier=earlier,
    )


def remembered() -> Callable[..., Snapshot]:
    """`plan_snapshot` that asks git once for all runs that keep the same."""
    known: dict[str, tuple[Path, Snapshot]] = {}

    def plan(destination: Path, **options: Any) -> Snapshot:
        key = repr(options)
        if key not in known:
            known[key] = (destination, plan_snapshot(destination, **options))
        first, snapshot = known[key]
        return snapshot.moved(first, destination)

    return plan


def _gone_on(
    cell: Cell, *, before: SweepRun, state: State, config_dir: str | None, plan: Callable[..., Snapshot]
) -> PreparedRun | None:
    """The run from its newest checkpoint, in its own folder; None where it has to begin anew."""
    if not state.has_checkpoint:
        return None
    place = str(before.run_dir)
    config = copy.deepcopy(cell.config)
    with read_write(config), open_dict(config):
        config.run_dir = config.resume = place
    words = [*own(cell.overrides), f"run_dir={quoted(place)}", f"resume={quoted(place)}"]
    try:
        return prepare(config, overrides=words, config_dir=config_dir, plan=plan)
    except ConfigError:  # its configuration has changed, or its last step is done
        return None


def own(words: Sequence[str]) -> list[str]:
    """Those that are a run's, and not said to the sweep as a whole."""
    return [word for word in words if not word.lstrip("+").startswith(OF_THE_SWEEP)]


def _require_one_whole(runs: Sequence[PreparedRun], settings: SweepConfig) -> None:
    """A folder for each run, one launcher and one set of `sweep.` keys for all. Raises ConfigError."""
    problems: list[Problem | str] = []
    if len({run.folder.path for run in runs}) < len(runs):
        rule = "is the same for several runs of the sweep, and each needs a folder of its own"
        problems.append(Problem("run_dir", runs[0].config.run_dir, rule, (None,)))
    wholes: list[tuple[str, set[Any]]] = [
        ("launcher.kind", {run.config.launcher.kind for run in runs}),
        ("dry_run", {run.config.dry_run for run in runs}),
        *((f"sweep.{key}", {getattr(run.config.sweep, key) for run in runs})
          for key in ("on_invalid", "parallelism", "wait")),
    ]  # fmt: skip
    for key, values in wholes:
        if len(values) > 1:
            several = sorted(values, key=str)
            rule = "has several values, and counts for the sweep as a whole"
            problems.append(Problem(key, several, rule, (several[0],)))
    if (asked := settings.objective) != SweepConfig.objective:
        rule = "only another sweeper asks for it. Try hydra/sweeper=optuna"
        problems.append(f"sweep.objective={spell(asked)}: {rule}.")
    if problems:
        raise ConfigError(problems)


def folder_problems(folder: Path) -> list[Problem | str]:
    """Why `hydra.sweep.dir` can't be the sweep folder."""
    if not str(folder).isprintable() or set(str(folder)) & set("%\\:"):
        rule = "must be a printable path without % and backslash (patterns to Slurm) and colon (ends a path)"
        return [Problem("hydra.sweep.dir", str(folder), rule, ("runs/sweeps/mine",))]
    if is_sweep_folder(folder):
        return [f"hydra.sweep.dir = {folder} holds a sweep already. Try sweep.resume={folder}."]
    return []
