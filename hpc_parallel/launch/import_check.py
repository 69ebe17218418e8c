"""Import a user's classes before a submission, in a process of its own, as the job will import them.

    python -m hpc_parallel.launch.import_check < TABLES

reads [[key, table], ...] as JSON and writes one message, or null, for each. Only `check_imports` starts it,
for class paths that the user typed or that their configuration files name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

from hpc_parallel.config.checks.targets import class_tables
from hpc_parallel.config.launcher_kind import choose_automatically
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.site_schema import LauncherConfig
from hpc_parallel.user_code import described

OWN = "hpc_parallel."
TIMEOUT_S = 60.0  # for imports from a slow file system
IMPORT, MODEL = "hpc_parallel.launch.import_check", "hpc_parallel.worker.model_check"
_SWITCH = "If only the job's nodes can import it, set launcher.check_imports=false."


@dataclass(frozen=True)
class ImportCheck:
    """What the import of the user's classes showed: problems, or a note if it shows nothing."""

    problems: tuple[str, ...] = ()
    note: str | None = None


def check_imports(config: RunConfig) -> ImportCheck:
    """Import the classes of `config` that are not this package's, if a job is to be submitted.

    A run on this machine imports them at once anyway. A resumed run has imported them before, and its folder
    may not be the user's, so nothing that it names is imported here.
    """
    tables = [
        (key, table)
        for group, values in (("model", config.model), ("data", config.data))
        for key, table in class_tables(group, values)
        if not str(table["_target_"]).startswith(OWN)
    ]
    if not tables or not _may_import(config):
        return ImportCheck()
    paths = ", ".join(str(table["_target_"]) for _, table in tables)
    if key := _environment_key(config):
        return ImportCheck(note=f"not imported here, because {key} changes the environment: {paths}")
    return _tried(job_python(config.launcher), os.getcwd(), IMPORT, json.dumps(tables), paths)


def check_model(config: RunConfig, values: Mapping[str, Any]) -> ImportCheck:
    """Build a model that is not this package's without memory, and find what its hints refuse.

    `values`: the same configuration as plain values. Its classes can be imported.
    """
    path = str(config.model["_target_"])
    if path.startswith(OWN) or not _may_import(config) or _environment_key(config):
        return ImportCheck()
    return _tried(job_python(config.launcher), os.getcwd(), MODEL, json.dumps(values), path)


def check_models(runs: Sequence[tuple[RunConfig, Mapping[str, Any]]]) -> list[list[str]]:
    """What `check_model` finds in each of several layouts of one model, also of local runs, in one process.

    runs: configurations, typed and as plain values. No messages for models of this package, and if the
    process can't tell.
    """
    nothing: list[list[str]] = [[] for _ in runs]
    config, _ = runs[0]
    path = str(config.model["_target_"])
    if path.startswith(OWN) or not config.launcher.check_imports or _environment_key(config):
        return nothing
    content = json.dumps([values for _, values in runs])
    answer = _answered(job_python(config.launcher), os.getcwd(), MODEL, content, path)
    return nothing if isinstance(answer, str) else answer


def _environment_key(config: RunConfig) -> str | None:
    """The key of commands that run in the job before Python starts; None without any."""
    launcher, cluster = config.launcher, config.cluster
    commands = {
        "launcher.setup": launcher.setup, "launcher.modules": launcher.modules,
        "cluster.setup": cluster.setup, "cluster.modules": cluster.modules,
    }  # fmt: skip
    return next((key for key, lines in commands.items() if lines), None)


def _may_import(config: RunConfig) -> bool:
    """Whether a job is to be submitted, with classes that this user chose."""
    kind = config.launcher.kind
    kind = choose_automatically(os.environ)[0] if kind == "auto" else kind
    return kind != "local" and config.launcher.check_imports and config.resume is None


def job_python(launcher: LauncherConfig) -> str:
    """The Python interpreter of `launcher.venv`, or the current one."""
    if launcher.venv is None:
        return sys.executable
    return str(Path(os.path.expanduser(launcher.venv)).absolute() / "bin" / "python")


@cache  # all runs of a sweep have the same classes
def _tried(python: str, folder: str, module: str, content: str, paths: str) -> ImportCheck:
    answer = _answered(python, folder, module, content, paths)
    if isinstance(answer, str):
        return ImportCheck(note=answer)
    return ImportCheck(problems=tuple(filter(None, answer)))


def _answered(python: str, folder: str, module: str, content: str, paths: str) -> list[Any] | str:
    """Run a module that reads `content` and writes a list of messages; the list, or why there is none."""
    command = [python, "-m", module]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, input=content, cwd=folder, env=environment, capture_output=True, text=True,
            timeout=TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"not imported here within {TIMEOUT_S:g} s: {paths}"
    except OSError as error:
        return f"not imported here, because {python} can't be started ({error}): {paths}"
    try:
        messages: list[Any] = json.loads(done.stdout)
    except ValueError:  # killed, or without this package
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return f"not imported here (exit code {done.returncode}, {last}): {paths}"
    return messages


def failure_of(key: str, table: dict[str, Any]) -> str | None:
    """Why the class of `table` can't be imported or called with its arguments; None if it can."""
    path = str(table["_target_"])
    raised = f"raised by {path} ({key})"
    try:
        target = _find(path)
    except BaseException as error:  # also SystemExit of a script
        return f"{described(error)}, {raised}. {_SWITCH}"
    if table.get("_partial_") or not callable(target):
        return None if callable(target) else f"{path} ({key}) is no class or function."
    arguments = {name: value for name, value in table.items() if not name.startswith("_")}
    try:
        signature(target).bind(*table.get("_args_", ()), **arguments)
    except TypeError as error:
        return f"TypeError: {error}, {raised}."
    except ValueError:  # some classes in C have no signature
        pass
    return None


def _find(path: str) -> Any:
    """The object at a dotted path: attributes of the longest part that is a module."""
    parts = path.split(".")
    value: Any = import_module(parts[0])
    for end, part in enumerate(parts[1:], start=2):
        if not hasattr(value, part):
            try:
                import_module(".".join(parts[:end]))
            except ModuleNotFoundError as error:
                if error.name != ".".join(parts[:end]):
                    raise
        value = getattr(value, part)
    return value


def main(tables: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Write the messages to stdout; what imported modules print goes to stderr."""
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        answer.write(json.dumps([failure_of(key, table) for key, table in tables]))


if __name__ == "__main__":
    main(json.load(sys.stdin))
