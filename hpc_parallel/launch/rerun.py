"""`python -m hpc_parallel rerun RUN [override ...]`: a run once more, from the source that it kept.

The same overrides, then yours; the same seed, so the same losses; a run folder of its own. Paths in
overrides count from the folder where the first run was started. Exit codes are those of `run`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hpc_parallel.config.problems import ConfigError
from hpc_parallel.launch.origin import installed_packages
from hpc_parallel.launch.run_folder import RunFolder, is_run_folder
from hpc_parallel.launch.snapshot import Snapshot
from hpc_parallel.launch.trust import UntrustedError, require_private
from hpc_parallel.record.safe_read import read_json

ONCE = ("run_dir", "resume")  # what holds for one run alone
_SHOWN = 5  # packages that differ


def main(arguments: Sequence[str]) -> int:
    """Become the run's own command line; returns its exit code only where that can't be."""
    parser = argparse.ArgumentParser(
        prog="python -m hpc_parallel rerun", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("overrides", nargs="*", help="as of `run`, after the run's own")
    given = parser.parse_args(list(arguments))
    folder = RunFolder(given.run.expanduser().absolute())
    try:
        kept = read_origin(folder)
        words, variables = command(folder, kept, given.overrides), source(folder, kept)
    except ConfigError as error:
        from hpc_parallel.run import report

        return report(error.problems)
    for note in differences(kept):
        print(note, file=sys.stderr)
    print(f"rerun       {folder.path}, in {kept['working_directory']}", flush=True)
    return become(words, variables, directory=kept["working_directory"])


def become(words: Sequence[str], variables: Mapping[str, str], *, directory: str) -> NoReturn:
    """Replace this process, which has imported today's source, by the command `run` of the kept one."""
    os.chdir(directory)
    command_line = [sys.executable, "-m", "hpc_parallel", "run", *words]
    os.execve(sys.executable, command_line, {**os.environ, **variables})


def read_origin(folder: RunFolder) -> dict[str, Any]:
    """What `environment.json` says of the run's start. Raises ConfigError where that can't be repeated."""
    if not is_run_folder(folder.path):
        raise ConfigError([f"{folder.path} is not a run folder (no config.yaml and rendezvous in it)."])
    try:
        require_private(folder.path)  # its source is about to run
    except UntrustedError as error:
        raise ConfigError([f"{folder.path} is not to be trusted: {error}"]) from error
    try:
        kept = read_json(folder.environment) or {}
    except ValueError:
        kept = {}
    if "overrides" not in kept or "working_directory" not in kept:
        raise ConfigError([f"{folder.environment} does not say how the run was started."])
    if not Path(kept["working_directory"]).is_dir():
        where = kept["working_directory"]
        raise ConfigError([f"{where}, where the run was started and its paths count from, is gone."])
    return kept


def command(folder: RunFolder, kept: Mapping[str, Any], more: Sequence[str]) -> list[str]:
    """The arguments of `run` that say the same, in the terms of the kept source. Raises ConfigError."""
    words = [word for word in kept["overrides"] if word.partition("=")[0].lstrip("+~") not in ONCE]
    if kept["config_dir"] is None:
        return [*words, *more]
    config_dir = _as_kept(folder, kept, Path(kept["config_dir"]))
    if not config_dir.is_dir():
        raise ConfigError([f"--config-dir {config_dir}: the folder of the run's configurations is gone."])
    return ["--config-dir", str(config_dir), *words, *more]


def source(folder: RunFolder, kept: Mapping[str, Any]) -> dict[str, str]:
    """The environment in which Python imports what the run kept. Raises ConfigError where it kept nothing."""
    if kept["import_path"] is None:
        words = " ".join(["python -m hpc_parallel run", *kept["overrides"]])
        raise ConfigError([
            f"{folder.path} kept no source (launcher.snapshot=false), so it can't be repeated as it was. "
            f"With today's source: {words}"
        ])  # fmt: skip
    places = tuple(Path(os.path.normpath(folder.path / place)) for place in kept["import_path"])
    if lost := [place for place in places if place.is_relative_to(folder.code) and not place.is_dir()]:
        raise ConfigError([f"{lost[0]}, the source that the run kept, is gone."])
    return Snapshot(files={}, copies={}, import_path=places).variables(os.environ)


def differences(kept: Mapping[str, Any]) -> list[str]:
    """A line where other packages are installed than the job had: its losses may differ in the last bits."""
    then: Mapping[str, str] = kept.get("packages", {})
    now = installed_packages()
    changed = [f"{name} {then.get(name, 'none')} -> {now.get(name, 'none')}"
               for name in sorted(then.keys() | now.keys()) if then.get(name) != now.get(name)]  # fmt: skip
    if not then or not changed:
        return []
    shown = ", ".join(changed[:_SHOWN]) + (f" and {len(changed) - _SHOWN} more" if changed[_SHOWN:] else "")
    return [f"packages are not the run's: {shown}"]


def _as_kept(folder: RunFolder, kept: Mapping[str, Any], place: Path) -> Path:
    """The copy of `place` where the run kept its checkout; else the place itself."""
    if place.is_relative_to(folder.code):
        return place
    for root, known in kept["checkouts"].items():
        if place.is_relative_to(root):
            return folder.code / str(known["copy"]) / place.relative_to(root)
    return place
