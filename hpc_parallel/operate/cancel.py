"""`python -m hpc_parallel cancel RUN|SWEEP ...`: end runs; each saves its state first, where it can.

A RUN or SWEEP is a path, a run id, a job id or a unique part of a name. Exit codes: 0 all that went on are
ending, 1 nothing went on or you said no, 2 what was asked for is unknown, 3 Slurm refused.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_parallel.config.problems import ConfigError
from hpc_parallel.launch.attempts import starts
from hpc_parallel.launch.job_state import states_by_accounting
from hpc_parallel.launch.names import label
from hpc_parallel.launch.owner import process_lives, withdraw
from hpc_parallel.launch.recorded import RecordedRun, read_run
from hpc_parallel.operate.find import find_all, is_one, once
from hpc_parallel.operate.state import NO_ANSWER, NOT_STARTED, UNKNOWN, WAITING, State, states, waits
from hpc_parallel.operate.terminal import DONE, FAILED, REFUSED, guarded, print_json
from hpc_parallel.worker.conclude import conclude

BEGINNING_S = 10.0  # at most, from a run's turn in a sweep to a process of its own


@dataclass(frozen=True)
class Target:
    """A run that was named, as it stood then."""

    run: RecordedRun
    state: State

    @property
    def job(self) -> str | None:
        return self.state.job

    @property
    def pid(self) -> int:
        """Of the process that starts the ranks (0: nobody's): its SIGTERM has them save and end."""
        said = (self.run.owner or {}).get("pid")
        return said if isinstance(said, int) else 0

    @property
    def refusal(self) -> str | None:
        """Why it can't be ended; None where it can."""
        if self.state.ended:
            return "was never started" if self.state.word == NOT_STARTED else f"has ended: {self.state}"
        if self.job is None and self.state.word == UNKNOWN:
            host = (self.run.owner or {}).get("host")
            in_turn = f"python -m hpc_parallel cancel {self.run.run_id}"  # its process is the whole sweep's
            there = in_turn if waits(self.run) else f"kill {self.pid}"
            return f"runs on {host}, and this is {platform.node()}. There: {there}"
        return None

    def __str__(self) -> str:
        where = f"job {self.job}" if self.job else f"process {self.pid}"
        return f"{label(self.run.path)} ({where}, {self.state})"


def main(arguments: Sequence[str]) -> int:
    """Ask, then end; returns the exit code."""
    given = parser().parse_args(list(arguments))
    return guarded(lambda: _cancel(given))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m hpc_parallel cancel", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    made.add_argument("runs", nargs="+", metavar="RUN|SWEEP")
    made.add_argument("--yes", action="store_true", help="don't ask")
    made.add_argument("--json", action="store_true", help="a list of objects; wants --yes")
    return made


def _cancel(given: argparse.Namespace) -> int:
    targets = _targets(given.runs)
    going = [target for target in targets if target.refusal is None]
    if not given.json:
        for target in targets:
            if target.refusal:
                print(f"{label(target.run.path)} {target.refusal}", file=sys.stderr)
    if going and not given.yes:
        if given.json or not sys.stdin.isatty():
            raise ConfigError(["Nobody can be asked here. Try --yes."])
        if not _agreed(going):
            return FAILED
    refused = _end(going)
    if given.json:
        print_json([_object(target, refused.get(target.run.path)) for target in targets])
        return REFUSED if refused else DONE if going else FAILED
    for target in going:
        if words := refused.get(target.run.path):
            print(f"{target}: {words}", file=sys.stderr)
        else:
            print(f"asked to end: {target}")
    return REFUSED if refused else DONE if going else FAILED


def _targets(words: Sequence[str]) -> list[Target]:
    """Each run once. Raises ConfigError, also where a word means a whole tree of runs."""
    named = find_all(words)
    if trees := [each for each in named if not is_one(each)]:
        raise ConfigError(
            [f"{tree.label} holds {len(tree.runs)} runs and is no sweep. Name them." for tree in trees]
        )
    runs = once(named)
    return [Target(run, state) for run, state in zip(runs, states(runs), strict=True)]


def _agreed(going: Sequence[Target]) -> bool:
    for target in going:
        print(target)
    count = f"{len(going)} runs" if len(going) > 1 else "this run"
    try:
        return input(f"end {count}? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _end(going: Sequence[Target]) -> dict[Path, str]:
    """Ask each to end; returns why not, of those that could not be asked."""
    refused: dict[Path, str] = {}
    silent = [target for target in going if target.state.reason == NO_ANSWER]
    refused |= {target.run.path: NO_ANSWER for target in silent}
    jobs = {target.job: target.run.path for target in going if target.job and target not in silent}
    if jobs:
        done = _scancel(list(jobs))
        if done.returncode != 0:
            words = done.stderr.strip() or f"scancel ended with {done.returncode}"
            told = {job: [line for line in words.splitlines() if job in line] for job in jobs}
            whom = {job: lines or [words] for job, lines in told.items() if lines or not any(told.values())}
            refused |= {jobs[job]: " ".join(lines) for job, lines in whom.items()}
        _conclude([target for target in going if target.job and target.run.path not in refused])
    # First what waits for its turn: the end of another would let it begin.
    begun = [target.run for target in going if not _withdrawn(target)]
    for run in begun:
        if why := _terminate(run):
            refused[run.path] = why
    return refused


def _withdrawn(target: Target) -> bool:
    if target.job is not None:
        return True
    try:
        if not waits(target.run) or not withdraw(target.run.folder):
            return False
    except FileNotFoundError:  # its sweep has ended meanwhile, and took it away
        return True
    conclude(target.run.folder, returncode=1, cancelled=True, environment={})
    return True


def _terminate(run: RecordedRun) -> str | None:
    """Ask a local run's process to end; returns why it can't be."""
    deadline = time.monotonic() + BEGINNING_S
    while "waits" in (run.owner or {}) and time.monotonic() < deadline:  # its process is the whole sweep's
        time.sleep(0.1)
        run = read_run(run.path)
    owner = run.owner or {}
    if "waits" in owner:
        return "begins just now. Try again"
    try:
        if "pid" in owner and process_lives(owner):  # else it has ended while we asked
            os.kill(owner["pid"], signal.SIGTERM)
    except ProcessLookupError:
        pass
    except PermissionError:
        return f"process {owner['pid']} is another user's"
    return None


def _scancel(jobs: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["scancel", *jobs], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess("scancel", returncode=1, stdout="", stderr=str(error))


def _conclude(asked: Sequence[Target]) -> None:
    """Say in the run folder how a job ended that could not say so itself, since it had never started."""
    waited = [target for target in asked if target.state.word == WAITING]
    known = states_by_accounting([target.job for target in waited if target.job])
    for target in waited:
        unheard = known[str(target.job)].ended and not target.run.folder.summary.exists()
        if unheard and not starts(target.run.folder):
            conclude(
                target.run.folder, returncode=1, cancelled=True, environment={"SLURM_JOB_ID": str(target.job)}
            )


def _object(target: Target, words: str | None) -> dict[str, Any]:
    reason = target.refusal or words
    return {
        "run": label(target.run.path),
        "path": str(target.run.path),
        "job_id": target.job,
        "pid": None if target.job or waits(target.run) else target.pid,
        "asked": reason is None,
        "reason": reason,
        "state": target.state.word,
    }
