"""`python -m hpc_parallel rerun RUN [override ...]`: repeat a run from the source that it kept.

The new run has the same overrides, then yours, and its own run folder. It has the same seed, so the same
losses. Paths in overrides are relative to the folder where the first run was started. Exit codes are those of
`run`.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hpc_parallel.problems import ConfigError, hydra_value
from hpc_parallel.record.find import path_of
from hpc_parallel.record.provenance import installed_packages
from hpc_parallel.record.recorded_start import RecordedStart, key_of, read_start
from hpc_parallel.record.run_folder import RunFolder, is_run_folder, unreadable
from hpc_parallel.record.snapshot import Snapshot
from hpc_parallel.record.values import table, text
from hpc_parallel.shell import command_parser, complain, refuse

ONCE = ("run_dir", "resume")  # keys that belong to one run
_SHOWN = 5  # packages that differ and are listed


def main(arguments: Sequence[str]) -> int:
    """Replace this process by the command of the run; returns an exit code only if that fails."""
    parser = command_parser("rerun", __doc__)
    parser.add_argument("run", help="a run folder, a run id, a job id or a part of a name")
    parser.add_argument("overrides", nargs="*", help="as for `run`; they follow those of the run")
    options = parser.parse_args(list(arguments))
    try:
        folder = RunFolder(path_of(options.run))
        start = read_origin(folder)
        overrides, variables = command(folder, start, options.overrides), source(folder, start)
    except ConfigError as error:
        return refuse(error.problems)
    complain(differences(start))
    print(f"rerun       {folder.path}, in {start.values['working_directory']}", flush=True)
    return become(overrides, variables, directory=start.values["working_directory"])


def become(overrides: Sequence[str], variables: Mapping[str, str], *, directory: str) -> NoReturn:
    """Replace this process, which has imported today's source, by the command `run` of the kept source."""
    os.chdir(directory)
    command_line = [sys.executable, "-m", "hpc_parallel", "run", *overrides]
    os.execve(sys.executable, command_line, {**os.environ, **variables})


def read_origin(folder: RunFolder) -> RecordedStart:
    """How the run was started. Raises ConfigError if that can't be repeated."""
    if (reason := unreadable(folder.path)) is not None:
        raise ConfigError([f"{folder.path}: {reason}"])
    if not is_run_folder(folder.path):
        raise ConfigError([f"{folder.path} is not a run folder (no config.yaml and rendezvous in it)."])
    start = read_start(folder, key="rerun")  # the source of the run is about to be executed
    values = start.values
    if not isinstance(directory := values.get("working_directory"), str) or not _is_origin(values):
        raise ConfigError([f"{folder.environment} does not say how the run was started. Start a new run."])
    if not os.path.isdir(directory):
        raise ConfigError([f"{directory}, where the run was started and its paths count from, is gone."])
    return start


def _is_origin(values: Mapping[str, Any]) -> bool:
    """Whether the records about the kept source have the right types."""
    places, checkouts = values.get("import_path"), values.get("checkouts", {})
    texts = places is None or (isinstance(places, list) and all(isinstance(place, str) for place in places))
    return (
        texts
        and isinstance(checkouts, dict)
        and all(isinstance(checkout, dict) for checkout in checkouts.values())
    )


def command(folder: RunFolder, start: RecordedStart, more: Sequence[str]) -> list[str]:
    """The arguments of `run` that repeat the run with the kept source. Raises ConfigError."""
    kept = _kept_script(folder)
    overrides = [word for word in start.overrides if key_of(word) not in (*ONCE, *map(key_of, kept))] + kept
    if start.config_dir is None:
        return [*overrides, *more]
    config_dir = _as_kept(folder, start.values, start.config_dir)
    if not config_dir.is_dir():
        raise ConfigError([f"--config-dir {config_dir}: the folder of the run's configurations is gone."])
    return ["--config-dir", str(config_dir), *overrides, *more]


def _kept_script(folder: RunFolder) -> list[str]:
    """The override that names the copy of a user's script which the run kept."""
    script = table(folder.read_config().get("script"))
    paths = {key: text(script.get(key)) for key in ("file", "command")}
    prefix = f"{folder.code.name}/"
    return [
        f"script.{key}={hydra_value(folder.path / path)}"
        for key, path in paths.items() if path is not None and path.startswith(prefix)
    ]  # fmt: skip


def source(folder: RunFolder, start: RecordedStart) -> dict[str, str]:
    """The environment in which Python imports the kept source. Raises ConfigError if none was kept."""
    if (import_path := start.values.get("import_path")) is None:
        flags = ["--config-dir", str(start.config_dir)] if start.config_dir else []
        words = shlex.join([*flags, *start.overrides])
        raise ConfigError([
            f"{folder.path} kept no source (launcher.snapshot=false), so it can't be repeated as it was. "
            f"With today's source: python -m hpc_parallel run {words}"
        ])  # fmt: skip
    places = tuple(Path(os.path.normpath(folder.path / place)) for place in import_path)
    if lost := [place for place in places if place.is_relative_to(folder.code) and not place.is_dir()]:
        raise ConfigError([f"{lost[0]}, the source that the run kept, is gone."])
    return Snapshot(files={}, copies={}, import_path=places).variables(os.environ)


def differences(start: RecordedStart) -> list[str]:
    """A warning if the installed packages differ from the job's: losses may then differ in the last bits."""
    packages = start.values.get("packages")
    recorded: Mapping[str, str] = packages if isinstance(packages, dict) else {}
    installed = installed_packages()
    changed = [f"{name} {recorded.get(name, 'none')} -> {installed.get(name, 'none')}"
               for name in sorted(recorded.keys() | installed.keys())
               if recorded.get(name) != installed.get(name)]  # fmt: skip
    if not recorded or not changed:
        return []
    more = f" and {len(changed) - _SHOWN} more" if changed[_SHOWN:] else ""
    return [f"packages are not the run's: {', '.join(changed[:_SHOWN])}{more}"]


def _as_kept(folder: RunFolder, kept: Mapping[str, Any], place: Path) -> Path:
    """The copy of `place` if the run kept its checkout, otherwise `place`."""
    if place.is_relative_to(folder.code):
        return place
    for root, checkout in kept.get("checkouts", {}).items():
        if place.is_relative_to(root):
            return folder.code / str(checkout.get("copy", "")) / place.relative_to(root)
    return place
