"""Plan a sweep: every combination is composed and checked before any run folder is written.

`write_runs` writes the folders, several at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf

from hpc_parallel.config.checks.site_checks import PATH_RULE, is_path
from hpc_parallel.config.compose import Cell, SweepCells
from hpc_parallel.config.node_devices import AUTO
from hpc_parallel.config.resolve import UnresolvedError
from hpc_parallel.config.schema import RunConfig, SweepConfig
from hpc_parallel.config.tasks import LEAST_OTHERS, OF_LOSSES
from hpc_parallel.launch import run_files
from hpc_parallel.launch.import_check import check_models
from hpc_parallel.launch.prepare import PreparedRun, prepare
from hpc_parallel.layout.batch_plan import usual_batch_size
from hpc_parallel.problems import (
    ConfigError,
    Problem,
    Problems,
    as_override,
    hydra_value,
    raise_if_any,
    spell,
)
from hpc_parallel.record.provenance import source_state
from hpc_parallel.record.snapshot import Snapshot, cached_plan_snapshot
from hpc_parallel.record.sweep_folder import SkippedRun, Sweep, SweepRun, is_sweep_folder
from hpc_parallel.slurm.jobs import Job
from hpc_parallel.sweep import pack_runs
from hpc_parallel.sweep.earlier import Earlier

MAX_THREADS = 8  # that write run folders: most of the time is waiting for the disk
T = TypeVar("T")
OF_THE_SWEEP = ("sweep.", "dry_run=")  # overrides that apply to the sweep and not to a run


@dataclass(frozen=True, eq=False)
class PlannedRun:
    """One run to start."""

    run: PreparedRun
    overrides: tuple[str, ...]
    swept: tuple[str, ...]  # overrides in which the runs of the sweep differ
    before: SweepRun | None = None  # its record from an earlier start of the sweep

    @property
    def label(self) -> str:
        return " ".join(self.swept) or self.run.config.name

    def recorded(self, job: Job | None = None) -> SweepRun:
        config, job_id = self.run.config, None if job is None else job.id
        return SweepRun(self.overrides, self.run.folder.path, config.nodes, config.gpus_per_node, job_id)


@dataclass(frozen=True)
class KeptRun:
    """A run of an earlier start that is not started again because it is completed or in progress."""

    run: SweepRun
    swept: tuple[str, ...]
    state: str


@dataclass(frozen=True)
class SweepPlan:
    """A checked sweep."""

    folder: Path
    command: tuple[str, ...]
    settings: SweepConfig
    runs: list[PlannedRun]  # to start
    kept: list[KeptRun] = field(default_factory=list)
    skipped: list[SkippedRun] = field(default_factory=list)  # combinations that can't run
    duplicates: int = 0  # number of combinations that equal an earlier one
    earlier: Earlier | None = None
    started: str = field(default_factory=lambda: f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}")

    def manifest(self, jobs: Mapping[Path, Job]) -> Sweep:
        """The content of `sweep.json`. Runs of an earlier start keep their position.

        jobs: by run folder.
        """
        records = {planned: planned.recorded(jobs.get(planned.run.folder.path)) for planned in self.runs}
        restarted = {
            planned.before: record for planned, record in records.items() if planned.before is not None
        }
        old = self.earlier.sweep.runs if self.earlier is not None else ()
        new = [record for planned, record in records.items() if planned.before is None]
        return Sweep(
            command=self.command,
            started=self.earlier.sweep.started if self.earlier is not None else self.started,
            parallelism=self.settings.parallelism,
            runs=(*(restarted.get(run, run) for run in old), *new),
            skipped=tuple(self.skipped),
        )


def plan_sweep(
    cells: SweepCells,
    *,
    command: Sequence[str],
    config_dir: str | None = None,
    earlier: Earlier | None = None,
) -> SweepPlan:
    """Check all combinations. Those that can't run are skipped or stop the sweep (`sweep.on_invalid`).

    earlier: the sweep to continue.

    Raises ConfigError with the problems of all combinations if nothing may start, and UnresolvedError if
    the command itself is wrong.
    """
    folder = earlier.folder if earlier is not None else cells.folder
    planner = _SweepChecker(config_dir, earlier, folder)
    for cell in cells.cells:
        planner.add(cell)
    planner.try_models()
    settings = SweepConfig(**cells.settings)
    if earlier is not None:
        earlier.require_all_found()
    planner.require_valid(settings)
    return SweepPlan(
        folder=folder,
        command=tuple(command),
        settings=settings,
        runs=planner.runs,
        kept=planner.kept,
        skipped=planner.skipped(),
        duplicates=planner.duplicates,
        earlier=earlier,
    )


@dataclass
class _SweepChecker:
    """Checks the combinations of a sweep one by one, and collects the results."""

    config_dir: str | None
    earlier: Earlier | None
    folder: Path  # of the sweep
    runs: list[PlannedRun] = field(default_factory=list)
    kept: list[KeptRun] = field(default_factory=list)
    duplicates: int = 0
    # The launcher that launcher.kind=auto selects for the whole sweep, and the reason. It stays the same even
    # if planning takes long.
    _launcher: tuple[str, str] | None = None
    _errors: list[tuple[Sequence[str], ConfigError]] = field(default_factory=list)  # by overrides of a run
    _identities: set[str] = field(default_factory=set)
    _plan: Callable[..., Snapshot] = field(default_factory=cached_plan_snapshot)

    def add(self, cell: Cell) -> None:
        overrides, swept = run_overrides(cell.overrides), tuple(run_overrides(cell.swept))
        try:
            run = self._prepared(cell.config, overrides)
        except UnresolvedError:
            raise
        except ConfigError as error:
            self._errors.append((overrides, error))
            if self.earlier is not None:  # the command includes this combination: it is not missing
                self.earlier.find(overrides)
            return
        identity = repr({**run.values, "run_dir": run.config.run_dir})
        if identity in self._identities:
            self.duplicates += 1
            return
        self._identities.add(identity)
        before = self.earlier.find(overrides) if self.earlier is not None else None
        if before is not None and self.earlier is not None:
            state = self.earlier.state(before)
            if state.settled:
                self.kept.append(KeptRun(before, swept, state.text))
                return
            if state.has_checkpoint:
                run = self._resumed(cell, before=before) or run
        self.runs.append(PlannedRun(run, tuple(overrides), swept, before))

    def _prepared(self, config: DictConfig, overrides: Sequence[str], **preset: str) -> PreparedRun:
        """Prepare and check a run. Automatic settings get the same values in all runs of the sweep."""
        answers: dict[str, Any] = dict(preset)
        if OmegaConf.select(config, "training.global_batch_size", default=0) is None:
            size = usual_batch_size(OmegaConf.select(config, "model"))  # the same for all layouts
            answers["training.global_batch_size"] = size
        if OmegaConf.select(config, "sweep.prune", default=None) == "median":
            answers["sweep.folder"] = str(self.folder.absolute())
        is_auto = OmegaConf.select(config, "launcher.kind", default=None) == AUTO
        if is_auto and self._launcher:
            answers["launcher.kind"], _ = self._launcher
        run = prepare(
            config, overrides=overrides, config_dir=self.config_dir, keep=self._plan, preset=answers
        )
        if is_auto:
            self._launcher = self._launcher or (run.config.launcher.kind, run.launcher_reason)
            run = replace(run, launcher_reason=self._launcher[1])
        return run

    def try_models(self) -> None:
        """Leave out the runs whose layout the user's model or optimizer refuses."""
        refusals = check_models([(planned.run.config, planned.run.values) for planned in self.runs])
        for planned, problems in zip(list(self.runs), refusals, strict=True):
            if problems:
                self.runs.remove(planned)
                self._errors.append((planned.overrides, ConfigError(problems)))

    def _resumed(self, cell: Cell, *, before: SweepRun) -> PreparedRun | None:
        """The run from its newest checkpoint, in its own folder; None if it can't be resumed."""
        run_dir = str(before.run_dir)
        places = [f"{key}={hydra_value(run_dir)}" for key in ("run_dir", "resume")]
        overrides = [*run_overrides(cell.overrides), *places]
        try:
            return self._prepared(cell.config, overrides, run_dir=run_dir, resume=run_dir)
        except ConfigError:  # its configuration has changed, or its last step is done
            return None

    def require_valid(self, settings: SweepConfig) -> None:
        """Raise ConfigError if an invalid combination stops the sweep, or runs contradict each other."""
        if self._errors and (settings.on_invalid == "stop" or not (self.runs or self.kept)):
            problems = {str(problem): problem for _, error in self._errors for problem in error.problems}
            raise ConfigError(list(problems.values()))
        _require_consistent([planned.run for planned in self.runs], settings, kept=len(self.kept))

    def skipped(self) -> list[SkippedRun]:
        return list(
            dict.fromkeys(
                SkippedRun(tuple(overrides), tuple(map(str, error.problems)))
                for overrides, error in self._errors
            )
        )


def run_overrides(overrides: Sequence[str]) -> list[str]:
    """The overrides that apply to a run and not to the whole sweep."""
    return [override for override in overrides if not override.lstrip("+").startswith(OF_THE_SWEEP)]


def _require_consistent(runs: Sequence[PreparedRun], settings: SweepConfig, *, kept: int) -> None:
    """Raise ConfigError unless each run has its own folder, and all share a launcher and `sweep.` keys.

    kept: the number of runs that are not started again.
    """
    problems: list[Problem | str] = []
    if len({run.folder.path for run in runs}) < len(runs):
        rule = "is the same for several runs of the sweep, but each run needs its own folder"
        problems.append(Problem("run_dir", runs[0].config.run_dir, rule, (None,)))
    common: list[tuple[str, set[Any]]] = [
        ("launcher.kind", {run.config.launcher.kind for run in runs}),
        ("dry_run", {run.config.dry_run for run in runs}),
        ("sweep.pack", {pack_runs.choice(run.config) for run in runs}),
        *((f"sweep.{key}", {getattr(run.config.sweep, key) for run in runs})
          for key in (
              "on_invalid", "parallelism", "wait", "pack_nodes", "pack_minutes", "runs_per_gpu", "prune",
              "prune_after",
          )),
    ]  # fmt: skip
    for key, values in common:
        if len(values) > 1:
            ordered = sorted(values, key=str)
            rule = "has several values, but applies to the whole sweep"
            problems.append(Problem(key, ordered, rule, (ordered[0],)))
    if settings.objective != SweepConfig.objective:
        rule = "only another sweeper uses it. Try hydra/sweeper=optuna"
        problems.append(f"sweep.objective={spell(settings.objective)}: {rule}.")
    if settings.folder is not None:
        problems.append(Problem("sweep.folder", settings.folder, "is hydra.sweep.dir in a sweep", (None,)))
    if settings.prune != "off":
        problems += prune_problems([run.config for run in runs], count=len(runs) + kept)
    if runs and not problems:
        problems = list(pack_runs.find_problems(runs))
    raise_if_any(problems)


def prune_problems(configs: Sequence[RunConfig], *, count: int) -> Problems:
    """Why the losses of the runs can't be compared at the same step. count: the number of all runs."""
    if count <= LEAST_OTHERS:
        rule = f"compares a run with {LEAST_OTHERS} others, and this sweep has {count}"
        yield Problem("sweep.prune", "median", rule, ("off",))
    for key in OF_LOSSES:
        if len({repr(attrgetter(key)(config)) for config in configs}) > 1:
            yield different_losses(key)


def different_losses(key: str) -> Problem:
    rule = f"compares losses at the same step, and {key} has several values"
    return Problem("sweep.prune", "median", rule, ("off",))


def folder_problems(folder: Path) -> list[Problem | str]:
    """Why `hydra.sweep.dir` can't be the sweep folder."""
    if not is_path(str(folder)):
        return [Problem("hydra.sweep.dir", str(folder), PATH_RULE, ("runs/sweeps/mine",))]
    if is_sweep_folder(folder):
        resume = as_override("sweep.resume", folder)
        return [f"hydra.sweep.dir = {folder} already holds a sweep. Try {resume}."]
    return []


def write_runs(runs: Sequence[PreparedRun]) -> None:
    """Create every run folder. Source that several runs keep is copied once and then hard-linked.

    Raises ConfigError if a folder can't be created. Then the other folders are removed.
    """
    state = cache(source_state)
    snapshots: list[Snapshot] = []  # already copied
    written: list[PreparedRun] = []

    def write(run: PreparedRun) -> None:
        files = run.snapshot.files if run.snapshot else None
        copied = next((snapshot for snapshot in snapshots if snapshot.files is files), None)
        run_files.write(run, copied=copied, git_state=state)
        written.append(run)
        if copied is None and run.snapshot is not None:
            snapshots.append(run.snapshot)

    try:
        first = {id(run.snapshot.files) if run.snapshot else None: run for run in reversed(runs)}
        for run in first.values():
            write(run)
        others = (run for run in runs if not any(run is other for other in first.values()))
        for_each(write, others)
    except BaseException:  # Ctrl-C too
        take_back(written)
        raise


def take_back(runs: Iterable[PreparedRun]) -> None:
    """Undo `write_runs` for runs that have not started."""
    for run in runs:
        run_files.undo_write(run)


def for_each(work: Callable[[T], object], items: Iterable[T]) -> None:
    """Call `work` for every item in threads; after all have ended, raise the first error."""
    with ThreadPoolExecutor(MAX_THREADS) as pool:
        for future in [pool.submit(work, item) for item in items]:
            future.result()
