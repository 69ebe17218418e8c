"""One run that another sweeper asks for: launched, waited for, and its figure handed back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from hpc_parallel.config.schema import register
from hpc_parallel.config.tasks import objective_problems, objectives
from hpc_parallel.launch.choose_launcher import choose
from hpc_parallel.launch.launcher import SiteRefusedError
from hpc_parallel.launch.prepare import PreparedRun, prepare
from hpc_parallel.problems import ConfigError
from hpc_parallel.record.recorded import number, read_run
from hpc_parallel.record.sweep_folder import SkippedRun, Sweep, change_sweep
from hpc_parallel.sweep.plan import PlannedRun, own


class RunFailedError(RuntimeError):
    """A run without the figure that the sweeper waits for; the message says which and why."""


@dataclass(frozen=True)
class Trial:
    """Hydra's task function. Plain values alone: some launchers send it to other processes.

    `folder`: of the sweep; `fixed`: keys that are alike in all runs; `config_dir`: the user's own files.
    """

    folder: Path
    fixed: frozenset[str]
    config_dir: str | None

    def __call__(self, composed: DictConfig) -> float | list[float]:
        """The run's `sweep.objective`, a list where that is one.

        Raises ConfigError where it can't run, SiteRefusedError, RunFailedError, and KeyboardInterrupt where
        the user ended it: these are the sweeper's to deal with.
        """
        register()  # where a launcher of Hydra's has begun another process
        hydra = HydraConfig.get()
        words = OmegaConf.to_container(hydra.overrides.task, resolve=False)
        assert isinstance(words, list)
        words = own(words)
        chosen = tuple(word for word in words if key_of(word) not in self.fixed)
        print(f"\nrun {hydra.job.num} of the sweep: {' '.join(chosen) or 'as said'}", flush=True)
        try:
            planned = PlannedRun(self._prepare(composed, words), tuple(words), chosen)
            found = self._follow(planned)
        except (ConfigError, SiteRefusedError) as error:
            reasons = error.problems if isinstance(error, ConfigError) else [error]
            skipped = SkippedRun(tuple(words), tuple(map(str, reasons)))
            change_sweep(self.folder, lambda sweep: replace(sweep, skipped=(*sweep.skipped, skipped)))
            print("can't run", flush=True)
            raise
        return found if isinstance(planned.run.config.sweep.objective, list) else found[0]

    def _prepare(self, composed: DictConfig, words: Sequence[str]) -> PreparedRun:
        composed.launcher.wait = True
        run = prepare(composed, overrides=words, config_dir=self.config_dir)
        if problems := list(objective_problems(run.config)):
            raise ConfigError(problems)
        return run

    def _follow(self, planned: PlannedRun) -> list[float]:
        """Launch it, and wait for its figures."""
        run, path = planned.run, planned.run.folder.path
        launcher, choice = choose(run.config.launcher.kind)
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
        if (ended.summary or {}).get("outcome") == "cancelled":  # as a run on this machine says it
            raise KeyboardInterrupt
        result = read_result(path, wanted=objectives(run.config.sweep.objective))
        if result.failure is not None:
            raise RunFailedError(f"{result.failure}: {path}")
        print(", ".join(f"{name} = {value}" for name, value in result.figures.items()), flush=True)
        return list(result.figures.values())


def key_of(word: str) -> str:
    return word.partition("=")[0]


@dataclass(frozen=True)
class Result:
    """What a run has for the sweeper; `failure`: why it has not all of it."""

    figures: dict[str, float]
    failure: str | None


def read_result(path: Path, *, wanted: Sequence[str]) -> Result:
    """Of the run in the folder `path`; the figures of one that did not complete count for nothing."""
    run = read_run(path)
    summary = run.summary or {}
    outcome = summary.get("outcome", "unfinished")
    if outcome != "completed":
        return Result({}, (run.failure or {}).get("line") or str(outcome))
    read = {name: number(summary.get(name)) for name in wanted}
    found = {name: value for name, value in read.items() if value is not None}
    missing = [name for name in wanted if name not in found]
    return Result(found, f"completed without {' and '.join(missing)}" if missing else None)


def _without(sweep: Sweep, path: Path) -> Sweep:
    return replace(sweep, runs=tuple(run for run in sweep.runs if run.run_dir != path))


def _with_job(sweep: Sweep, path: Path, job: str) -> Sweep:
    runs = tuple(replace(run, job_id=job) if run.run_dir == path else run for run in sweep.runs)
    return replace(sweep, runs=runs)
