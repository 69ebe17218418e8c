"""`-m` with another Hydra sweeper, launcher or callback, which decides what runs.

The sweeper may choose a run by the results of earlier runs. Therefore only the settings that all runs have in
common are checked before the first run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from hpc_parallel.config.checks.all_checks import in_order
from hpc_parallel.config.compose import Composer, params
from hpc_parallel.config.diagnose import diagnose, try_each
from hpc_parallel.config.hydra_internals import composing, current_loader, load
from hpc_parallel.config.resolve import UnresolvedError, resolve
from hpc_parallel.config.schema import RunConfig, SweepConfig, register
from hpc_parallel.config.tasks import OF_LOSSES, figures_of, objective_problems, objectives
from hpc_parallel.exit_codes import DONE, FAILED, REFUSED
from hpc_parallel.launch.launcher import launcher_of
from hpc_parallel.launch.prepare import PreparedRun, prepare
from hpc_parallel.problems import ConfigError, Problem, Problems, hydra_value, raise_if_any, tried
from hpc_parallel.record.endings import COMPLETED, PRUNED
from hpc_parallel.record.metrics_file import figure
from hpc_parallel.record.recorded import read_run
from hpc_parallel.record.recorded_start import key_of
from hpc_parallel.record.sweep_folder import (
    MANIFEST,
    SkippedRun,
    Sweep,
    change_sweep,
    is_sweep_folder,
    read_sweep,
    write_sweep,
)
from hpc_parallel.record.trust import require_trusted
from hpc_parallel.record.values import number
from hpc_parallel.shell import complain
from hpc_parallel.slurm.submit import SiteRefusedError
from hpc_parallel.sweep import view
from hpc_parallel.sweep.start import open_folder
from hpc_parallel.sweep.sweep_plan import OF_THE_SWEEP, PlannedRun, different_losses, run_overrides
from hpc_parallel.terminal import stdout_console

RESULTS = "optimization_results.yaml"  # written by Hydra's plugins for Optuna, Ax and Nevergrad
# Keys of `sweep.` that are allowed; every run is waited for anyway.
_ALLOWED = ("objective", "wait", "prune", "prune_after")


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
        raise_if_any(objective_problems(run.config))
        return run

    def _launch(self, planned: PlannedRun) -> list[float]:
        run, path = planned.run, planned.run.folder.path
        launcher, choice = launcher_of(run)
        print(f"{run}\n{choice}", flush=True)
        change_sweep(self.folder, lambda sweep: replace(sweep, runs=(*sweep.runs, planned.recorded())))
        try:
            launcher.launch(run)
        except (ConfigError, SiteRefusedError):
            change_sweep(
                self.folder,
                lambda sweep: replace(sweep, runs=tuple(run for run in sweep.runs if run.run_dir != path)),
            )
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
    early = run.totals.ended_early
    end = early or PRUNED
    if run.totals.completed:
        end = f"{COMPLETED} early: {early}" if early else COMPLETED
    return Result(figures, f"{end} without {' and '.join(missing)}" if missing else None, end)


def _with_job(sweep: Sweep, path: Path, job: str) -> Sweep:
    runs = tuple(replace(run, job_id=job) if run.run_dir == path else run for run in sweep.runs)
    return replace(sweep, runs=runs)


def guide(
    words: Sequence[str],
    *,
    command: Sequence[str],
    config_dir: str,
    config_name: str,
    extra_dir: str | None,
    earlier: Path | None = None,
) -> int:
    """Let Hydra sweep, and follow each run to its end. Returns the exit code.

    words: overrides; earlier: the folder of `sweep.resume`.

    Raises ConfigError if nothing ran, and KeyboardInterrupt.
    """
    with composing(config_dir, extra_dir=extra_dir):
        scope, problems = _check(words, config_name=config_name, earlier=earlier)
    if problems:
        others = diagnose(
            words, config_dir=config_dir, config_name=config_name, extra_dir=extra_dir, sweep=True
        )
        raise ConfigError(in_order([*problems, *others], words))
    open_folder(scope.folder)
    started = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    write_sweep(scope.folder, Sweep(tuple(command), started, None, (), ()))
    trial = Trial(scope.folder, frozenset(map(key_of, scope.fixed)), extra_dir)
    stopped: Exception | None = None
    try:
        with composing(config_dir, extra_dir=extra_dir):
            hydra = GlobalHydra.instance().hydra
            assert hydra is not None
            hydra.multirun(config_name, trial, [*words, f"hydra.sweep.dir={hydra_value(scope.folder)}"])
    except KeyboardInterrupt:
        with suppress(ConfigError):  # nothing ran yet
            _report(trial, None, names=scope.objectives)
        raise
    except Exception as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":  # Hydra's switch for tracebacks
            raise
        stopped = error
    return _report(trial, stopped, names=scope.objectives)


@dataclass(frozen=True)
class _Scope:
    """What is known about a sweep before its runs are chosen."""

    folder: Path
    objectives: Sequence[str]
    fixed: Sequence[str]  # overrides that are the same for all runs
    swept: Sequence[str]  # the keys of the other overrides


def _check(
    words: Sequence[str], *, config_name: str, earlier: Path | None
) -> tuple[_Scope, list[Problem | str]]:
    """Compose the sweep and its first run; return its scope and the problems that all runs have."""
    composed = load(current_loader(), config_name, words, RunMode.MULTIRUN)
    names = objectives(composed.sweep.objective)
    folder = Path(os.path.expanduser(str(composed.hydra.sweep.dir))).absolute()
    composer = Composer(config_name)
    overrides = [*params(composed), *words]
    problems, first = try_each(overrides, composer=composer, sweep=True)
    shared_folder = composed.launcher.shared_folder
    # Hydra writes its files there, and follows links.
    tried(partial(require_trusted, folder, key="hydra.sweep.dir", shared_folder=shared_folder), problems)
    fixed = [override for override in overrides if override in first]
    scope = _Scope(folder, names, fixed, [key_of(word) for word in overrides if word not in fixed])
    with suppress(UnresolvedError):  # the sweeper may provide what is missing
        config = resolve(composer.compose(first)).config
        problems += _problems(config, words=words, scope=scope, earlier=earlier)
        unchecked = [] if problems else [name for name in names if name not in figures_of(config)[0]]
        rule = "can't be checked before the first run ends: it is a metric of your own"
        complain(f"sweep.objective={name} {rule}" for name in unchecked)
    return scope, problems


def _problems(config: RunConfig, *, words: Sequence[str], scope: _Scope, earlier: Path | None) -> Problems:
    """Problems of all the sweeper's runs, found with the first values of the swept keys."""
    for word in words:
        if word.startswith(OF_THE_SWEEP) and word not in scope.fixed:
            key, _, value = word.partition("=")
            rule = "has several values, but applies to the whole sweep"
            yield Problem(key, value, rule, (value.partition(",")[0],))
    defaults = SweepConfig()
    for key in (field.name for field in fields(SweepConfig) if field.name not in _ALLOWED):
        if (value := getattr(config.sweep, key)) != getattr(defaults, key):
            rule = "has no effect with another Hydra sweeper, launcher or callback, which decides itself"
            yield Problem(f"sweep.{key}", value, rule, (getattr(defaults, key),))
    if earlier is not None:
        rule = "holds runs that another sweeper chose, and only that sweeper can continue them"
        yield Problem("sweep.resume", earlier, f"{rule} (Optuna: hydra.sweeper.storage, study_name)", (None,))
    yield from objective_problems(config)
    yield from _prune_problems(config, scope)
    if config.launcher.kind == "script":
        yield Problem("launcher.kind", "script", "returns no result to a sweeper", ("slurm", "local"))
    if config.dry_run:
        rule = "can't show runs that a sweeper chooses from the results of others"
        yield Problem("dry_run", True, rule, (False,))
    if config.resume is not None:
        yield Problem("resume", config.resume, "continues one run, but a sweeper starts several", (None,))
    if any(word.startswith("run_dir=") and "${" not in word for word in scope.fixed):
        rule = "is the same for every run of the sweep, but each run needs its own folder"
        yield Problem("run_dir", config.run_dir, rule, (None,))
    if earlier is None and is_sweep_folder(scope.folder):
        rule = "already holds a sweep, but another sweeper starts a new one"
        yield Problem("hydra.sweep.dir", scope.folder, rule, (f"{scope.folder}-2",))


def _prune_problems(config: RunConfig, scope: _Scope) -> Problems:
    if config.sweep.prune == "off":
        return
    for key in OF_LOSSES:
        if any(swept == key or swept.startswith(f"{key}.") for swept in scope.swept):
            yield different_losses(key)
    if list(scope.objectives) not in (["final_loss"], ["validation_loss"]):
        rule = "is not the loss alone, by which sweep.prune compares runs"
        yield Problem("sweep.objective", config.sweep.objective, rule, ("final_loss",))


def _report(trial: Trial, stopped: Exception | None, *, names: Sequence[str]) -> int:
    """Print the runs, the sweeper's results and what stopped it. Returns the exit code.

    names: the objectives.

    Raises ConfigError if nothing ran.
    """
    folder, fixed = trial.folder, trial.fixed
    sweep = read_sweep(folder)
    if not sweep.runs:
        return _report_nothing(folder, sweep.skipped, stopped)
    rows, failed = [], False
    for run in sweep.runs:
        result = read_result(run.run_dir, names=names)
        figures = [figure(result.figures[name], digits=6) if name in result.figures else "" for name in names]
        label = " ".join(override for override in run.overrides if key_of(override) not in fixed)
        rows.append((os.path.relpath(run.run_dir), label, *figures, result.failure or result.end))
        failed = failed or result.failure is not None
    print(flush=True)
    stdout_console().print(view.table(("run", "overrides", *names, "state"), rows))
    for line in view.skipped(sweep.skipped, [run.overrides for run in sweep.runs]):
        print(line)
    if (results := folder / RESULTS).is_file():
        print(results.read_text(encoding="utf-8").rstrip())
    print("\n".join(view.after_the_end(folder, completed=True)), flush=True)
    if stopped is not None:
        complain([f"the sweeper stopped: {_line(stopped)}"])
    if isinstance(stopped, SiteRefusedError):
        return REFUSED
    return FAILED if failed or stopped is not None else DONE


def _report_nothing(folder: Path, skipped: Sequence[SkippedRun], stopped: Exception | None) -> int:
    """Remove the folder of a sweep without runs, with Hydra's file in it, and parents that become empty.

    Raises ConfigError, or returns REFUSED if the site refused.
    """
    for name in (MANIFEST, "multirun.yaml"):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):  # a folder that is not empty stays
        for empty in (folder, folder.parent, folder.parent.parent):
            empty.rmdir()
    if isinstance(stopped, SiteRefusedError):
        complain([stopped])
        return REFUSED
    reasons: list[Problem | str] = [problem for run in skipped for problem in run.problems]
    if stopped is not None and not reasons:
        reasons = [_line(stopped)]
    raise ConfigError(reasons or ["the sweeper started no run"])


def _line(error: Exception) -> str:
    """Our errors explain themselves; others are shown with their class and a hint for the traceback."""
    text = " ".join(str(error).split())
    if isinstance(error, ConfigError | RunFailedError | SiteRefusedError):
        return text
    return f"{type(error).__name__}: {text} (HYDRA_FULL_ERROR=1 shows where)"
