"""The Python interface: compose a configuration, submit it, look at runs (docs/python.md).

    import hpc_parallel

    run = hpc_parallel.submit(hpc_parallel.compose(["strategy=pipeline", "nodes=2"]))
    print(run.wait()["final_loss"])

Nothing here prints, reads `sys.argv`, sets a signal handler or imports torch. Hydra's global state is left
as it was.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from hpc_parallel.config.command_line import CommandLine
from hpc_parallel.config.hydra_state import borrowed_hydra
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.launch.checked_run import checked_run, with_resumed
from hpc_parallel.launch.choose_launcher import choose
from hpc_parallel.launch.launcher import SiteRefusedError
from hpc_parallel.launch.recompose import Origin, recompose, remember
from hpc_parallel.launch.wait import conclude_job, patience_s
from hpc_parallel.problems import ConfigError, Problem
from hpc_parallel.record.job_state import job_state
from hpc_parallel.record.names import RUNS
from hpc_parallel.record.recorded import RecordedRun, find_runs, read_run
from hpc_parallel.supervise.end_runs import Target, end_runs
from hpc_parallel.supervise.run_state import State, states

__all__ = ["ConfigError", "Run", "RunConfig", "SiteRefusedError", "State", "compose", "runs", "submit"]

_LOCAL_PERIOD_S = 0.1  # between two looks at a run of this machine
_JOB_PERIOD_S = 2.0  # at one of Slurm's, whose accounting serves many users


def compose(overrides: Sequence[str] = (), *, config_dir: str | PathLike[str] | None = None) -> RunConfig:
    """The checked configuration of `python -m hpc_parallel.run OVERRIDE ...`.

    overrides: as on the command line, without flags: `["strategy=pipeline", "nodes=2"]`.
    config_dir: a folder with configuration files of your own (`--config-dir`).

    Raises ConfigError with all problems; its `problems` lists them.
    """
    line = _line(overrides, config_dir)
    with borrowed_hydra():
        line = with_resumed(line, warn=_warn)
        config = checked_run(line).config
    own = None if line.extra_dir is None else Path(line.extra_dir).absolute()
    remember(config, Origin(tuple(line.overrides), own))
    return config


def submit(config: RunConfig) -> Run:
    """Start the run here, hand it to Slurm or write its batch script, as `launcher.kind` says; do not wait.

    A run of this machine ends with this process. The overrides that `config` was composed from are recorded
    for `resume` and `rerun`, with one more for each value that was changed since. The configuration is
    checked again.

    Raises ConfigError with all problems, and SiteRefusedError with Slurm's words.
    """
    if not isinstance(config, RunConfig):
        raise TypeError(f"submit() takes what compose() returns, not a {type(config).__name__}")
    with borrowed_hydra():
        prepared = recompose(config)
    if prepared.config.dry_run:
        raise ConfigError([Problem("dry_run", True, "starts nothing, and submit() starts the run", (False,))])
    for note in prepared.notes:
        _warn(note)
    launcher, _ = choose(prepared.config.launcher.kind)
    watcher = launcher.start(replace(prepared, command=("hpc_parallel.submit",)))
    return Run(prepared.folder.path, _watcher=watcher, _is_ours=True)


def runs(folder: str | PathLike[str] = RUNS) -> list[Run]:
    """The run in `folder`, those of a sweep folder, or all in the tree below, sorted by path.

    A run with damaged files is listed too (`Run.damaged`). Folders that are no runs are left out.
    """
    return [Run(each.path) for each in find_runs(Path(folder))]


class Run:
    """A run in its folder. Everything is read anew each time, and nothing that is read is executed."""

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        _watcher: threading.Thread | None = None,
        _is_ours: bool = False,
    ) -> None:
        self._path = read_run(Path(path)).path
        self._watcher = _watcher  # sees the end of a run that this process started here
        self._is_ours = _is_ours  # submitted or cancelled from here, so `wait` may record how it ended

    def __repr__(self) -> str:
        return f"hpc_parallel.Run({str(self._path)!r})"

    @property
    def path(self) -> Path:
        """The run folder, absolute."""
        return self._path

    @property
    def state(self) -> State:
        """Of the run or its Slurm job: `word` (running, completed, ...), `reason`, `ended`, `job`."""
        return states([self._recorded])[0]

    @property
    def config(self) -> dict[str, Any] | None:
        """The whole resolved configuration, as plain values; None if it can't be read.

        Not a RunConfig: a run may be of another version, and its texts must not be resolved again.
        """
        return self._recorded.config

    def metrics(self) -> list[dict[str, Any]]:
        """One table for each logged step so far."""
        return self._recorded.metrics

    @property
    def summary(self) -> dict[str, Any] | None:
        """How the run ended, with its totals; None before that, or if it can't be read."""
        return self._recorded.summary

    @property
    def failure(self) -> dict[str, Any] | None:
        """Which rank failed first, where and why (`line`); None if no failure is recorded."""
        return self._recorded.failure

    @property
    def damaged(self) -> dict[str, str]:
        """The files of the run that can't be read, with the reasons."""
        return self._recorded.damaged

    def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait until the run has ended, whatever its outcome; returns its summary.

        Ctrl-C ends the waiting, not the run.

        Raises TimeoutError if it has not ended after `timeout_s`, and RuntimeError if it has ended, or was
        never started, and left no summary.
        """
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        if self._watcher is not None:  # which records the end, so the state alone may be too early
            self._watcher.join(timeout_s)
        while not (state := self.state).ended:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"{self.path} has not ended after {timeout_s:g} s: {state}")
            time.sleep(min(left_s, _JOB_PERIOD_S if state.job else _LOCAL_PERIOD_S))
        return self._last_summary(state)

    def cancel(self) -> None:
        """Ask the run to save its state and end; do nothing if it has ended.

        Raises SiteRefusedError if Slurm refuses, and RuntimeError if the run is not yours to end, or is on
        another host.
        """
        run = self._recorded
        target = Target(run, states([run])[0])
        if target.state.ended:
            return
        reason = target.damage or target.refusal
        if reason is None:
            self._is_ours = True
            reason = end_runs([target], warn=_warn).get(run.path)
        if reason is not None:
            error = SiteRefusedError if target.job else RuntimeError
            raise error(f"{self.path}: {reason}")

    @property
    def _recorded(self) -> RecordedRun:
        return read_run(self._path)

    def _last_summary(self, state: State) -> dict[str, Any]:
        """Of a run that has ended. Another host may have written it, and this one not see it yet."""
        deadline = time.monotonic() + (patience_s(state.word) if state.job else 0)
        while (summary := self.summary) is None and time.monotonic() < deadline:
            time.sleep(_LOCAL_PERIOD_S)
        if summary is None and self._is_ours and state.job is not None:
            last = job_state(state.job)
            # A completed job has a summary, which does not show on this host yet.
            if last.ended and last.state != "COMPLETED":
                conclude_job(self._recorded.folder, state.job, last)
            summary = self.summary
        if summary is None:
            raise RuntimeError(f"{self.path} has no summary: {state}")
        return summary


def _line(overrides: Sequence[str], config_dir: str | PathLike[str] | None) -> CommandLine:
    if isinstance(overrides, str) or not all(isinstance(word, str) for word in overrides):
        raise TypeError('compose() takes a list of overrides: ["strategy=pipeline", "nodes=2"]')
    flags = [word for word in overrides if word.startswith("-")]
    if flags:
        hint = "Try config_dir=... in place of --config-dir; sweeps (-m) are for the command"
        raise ConfigError([f"{flag}: compose() takes overrides and no flags. {hint}." for flag in flags])
    own = [] if config_dir is None else ["--config-dir", os.path.expanduser(config_dir)]
    line = CommandLine.parse([*own, *overrides])
    if line.sweeps:
        raise ConfigError(["hydra.mode=MULTIRUN: a sweep is many runs. Try python -m hpc_parallel.run -m."])
    return line


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)
