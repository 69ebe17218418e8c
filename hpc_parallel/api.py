"""The Python interface: compose a configuration, submit it, read runs (docs/python.md).

    import hpc_parallel

    run = hpc_parallel.submit(hpc_parallel.compose(["strategy=pipeline", "nodes=2"]))
    print(run.wait()["final_loss"])

This module does not print, read `sys.argv`, set a signal handler or import torch. It restores Hydra's global
state.
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
from hpc_parallel.config.hydra_internals import borrowed_hydra
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.failure.end_runs import Target, end_runs
from hpc_parallel.failure.run_state import State, states
from hpc_parallel.launch.checked_run import checked_run, with_resumed
from hpc_parallel.launch.follow import conclude_job, summary_timeout_s
from hpc_parallel.launch.launcher import launcher_of
from hpc_parallel.launch.recompose import Origin, recompose, remember
from hpc_parallel.problems import ConfigError, Problem
from hpc_parallel.record.names import RUNS
from hpc_parallel.record.recorded import RecordedRun, find_runs, read_run
from hpc_parallel.slurm.jobs import Job, job_state
from hpc_parallel.slurm.submit import SiteRefusedError

__all__ = ["ConfigError", "Run", "RunConfig", "SiteRefusedError", "State", "compose", "runs", "submit"]

_LOCAL_POLL_S = 0.1  # for a run on this machine
_JOB_POLL_S = 2.0  # for a Slurm job, because Slurm's accounting serves many users


def compose(overrides: Sequence[str] = (), *, config_dir: str | PathLike[str] | None = None) -> RunConfig:
    """Compose and check the configuration of `python -m hpc_parallel.run OVERRIDE ...`.

    overrides: as on the command line, but without flags: `["strategy=pipeline", "nodes=2"]`.
    config_dir: a folder with your own configuration files (`--config-dir`).

    Raises ConfigError with all problems (`error.problems`).
    """
    with borrowed_hydra():
        line = with_resumed(_parse(overrides, config_dir), warn=_warn)
        run = checked_run(line)
    config = run.config
    user_dir = None if line.extra_dir is None else Path(line.extra_dir).absolute()
    remember(config, Origin(tuple(run.overrides), user_dir))
    return config


def submit(config: RunConfig) -> Run:
    """Start the run here, submit it to Slurm or write its batch script, as `launcher.kind` says; do not wait.

    A run on this machine ends when this process ends. The overrides of `config` are recorded for `resume` and
    `rerun`, with one more override for each value that was changed after `compose`. The configuration is
    checked again.

    Raises ConfigError with all problems, and SiteRefusedError with Slurm's message.
    """
    if not isinstance(config, RunConfig):
        raise TypeError(f"submit() takes the result of compose(), not a {type(config).__name__}")
    with borrowed_hydra():
        prepared = recompose(config)
    if prepared.config.dry_run:
        raise ConfigError([Problem("dry_run", True, "starts nothing, but submit() starts the run", (False,))])
    for note in prepared.notes:
        _warn(note)
    launcher, _ = launcher_of(prepared)
    watcher = launcher.start(replace(prepared, command=("hpc_parallel.submit",)))
    return Run(prepared.folder.path, _watcher=watcher, _is_ours=True)


def runs(folder: str | PathLike[str] = RUNS) -> list[Run]:
    """Find runs: the run in `folder`, the runs of a sweep folder, or all runs below `folder`, sorted by path.

    A run with damaged files is listed too (`Run.damaged`). Folders that are not runs are skipped.
    """
    return [Run(run.path) for run in find_runs(Path(folder))]


class Run:
    """A run and its folder. Each access reads the files again. No code from the folder is executed."""

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        _watcher: threading.Thread | None = None,
        _is_ours: bool = False,
    ) -> None:
        self._path = read_run(Path(path)).path
        self._watcher = _watcher  # waits for the end of a run that this process started on this machine
        self._is_ours = _is_ours  # this process submitted or cancelled it, so `wait` may record how it ended

    def __repr__(self) -> str:
        return f"hpc_parallel.Run({str(self._path)!r})"

    @property
    def path(self) -> Path:
        """The run folder, absolute."""
        return self._path

    @property
    def state(self) -> State:
        """State of the run or its Slurm job: `name` (running, completed, ...), `reason`, `ended`, `job`."""
        return states([self._recorded])[0]

    @property
    def config(self) -> dict[str, Any] | None:
        """The complete resolved configuration, as plain values; None if it can't be read.

        It is not a RunConfig: another version may have written it. Its strings must not be resolved again.
        """
        return self._recorded.config

    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of each logged step so far."""
        return self._recorded.metrics

    @property
    def summary(self) -> dict[str, Any] | None:
        """How the run ended, with its totals; None if it has not ended or `summary.json` can't be read."""
        return self._recorded.summary

    @property
    def failure(self) -> dict[str, Any] | None:
        """Which rank failed first, where and why (`line`); None if no failure is recorded."""
        return self._recorded.failure

    @property
    def damaged(self) -> dict[str, str]:
        """The files of the run that can't be read, each with the reason."""
        return self._recorded.damaged

    def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait until the run has ended with any outcome; returns its summary.

        Ctrl-C stops the waiting, not the run.

        Raises TimeoutError if the run has not ended after `timeout_s`, and RuntimeError if it has no summary
        because it was never started or ended without one.
        """
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        if self._watcher is not None:  # the watcher may write the summary after the state says `ended`
            self._watcher.join(None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))
        while not (state := self.state).ended:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"{self.path} has not ended after {timeout_s:g} s: {state}")
            time.sleep(min(left_s, _JOB_POLL_S if state.job else _LOCAL_POLL_S))
        return self._wait_for_summary(state)

    def cancel(self) -> None:
        """Ask the run to save its state and end; do nothing if it has ended.

        Raises SiteRefusedError if Slurm refuses, and RuntimeError if the run belongs to another user or is on
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

    def _wait_for_summary(self, state: State) -> dict[str, Any]:
        """The summary of a run that has ended; if another host wrote it, it may appear on this host later."""
        summary = self.summary
        if summary is None and state.job is not None:
            job = job_state(self._recorded.job or Job(state.job))
            deadline = time.monotonic() + summary_timeout_s(job.state)
            while (summary := self.summary) is None and time.monotonic() < deadline:
                time.sleep(_LOCAL_POLL_S)
            # A completed job has a summary, even if this host can't see the file yet.
            if summary is None and self._is_ours and job.ended and job.state != "COMPLETED":
                conclude_job(self._recorded.folder, state.job, job)
                summary = self.summary
        if summary is None:
            raise RuntimeError(f"{self.path} has no summary: {state}")
        return summary


def _parse(overrides: Sequence[str], config_dir: str | PathLike[str] | None) -> CommandLine:
    is_text, overrides = isinstance(overrides, str), [*overrides]  # a generator can be read once
    if is_text or not all(isinstance(override, str) for override in overrides):
        raise TypeError('compose() takes a list of overrides: ["strategy=pipeline", "nodes=2"]')
    flags = [override for override in overrides if override.startswith("-")]
    if flags:
        hint = "Try config_dir=... for --config-dir; a sweep (-m) needs the command"
        raise ConfigError([f"{flag}: compose() takes overrides and no flags. {hint}." for flag in flags])
    dir_flags = [] if config_dir is None else ["--config-dir", os.path.expanduser(config_dir)]
    line = CommandLine.parse([*dir_flags, *overrides])
    if line.sweeps:
        raise ConfigError(
            ["hydra.mode=MULTIRUN: compose() can't start a sweep. Try python -m hpc_parallel.run -m."]
        )
    return line


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)
