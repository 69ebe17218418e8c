"""One run that another sweeper requests: launch it, wait for it, and return its objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from hpc_parallel.config.schema import register
from hpc_parallel.config.tasks import objective_problems, objectives
from hpc_parallel.launch.launcher import launcher_of
from hpc_parallel.launch.prepare import PreparedRun, prepare
from hpc_parallel.problems import ConfigError
from hpc_parallel.record.endings import COMPLETED, PRUNED
from hpc_parallel.record.recorded import read_run
from hpc_parallel.record.recorded_start import key_of
from hpc_parallel.record.sweep_folder import SkippedRun, Sweep, change_sweep
from hpc_parallel.record.values import number
from hpc_parallel.slurm.submit import SiteRefusedError
from hpc_parallel.sweep.sweep_plan import PlannedRun, run_overrides


class RunFailedError(RuntimeError):
    """A run has no value for the sweeper; the message names the run and the reason."""


@dataclass(frozen=True)
class Trial:
    """Hydra's task function. It has plain values only: some launchers of Hydra send it to other processes."""

    folder: Path  # of the sweep
    fixed: frozenset[str]  # keys with the same value in all runs
    config_dir: str | None  # the user's own configuration files

    def __call__(self, composed: DictConfig) -> float | list[float]:
        """Run the configuration and return its `sweep.objective`; a list if the key is a list.

        The sweeper handles all exceptions.

        Raises ConfigError if it can't run, SiteRefusedError, RunFailedError, and KeyboardInterrupt if the
        user cancelled it.
        """
        register()  # needed if a launcher of Hydra has started another process
        hydra = HydraConfig.get()
        overrides = OmegaConf.to_container(hydra.overrides.task, resolve=False)
        assert isinstance(overrides, list)
        overrides = run_overrides(overrides)
        chosen = tuple(override for override in overrides if key_of(override) not in self.fixed)
        print(f"\nrun {hydra.job.num} of the sweep: {' '.join(chosen) or 'no overrides'}", flush=True)
        try:
            planned = PlannedRun(self._prepare(composed, overrides), tuple(overrides), chosen)
            values = self._launch(planned)
        except (ConfigError, SiteRefusedError) as error:
            reasons = error.problems if isinstance(error, ConfigError) else [error]
            skipped = SkippedRun(tuple(overrides), tuple(map(str, reasons)))
            change_sweep(self.folder, lambda sweep: replace(sweep, skipped=(*sweep.skipped, skipped)))
            print("can't run", flush=True)
            raise
        return values if isinstance(planned.run.config.sweep.objective, list) else values[0]

    def _prepare(self, composed: DictConfig, overrides: Sequence[str]) -> PreparedRun:
        composed.launcher.wait = True
        if composed.sweep.prune != "off":
            composed.sweep.folder = str(self.folder)
        run = prepare(composed, overrides=overrides, config_dir=self.config_dir)
        if problems := list(objective_problems(run.config)):
            raise ConfigError(problems)
        return run

    def _launch(self, planned: PlannedRun) -> list[float]:
        """Launch the run, wait for its end, and return its figures."""
        run, path = planned.run, planned.run.folder.path
        launcher, choice = launcher_of(run)
        print(f"{run}\n{choice}", flush=True)
        change_sweep(self.folder, lambda sweep: replace(sweep, runs=(*sweep.runs, planned.recorded())))
        try:
            launcher.launch(run)
        except (ConfigError, SiteRefusedError):
            change_sweep(self.folder, lambda sweep: _without(sweep, path))
            raise
        ended = read_run(path)
        job = next(iter(ended.job_ids[-1:]), None)
        if job is not None:
            change_sweep(self.folder, lambda sweep: _with_job(sweep, path, job))
        if ended.totals.outcome == "cancelled":  # a run on this machine records this
            raise KeyboardInterrupt
        result = read_result(path, names=objectives(run.config.sweep.objective))
        if result.failure is not None:
            raise RunFailedError(f"{result.failure}: {path}")
        print(", ".join(f"{name} = {value}" for name, value in result.figures.items()), flush=True)
        return list(result.figures.values())


@dataclass(frozen=True)
class Result:
    """The figures of a run for the sweeper."""

    figures: dict[str, float]
    failure: str | None  # why figures are missing
    end: str = COMPLETED  # how it ended, if not in a failure


def read_result(path: Path, *, names: Sequence[str]) -> Result:
    """Read the named figures of the run in `path`; a run that has failed has none.

    Those of a run that `sweep.prune` has ended are of its last step.
    """
    run = read_run(path)
    summary = run.summary or {}
    if not run.totals.ended_well:
        return Result({}, (run.root_cause and run.root_cause.line) or run.totals.outcome or "unfinished")
    values = {name: number(summary.get(name)) for name in names}
    figures = {name: value for name, value in values.items() if value is not None}
    missing = [name for name in names if name not in figures]
    end = COMPLETED if run.totals.completed else (run.totals.ended_early or PRUNED)
    return Result(figures, f"{end} without {' and '.join(missing)}" if missing else None, end)


def _without(sweep: Sweep, path: Path) -> Sweep:
    return replace(sweep, runs=tuple(run for run in sweep.runs if run.run_dir != path))


def _with_job(sweep: Sweep, path: Path, job: str) -> Sweep:
    runs = tuple(replace(run, job_id=job) if run.run_dir == path else run for run in sweep.runs)
    return replace(sweep, runs=runs)
