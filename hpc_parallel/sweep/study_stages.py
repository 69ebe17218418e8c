"""What `then` names: the stages of a study, what each runs, and what it comes after.

A stage is a run of its own: a line of overrides, or `task=script` for a command of ours or a user's script.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from hpc_parallel.config.command_line import CommandLine
from hpc_parallel.config.script import PLACEHOLDERS
from hpc_parallel.launch.resume import is_replaced
from hpc_parallel.problems import Problem, alternatives, hydra_value, nearest, raise_if_any
from hpc_parallel.record.recorded_start import key_of
from hpc_parallel.record.sweep_folder import MAIN
from hpc_parallel.record.values import flatten

BEFORE, AFTER, BESIDE = TIMES = ("before", "after", "beside")
COMMANDS = ("check", "export", "parity", "plan", "report", "show", "tokenize")
_OF_A_RUN = ("export", "report", "show")  # commands that name a run; without words, that of the study
# What a command or a script shares with the run.
_OF_THE_SITE = {"launcher", "cluster", "fabric", "preflight", "device", "jobs"}
_KEYS = ("run", "when", "after")
_NAME = re.compile(r"[a-zA-Z][\w-]*", re.ASCII)


@dataclass(frozen=True)
class StudyStage:
    """A stage. words: what it runs, with `{NAME}` for the folder of a stage; settings: its own overrides."""

    name: str
    words: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    when: str = AFTER
    after: tuple[str, ...] = ()

    @property
    def is_run(self) -> bool:
        """Whether it is a line of overrides, and not a command or a script."""
        return not self.words or "=" in self.words[0]


def stages_of(then: Any) -> list[StudyStage]:
    """The stages that `then` describes, and MAIN, each after all that it comes after.

    Raises ConfigError with all problems.
    """
    problems: list[Problem | str] = []
    entries = _entries(then, problems)
    is_table = isinstance(then, Mapping)
    stages = {name: _stage(name, entry, problems, is_table=is_table) for name, entry in entries.items()}
    before = tuple(name for name, stage in stages.items() if stage.when == BEFORE)
    stages = {MAIN: StudyStage(MAIN, after=before), **stages}
    after = {MAIN: before} | {
        name: _after(stage, list(stages.values()), entries[name], problems)
        for name, stage in stages.items()
        if name != MAIN
    }
    ordered = {
        name: (*others, MAIN) if stages[name].when == BESIDE else others for name, others in after.items()
    }
    try:
        order = list(TopologicalSorter(ordered).static_order())
    except CycleError as error:
        problems.append(f"then: each of these stages waits for the next: {' -> '.join(error.args[1])}.")
    raise_if_any(problems)
    return [replace(stages[name], after=after[name]) for name in order]


def _entries(then: Any, problems: list[Problem | str]) -> dict[str, Any]:
    """The entry of each stage by its name. A text alone has the name of what it runs."""
    if isinstance(then, Mapping):
        entries = {str(name): entry for name, entry in then.items()}
    else:
        entries = {}
        for text in then if isinstance(then, list) else [then]:
            if not isinstance(text, str) or not (words := _split(text)):
                problems.append(Problem("then", text, "is no command of a stage", ("report",)))
                continue
            name = _name_of(words)
            if name in entries:
                rule = "has two stages of one name: give them names, then={first: ..., second: ...}"
                problems.append(f"then: {name} {rule}.")
            entries[name] = text
    reserved = {MAIN, *(word.strip("{}") for word in PLACEHOLDERS)}
    for name in entries:
        if name in reserved or not _NAME.fullmatch(name):
            rule = "is reserved" if name in reserved else "must be letters, digits, - and _"
            legal = f"stage_{re.sub(r'[^A-Za-z0-9_-]', '_', name)}"
            problems.append(f"then.{name}: the name of a stage {rule}. Try then.{legal}.")
    return entries


def _name_of(words: Sequence[str]) -> str:
    """`report`, `infer` for `task=infer`, `evaluate` for `-- evaluate.py`."""
    task = next((word.partition("=")[2] for word in words if word.startswith("task=")), None)
    text = task or next((word for word in words if not word.startswith("-")), words[0])
    return Path(text).stem


def _split(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError:  # quotes that do not close
        return ()


def _stage(name: str, entry: Any, problems: list[Problem | str], *, is_table: bool) -> StudyStage:
    """The stage without what it comes after."""
    values = entry if isinstance(entry, Mapping) else {"run": entry}
    text, when = values.get("run") or name, values.get("when", AFTER)
    if when not in TIMES:
        rule = "is no time of a stage"
        problems.append(Problem(f"then.{name}.when", when, rule, tuple(nearest(str(when), TIMES) or TIMES)))
    words = _split(text) if isinstance(text, str) else ()
    key = f"then.{name}" if is_table else "then"
    key += ".run" if isinstance(entry, Mapping) else ""
    if not words:
        problems.append(Problem(key, text, "is no command", ("report",)))
    problems += _unknown(key, words)
    if words in {(command,) for command in _OF_A_RUN}:
        words = (*words, f"{{{MAIN}}}")
    if words[:1] == ("export",) and "--output" not in words:  # each start has a new folder
        words = (*words, "--output", f"{{{name}}}/weights.safetensors")
    rest = flatten({str(key): value for key, value in values.items() if key not in _KEYS})
    settings = tuple(f"{'++' * ('.extra.' in key)}{key}={hydra_value(rest[key])}" for key in rest)
    return StudyStage(name, words, settings, str(when))


def _unknown(key: str, words: Sequence[str]) -> Iterator[Problem]:
    """The problem of a first word that is no command, no override and no `--`."""
    first = words[0] if words else "--"
    if first == "--" or "=" in first or first in COMMANDS:
        return
    near = nearest(first, COMMANDS) or COMMANDS[-3:]
    if Path(first).suffix == ".py" or os.path.isfile(first):
        near = [" ".join(["--", *words])]
    rule = f"names no command of a stage, which are {', '.join(COMMANDS)}, overrides, and a script after --"
    yield Problem(key, " ".join(words), rule, tuple(near))


def _after(
    stage: StudyStage, stages: Sequence[StudyStage], entry: Any, problems: list[Problem | str]
) -> tuple[str, ...]:
    """The stages after which it comes: by default the one before it in the list, of those at its time."""
    names = [other.name for other in stages]
    stated = entry.get("after") if isinstance(entry, Mapping) else None
    if stated is not None:
        chosen = [stated] if isinstance(stated, str) else stated
        if not isinstance(chosen, list):
            problems.append(Problem(f"then.{stage.name}.after", stated, "is no list of stages", (MAIN,)))
            return ()
        for other in chosen:
            if other not in names:
                near = tuple(nearest(str(other), names) or [MAIN])
                problems.append(Problem(f"then.{stage.name}.after", other, "is no stage", near))
        return tuple(other for other in chosen if other in names)
    earlier = stages[: names.index(stage.name)]
    if stage.when == BESIDE:
        return stages[0].after
    last = [other for other in earlier if other.when == stage.when][-1:]
    beside = [other for other in earlier if other.when == BESIDE and stage.when == AFTER]
    beside = [other for other in beside if not last or earlier.index(other) > earlier.index(last[0])]
    return tuple(other.name for other in (*last, *beside))


def line_of(stage: StudyStage, line: CommandLine, *, name: str, folders: Mapping[str, Path]) -> CommandLine:
    """The command line of a stage's run. folders: of this stage and those before it. Raises ConfigError."""
    typed = [word for word in line.words if key_of(word).partition(".")[0] != "then"]
    run_dir = f"run_dir={hydra_value(str(folders[stage.name]))}"
    if stage.name == MAIN:
        kept = [word for word in typed if key_of(word) not in ("run_dir", "dry_run")]
        return line.with_words([*kept, "then=null", run_dir])
    words = [filled(word, folders) for word in stage.words]
    end = []
    if not stage.is_run:
        end = words if words[0] == "--" else ["--", "-m", "hpc_parallel", *words]
        words = ["nodes=1", "gpus_per_node=1"]
        words += [] if "--" in stage.words else ["device=cpu", "cluster.gpus=false"]
    words = [word for word in words if key_of(word) not in map(key_of, stage.settings)] + [*stage.settings]
    own = {key_of(word) for word in words}
    shared = [
        word for word in typed
        if word.startswith("-") or "=" not in word or (
            not is_replaced(key_of(word), own) and key_of(word) not in ("name", "weights")
            and (stage.is_run or key_of(word).partition(".")[0] in _OF_THE_SITE)
        )
    ]  # fmt: skip
    if {"task=infer", "task=generate"} & {*words} and "weights" not in own:
        words = [*words, f"weights={hydra_value(str(folders[MAIN]))}"]
    if "task=infer" in words and stage.when == BESIDE:
        words = [*words, "task.follow=true"]
    ours = [f"name={name}.{stage.name}", "then=null", run_dir]
    return line.with_words([*shared, *words, *ours, *end])


def filled(word: str, folders: Mapping[str, Path]) -> str:
    """Replace `{NAME}` by the folder of the stage."""
    for name, folder in folders.items():
        word = word.replace(f"{{{name}}}", str(folder))
    return word


def unknown_folders(stages: Sequence[StudyStage]) -> Iterator[str]:
    """Problems of `{NAME}` in what a stage runs, if the stage does not come after NAME."""
    names = {stage.name for stage in stages}
    reachable: dict[str, set[str]] = {}
    for stage in stages:
        reachable[stage.name] = {stage.name, *stage.after}.union(*(reachable[name] for name in stage.after))
        reachable[stage.name] |= {MAIN} if stage.when == BESIDE else set()
        text = " ".join(stage.words)
        for name in re.findall(r"\{([a-zA-Z][\w-]*)\}", text):
            if name in names - reachable[stage.name]:
                rule = f"is the folder of a stage that does not come before {stage.name}"
                legal = alternatives([f"{{{near}}}" for near in sorted(reachable[stage.name])])
                yield f"then.{stage.name}.run: {{{name}}} {rule}. Try {legal}."
