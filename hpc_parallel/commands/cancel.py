"""`python -m hpc_parallel cancel RUN|SWEEP ...`: end runs; each saves its state first if it can.

A RUN or SWEEP is a path, a run id, a job id or a unique part of a name. Exit codes: 0 the runs are ending,
1 no run was running on or you answered no, 2 a RUN or SWEEP is unknown, 3 Slurm refused.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_parallel.exit_codes import DONE, FAILED, REFUSED
from hpc_parallel.failure.end_runs import Target, end_runs
from hpc_parallel.failure.run_state import states, waits
from hpc_parallel.problems import ConfigError, raise_if_any
from hpc_parallel.record.find import find_all, is_one, unique_runs
from hpc_parallel.record.names import label
from hpc_parallel.record.sweep_folder import MANIFEST, is_sweep_folder
from hpc_parallel.shell import command_parser
from hpc_parallel.terminal import print_json, say, warn


def parser() -> argparse.ArgumentParser:
    parser = command_parser("cancel", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN|SWEEP")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--json", action="store_true", help="print a list of JSON objects; needs --yes")
    return parser


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(list(arguments))
    targets = _targets(options.runs)
    running = [target for target in targets if target.refusal is None]
    if not options.json:
        for target in targets:
            if target.refusal:
                warn(f"{label(target.run.path)} {target.refusal}")
    if running and not options.yes:
        if options.json or not sys.stdin.isatty():
            raise ConfigError(["Nobody can be asked here. Try --yes."])
        if not _agreed(running):
            return FAILED
    refused = end_runs(running, warn=warn)
    if options.json:
        print_json([_object(target, refused.get(target.run.path)) for target in targets])
        return REFUSED if refused else DONE if running else FAILED
    for target in running:
        if message := refused.get(target.run.path):
            warn(f"{target}: {message}")
        else:
            say(f"asked to end: {target}")
    return REFUSED if refused else DONE if running else FAILED


def _targets(names: Sequence[str]) -> list[Target]:
    """The named runs, without duplicates.

    Raises ConfigError for a folder of runs that is no sweep, for another user's sweep and for damaged runs.
    """
    named = find_all(names)
    raise_if_any(
        f"{target.label} holds {len(target.runs)} runs and is no sweep. Name them."
        for target in named if not is_one(target)
    )  # fmt: skip
    raise_if_any(
        f"{target.label} is another user's sweep, which may name any run. Name the runs."
        for target in named if target.path and _is_foreign_sweep(target.path)
    )  # fmt: skip
    runs = unique_runs(named)
    targets = [Target(run, state) for run, state in zip(runs, states(runs), strict=True)]
    raise_if_any([target.damage for target in targets if target.damage])
    return targets


def _is_foreign_sweep(path: Path) -> bool:
    return is_sweep_folder(path) and (path / MANIFEST).lstat().st_uid != os.geteuid()


def _agreed(running: Sequence[Target]) -> bool:
    for target in running:
        say(str(target))
    count = f"{len(running)} runs" if len(running) > 1 else "this run"
    try:
        return input(f"end {count}? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _object(target: Target, refusal: str | None) -> dict[str, Any]:
    reason = target.refusal or refusal
    return {
        "run": label(target.run.path), "path": str(target.run.path), "job_id": target.job,
        "pid": None if target.job or waits(target.run) else target.pid, "asked": reason is None,
        "reason": reason, "state": target.state.name,
    }  # fmt: skip
