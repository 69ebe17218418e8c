"""Import a user's classes before a run starts, in a separate process, as the ranks will import them.

    python -m hpc_parallel.launch.import_check < QUESTION

reads {"tables": [[key, table], ...], "advice": TEXT} as JSON and writes {"messages": [[TEXT, ...]], "note":
null}. Only `check_imports` starts this module, for class paths that the user typed or that the user's
configuration files name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import yaml

from hpc_parallel.config.checks.training_checks import CLASSES
from hpc_parallel.config.class_paths import class_tables
from hpc_parallel.config.job_python import environment_key, is_chosen, job_python
from hpc_parallel.config.places import find_folder
from hpc_parallel.config.schema import OptimizerConfig, RunConfig
from hpc_parallel.config.script import TASK
from hpc_parallel.layout.counts import trains

if TYPE_CHECKING:
    from hpc_parallel.record.snapshot import Snapshot

BUILT_IN = ("hpc_parallel.", "torch.optim.")  # these paths are checked without an import
TIMEOUT_S = 60.0  # for imports from a slow file system
IMPORT, MODEL = "hpc_parallel.launch.import_check", "hpc_parallel.worker.model_check"
_SWITCH = "If only the job's nodes can use it, set launcher.check_imports=false."


@dataclass(frozen=True)
class ImportCheck:
    """The result of importing the user's classes: problems, or a note that says why there is no result."""

    problems: tuple[str, ...] = ()
    note: str | None = None


@dataclass(frozen=True)
class _TriedSource:
    """What the job will import from. Two are equal if they are copies of the same files, as in a sweep."""

    snapshot: Snapshot = field(compare=False)
    files: int


def check_imports(
    config: RunConfig, *, snapshot: Snapshot | None = None, values: Mapping[str, Any] | None = None
) -> ImportCheck:
    """Import the classes of `config` that are not this package's.

    snapshot: the source that the run will keep, from which the job imports; None if it keeps none.
    values: the same configuration as plain values. If it is given, the process also builds the user's model
    without memory, checks the model's hints, builds the user's data and reads a few samples. It tries an
    optimizer with a class, arguments or rules of the user's.

    For a resumed run, nothing is imported here: the run has imported its classes before, and its folder may
    belong to another user.
    """
    if config.task.name == TASK:
        return _check_module(config)
    tables = [(key, table) for key, table in _tables(config) if not _is_built_in(table)]
    tries_optimizer = values is not None and trains(config) and not _is_ours(config.optimizer)
    if not (tables or tries_optimizer) or not _may_import(config):
        return ImportCheck()
    paths = ", ".join(str(table["_target_"]) for _, table in tables) or config.optimizer._target_
    if key := environment_key(config):
        return ImportCheck(note=f"not imported here, because {key} changes the environment: {paths}")
    question: dict[str, Any] = {"tables": tables, "advice": "" if _is_local(config) else _SWITCH}
    module = IMPORT
    tries_data = any(not _is_built_in(table) for _, table in class_tables("data", config.data))
    if values is not None and (tries_data or tries_optimizer or not _is_built_in(config.model)):
        question |= {"values": [values], "tries_data": tries_data}
        module = MODEL
    source = None if snapshot is None else _TriedSource(snapshot, id(snapshot.files))
    return _tried(_python(config), os.getcwd(), module, json.dumps(question), paths, source)


def _check_module(config: RunConfig) -> ImportCheck:
    """Search `script.module` with the job's Python, unless the checks have done so with the same Python."""
    module = config.script.module
    if module is None or _is_local(config) or not _may_import(config):
        return ImportCheck()
    if key := environment_key(config):
        return ImportCheck(note=f"not searched here, because {key} changes the environment: {module}")
    if not is_chosen(config.launcher):
        return ImportCheck()
    return _searched(job_python(config.launcher), os.getcwd(), module)


@cache  # all runs of a sweep have the same module
def _searched(python: str, folder: str, module: str) -> ImportCheck:
    from hpc_parallel.config import find_module

    command = (python, "-P", find_module.__file__, module)
    answer = _answered(command, folder, act="searched", names=module)
    if isinstance(answer, str):
        return ImportCheck(note=answer)
    if (problem := answer["problem"]) is None:
        return ImportCheck()
    return ImportCheck((f"script.module = {module} {problem} (asked: {python}). {_SWITCH}",))


def _may_import(config: RunConfig) -> bool:
    """False if imports are switched off, or for a resumed run, whose folder may be another user's."""
    return config.launcher.check_imports and config.resume is None


def _is_local(config: RunConfig) -> bool:
    """Whether the run has this Python and no setup, modules or container."""
    return config.launcher.kind == "local"


def _python(config: RunConfig) -> str:
    return sys.executable if _is_local(config) else job_python(config.launcher)


def _is_built_in(table: Mapping[str, Any]) -> bool:
    return str(table["_target_"]).startswith(BUILT_IN)


def _is_ours(optimizer: OptimizerConfig) -> bool:
    """Whether the class, its arguments and the rules are those of a file of this package."""
    file = find_folder("conf") / "optimizer" / f"{optimizer.name}.yaml"
    if optimizer.name not in CLASSES or not file.is_file():
        return False
    ours = yaml.safe_load(file.read_text())
    return (optimizer.options, optimizer.groups) == (ours.get("options", {}), ours.get("groups", {}))


def _tables(config: RunConfig) -> list[tuple[str, dict[str, Any]]]:
    """Each class or function that the configuration names, with its arguments."""
    tables = [*class_tables("model", config.model), *class_tables("data", config.data)]
    for index, callback in enumerate(config.training.callbacks):
        tables += class_tables(f"training.callbacks[{index}]", callback)
    optimizer = config.optimizer
    classes: dict[str, str | None] = {"optimizer": optimizer._target_}
    classes |= {f"optimizer.groups.{name}": rule.get("_target_") for name, rule in optimizer.groups.items()}
    if "." in optimizer.schedule:  # a function of (step, steps)
        tables.append(("optimizer.schedule", {"_target_": optimizer.schedule, "_args_": [1, 1]}))
    # The trainer adds the arguments.
    functions = [(key, path) for key, path in classes.items() if path is not None]
    return [*tables, *((key, {"_target_": path, "_partial_": True}) for key, path in functions)]


def check_models(runs: Sequence[tuple[RunConfig, Mapping[str, Any]]]) -> list[list[str]]:
    """The problems of the user's model class and optimizer in each of several runs, all tried in one process.

    runs: configurations, typed and as plain values. There are no messages for what is this package's, or if
    the process fails.
    """
    problems: list[list[str]] = [[] for _ in runs]
    tried = [index for index, (config, _) in enumerate(runs) if _is_tried(config)]
    if not tried:
        return problems
    config = runs[tried[0]][0]
    content = json.dumps({"tables": [], "advice": "", "values": [runs[index][1] for index in tried]})
    command = (_python(config), "-m", MODEL)
    answer = _answered(command, os.getcwd(), content=content, names=str(config.model["_target_"]))
    if not isinstance(answer, str):
        for index, messages in zip(tried, answer["messages"], strict=True):
            problems[index] = messages
    return problems


def _is_tried(config: RunConfig) -> bool:
    """Whether a process can build the model and the optimizer, and one of them is the user's."""
    if config.task.name == TASK or not _may_import(config) or environment_key(config):
        return False
    return not (_is_built_in(config.model) and _is_ours(config.optimizer))


@cache  # all runs of a sweep have the same classes
def _tried(
    python: str, folder: str, module: str, content: str, paths: str, source: _TriedSource | None = None
) -> ImportCheck:
    command = (python, "-m", module)
    if source is None:
        return _read(_answered(command, folder, content=content, names=paths))
    with TemporaryDirectory(prefix="hpc_parallel-") as place:
        variables = source.snapshot.tried_in(Path(place)).variables(os.environ)
        return _read(_answered(command, folder, content=content, names=paths, variables=variables), place)


def _read(answer: dict[str, Any] | str, place: str | None = None) -> ImportCheck:
    """place: the temporary folder of the copy that was tried. Messages say `code` for it, as the run will."""
    if isinstance(answer, str):
        return ImportCheck(note=answer)
    texts = (message for messages in answer["messages"] for message in messages)
    problems = (text.replace(place, "code") if place else text for text in texts)
    return ImportCheck(tuple(problems), note=answer["note"])


def _answered(
    command: Sequence[str],
    folder: str,
    *,
    content: str = "",
    act: str = "imported",
    names: str,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any] | str:
    """Run a Python that reads `content` and writes an answer as JSON.

    act, names: the verb and the names of the classes or the module, for a message.
    variables: additional environment variables.

    Returns the answer, or a message that says why there is none.
    """
    environment = {**os.environ, **variables, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, input=content, cwd=folder, env=environment, capture_output=True, text=True,
            timeout=TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"not {act} here within {TIMEOUT_S:g} s: {names}"
    except OSError as error:
        return f"not {act} here, because {command[0]} can't be started ({error}): {names}"
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:  # killed, or without this package
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return f"not {act} here (exit code {done.returncode}, {last}): {names}"
    return answer


def main() -> None:
    """Write the messages to stdout; what imported modules print goes to stderr."""
    from hpc_parallel.user_code import failure_of

    question = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        failures = [failure_of(key, table, advice=question["advice"]) for key, table in question["tables"]]
        answer.write(json.dumps({"messages": [[*filter(None, failures)]], "note": None}))


if __name__ == "__main__":
    main()
