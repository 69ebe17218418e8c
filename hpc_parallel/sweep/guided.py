"""`-m` with another sweeper, launcher or callback of Hydra's: that one decides what runs.

It may choose a run by the figures of those before it, so only what holds for all is checked at the start.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path

from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from hpc_parallel.config.checks.all_checks import in_order
from hpc_parallel.config.compose import UnresolvedError, composing, resolve
from hpc_parallel.config.diagnose import Trials, diagnose, try_each
from hpc_parallel.config.schema import RunConfig, SweepConfig
from hpc_parallel.config.tasks import objective_problems, objectives
from hpc_parallel.exit_codes import DONE, FAILED, REFUSED
from hpc_parallel.launch.launcher import SiteRefusedError
from hpc_parallel.problems import ConfigError, Found, Problem, quoted
from hpc_parallel.record.sweep_folder import MANIFEST, Sweep, is_sweep_folder, read_sweep, write_sweep
from hpc_parallel.shell import complain
from hpc_parallel.sweep import sweep_table
from hpc_parallel.sweep.plan import OF_THE_SWEEP
from hpc_parallel.sweep.start import open_folder
from hpc_parallel.sweep.trial import RunFailedError, Trial, key_of, read_result

RESULTS = "optimization_results.yaml"  # of Hydra's plugins for Optuna, Ax and Nevergrad
_COUNTING = ("objective", "wait")  # keys of `sweep.` that count; each run is waited for in any case


def guide(
    words: Sequence[str],
    *,
    command: Sequence[str],
    config_dir: str,
    config_name: str,
    extra_dir: str | None,
    earlier: Path | None = None,
) -> int:
    """Let Hydra sweep, each run being followed to its end; returns the exit code.

    `words`: overrides; `earlier`: the folder of `sweep.resume`. Raises ConfigError where nothing ran, and
    KeyboardInterrupt.
    """
    with composing(config_dir, extra_dir=extra_dir):
        loader = GlobalHydra.instance().config_loader()
        whole = loader.load_configuration(config_name, list(words), run_mode=RunMode.MULTIRUN)
        wanted = objectives(whole.sweep.objective)
        folder = Path(os.path.expanduser(str(whole.hydra.sweep.dir))).absolute()
        params = [f"{key}={value}" for key, value in (whole.hydra.sweeper.get("params") or {}).items()]
        trials = Trials(config_name)
        problems, first = try_each([*params, *words], trials=trials, sweep=True)
        fixed = [word for word in [*params, *words] if word in first]
        with suppress(UnresolvedError):  # the sweeper may have what is missing
            config = resolve(trials.compose(first))[0]
            problems += _problems(config, words=words, fixed=fixed, folder=folder, earlier=earlier)
    if problems:
        others = diagnose(
            words, config_dir=config_dir, config_name=config_name, extra_dir=extra_dir, sweep=True
        )
        known = {str(each): each for each in [*problems, *others]}
        raise ConfigError(in_order(list(known.values()), words))
    _open(folder, command)
    trial = Trial(folder, frozenset(map(key_of, fixed)), extra_dir)
    stopped: Exception | None = None
    try:
        with composing(config_dir, extra_dir=extra_dir):
            sweeping = GlobalHydra.instance().hydra
            assert sweeping is not None
            sweeping.multirun(config_name, trial, [*words, f"hydra.sweep.dir={quoted(folder)}"])
    except KeyboardInterrupt:
        with suppress(ConfigError):  # nothing ran yet
            _tell(trial, None, wanted=wanted)
        raise
    except Exception as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":  # Hydra's own switch
            raise
        stopped = error
    return _tell(trial, stopped, wanted=wanted)


def _problems(
    config: RunConfig, *, words: Sequence[str], fixed: Sequence[str], folder: Path, earlier: Path | None
) -> Found:
    """What none of the sweeper's runs can be, by the one of the first values; `fixed`: said of all alike."""
    for word in words:
        if word.startswith(OF_THE_SWEEP) and word not in fixed:
            key, _, value = word.partition("=")
            rule = "has several values, and counts for the sweep as a whole"
            yield Problem(key, value, rule, (value.partition(",")[0],))
    own = SweepConfig()
    for key in (each.name for each in fields(SweepConfig) if each.name not in _COUNTING):
        if (value := getattr(config.sweep, key)) != getattr(own, key):
            rule = "does not count with another sweeper, launcher or callback of Hydra's: that one decides"
            yield Problem(f"sweep.{key}", value, rule, (getattr(own, key),))
    if earlier is not None:
        rule = "holds runs that another sweeper chose, and it alone can go on with them"
        yield Problem("sweep.resume", earlier, f"{rule} (Optuna: hydra.sweeper.storage, study_name)", (None,))
    yield from objective_problems(config)
    if config.launcher.kind == "script":
        yield Problem("launcher.kind", "script", "gives a sweeper nothing back", ("slurm", "local"))
    if config.dry_run:
        rule = "can't show runs that a sweeper chooses by the results of others"
        yield Problem("dry_run", True, rule, (False,))
    if config.resume is not None:
        yield Problem("resume", config.resume, "goes on with one run, and a sweeper starts several", (None,))
    if any(word.startswith("run_dir=") and "${" not in word for word in fixed):
        rule = "is the same for every run of the sweep, and each needs a folder of its own"
        yield Problem("run_dir", config.run_dir, rule, (None,))
    if earlier is None and is_sweep_folder(folder):
        rule = "holds a sweep already, and another sweeper begins a new one"
        yield Problem("hydra.sweep.dir", folder, rule, (f"{folder}-2",))


def _open(folder: Path, command: Sequence[str]) -> None:
    open_folder(folder)
    write_sweep(folder, Sweep(tuple(command), f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", None))


def _tell(trial: Trial, stopped: Exception | None, *, wanted: Sequence[str]) -> int:
    """What ran, what the sweeper made of it, and what stopped it; returns the exit code.

    Raises ConfigError where nothing ran.
    """
    folder, fixed = trial.folder, trial.fixed
    sweep = read_sweep(folder)
    if not sweep.runs:
        _remove(folder)
        if isinstance(stopped, SiteRefusedError):
            complain([stopped])
            return REFUSED
        reasons: list[Problem | str] = [problem for each in sweep.skipped for problem in each.problems]
        if stopped is not None and not reasons:
            reasons = [_line(stopped)]
        raise ConfigError(list(dict.fromkeys(reasons)) or ["the sweeper asked for no run"])
    rows, failed = [], False
    for run in sweep.runs:
        result = read_result(run.run_dir, wanted=wanted)
        found = [f"{result.figures[name]:.6g}" if name in result.figures else "" for name in wanted]
        label = " ".join(word for word in run.overrides if key_of(word) not in fixed)
        rows.append((os.path.relpath(run.run_dir), label, *found, result.failure or "completed"))
        failed = failed or result.failure is not None
    print(flush=True)
    sweep_table.console().print(sweep_table.table(("run", "overrides", *wanted, "state"), rows))
    for line in sweep_table.skipped(sweep.skipped, [run.overrides for run in sweep.runs]):
        print(line)
    if (results := folder / RESULTS).is_file():
        print(results.read_text(encoding="utf-8").rstrip())
    print(f"sweep folder  {folder}", flush=True)
    if stopped is not None:
        complain([f"the sweeper stopped: {_line(stopped)}"])
    if isinstance(stopped, SiteRefusedError):
        return REFUSED
    return FAILED if failed or stopped is not None else DONE


def _line(error: Exception) -> str:
    """Ours say what is the matter; of others also the kind, and how to see more."""
    text = " ".join(str(error).split())
    if isinstance(error, ConfigError | RunFailedError | SiteRefusedError):
        return text
    return f"{type(error).__name__}: {text} (HYDRA_FULL_ERROR=1 shows where)"


def _remove(folder: Path) -> None:
    """Take away a sweep folder in which nothing ran, with what Hydra wrote there, and parents left empty."""
    for name in (MANIFEST, "multirun.yaml"):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):  # one that holds something stays
        for empty in (folder, folder.parent, folder.parent.parent):
            empty.rmdir()
