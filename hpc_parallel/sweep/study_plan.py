"""Plan a study: check all its stages, and find which of them must run again.

A stage that is done runs again if its configuration has changed, or a file that it reads. A file counts by
size and time. Files that a stage writes are among the words of its line, too. A file that has changed while
the stage or one before it ran therefore counts as written by it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hpc_parallel.config.checks.training_checks import CALLBACKS, KEEP_BEST
from hpc_parallel.config.command_line import CommandLine
from hpc_parallel.config.compose import compose_run
from hpc_parallel.config.script import PLACEHOLDERS, TASK, absolute
from hpc_parallel.failure.run_state import states
from hpc_parallel.launch.checked_run import prepared, reporting_all_problems
from hpc_parallel.launch.prepare import PreparedRun, is_awaited
from hpc_parallel.problems import ConfigError, Problem, hydra_value, raise_if_any
from hpc_parallel.record.checkpoint_index import OF_BEST
from hpc_parallel.record.endings import COMPLETED
from hpc_parallel.record.names import RUNS, command_on, from_here, label
from hpc_parallel.record.recorded import RecordedRun, read_run
from hpc_parallel.record.recorded_start import key_of
from hpc_parallel.record.run_folder import new_run_id
from hpc_parallel.record.sweep_folder import (
    MAIN,
    STAGES,
    StageRecord,
    Sweep,
    SweepRun,
    is_sweep_folder,
    read_stages,
    write_stages,
    write_sweep,
)
from hpc_parallel.record.values import flatten, table
from hpc_parallel.sweep.study_stages import BESIDE, StudyStage, filled, line_of, stages_of, unknown_folders

_KINDS = ("local", "allocation", "slurm")
Window = tuple[float, float]
Check = Callable[[Sequence[str], Container[Path]], Sequence[Problem | str]]
_OWN_CLASS = "._target_"
_PACKAGES = ("hpc_parallel.", "torch.")
# Where and how long a run computes, and what is told of it: no input of its result.
_PLACES = (
    "run_dir", "name", "dry_run", "then", "plan.", "sweep.", "launcher.kind", "launcher.wait",
    "launcher.partition", "launcher.account", "launcher.qos", "launcher.constraint", "launcher.exclude",
    "launcher.wckey", "launcher.time_minutes", "launcher.notify", "launcher.grace_s", "launcher.snapshot",
)  # fmt: skip
_CLOCKS_S = 1.0  # a file server rounds times


@dataclass(frozen=True)
class PlannedStage:
    """A checked stage. because: why it runs; empty if an earlier start has done it."""

    stage: StudyStage
    run: PreparedRun
    record: StageRecord
    because: str
    prepare: Callable[[], PreparedRun]  # again, at its turn

    @property
    def name(self) -> str:
        return self.stage.name

    @property
    def is_done(self) -> bool:
        return not self.because


@dataclass(frozen=True)
class Study:
    """All stages in their order. before: what the last start has recorded."""

    folder: Path
    stages: tuple[PlannedStage, ...]
    command: tuple[str, ...]
    before: tuple[StageRecord, ...]

    @property
    def main(self) -> PlannedStage:
        return next(planned for planned in self.stages if planned.name == MAIN)

    @property
    def waiting(self) -> list[PlannedStage]:
        return [planned for planned in self.stages if not planned.is_done]

    def show(self) -> None:
        print(f"study       {' -> '.join(planned.name for planned in self.stages)}")
        for planned in self.stages:
            place = label(Path(planned.record.run_dir))
            why = (
                f"starts: {planned.because}" if planned.because else "is done, and its inputs did not change"
            )
            print(f"{planned.name:11} {why} ({place})")

    def record(self, jobs: Mapping[str, str]) -> None:
        """Write what `status` shows, and what the next start compares with."""
        runs = tuple(
            SweepRun((planned.name,), Path(planned.record.run_dir), planned.run.config.nodes,
                     planned.run.config.gpus_per_node, jobs.get(planned.name))
            for planned in self.stages
        )  # fmt: skip
        now = datetime.now(UTC).isoformat(timespec="seconds")
        write_sweep(self.folder, Sweep(self.command, now, None, runs, ()))
        write_stages(self.folder, tuple(planned.record for planned in self.stages))


def plan(line: CommandLine, config: Any, *, check: Check) -> Study:
    """Compose and check all stages. Raises ConfigError with all problems.

    check: the problems of the words of a command, given the places that need not exist yet.
    """
    then = config.then if isinstance(config.then, str) else OmegaConf.to_container(config.then, resolve=True)
    stages = stages_of(then)
    if config.task.name == TASK:  # what its line names counts, as for any stage
        words = (f"script.file={config.script.file}", *map(str, config.script.words))
        stages = [replace(stage, words=words) if stage.name == MAIN else stage for stage in stages]
    name, run_id = str(config.name), new_run_id()
    chosen = absolute(config.run_dir) if config.run_dir else None
    folders = {
        stage.name: chosen.with_name(f"{chosen.name}.{stage.name}") if chosen
        else absolute(str(RUNS / f"{name}.{stage.name}" / run_id))
        for stage in stages
    }  # fmt: skip
    folders[MAIN] = chosen or absolute(str(RUNS / name / run_id))
    folder = absolute(str(RUNS / "sweeps" / name))
    if is_sweep_folder(folder) and not (folder / STAGES).exists():
        raise ConfigError([Problem("name", name, "is the name of a sweep", (f"{name}_study",))])
    before = read_stages(folder)
    planner = _Planner(line, name=name, folders=folders, before=before, check=check)
    planner.problems += unknown_folders(stages)
    for stage in stages:
        planner.add(stage)
    planner.require_valid()
    return Study(folder, tuple(planner.planned), line.words, before)


@dataclass(frozen=True)
class _Awaited(Container[Path]):
    """The places that stages write before: what is in one of them, or holds one, need not exist yet."""

    places: list[Path]

    def __contains__(self, text: object) -> bool:
        path = absolute(str(text))
        return any(path.is_relative_to(place) or place.is_relative_to(path) for place in self.places)


class _Planner:
    def __init__(
        self, line: CommandLine, *, name: str, folders: dict[str, Path], before: Sequence[StageRecord],
        check: Check,
    ) -> None:  # fmt: skip
        self.planned: list[PlannedStage] = []
        self._line, self._name, self._folders, self._check = line, name, folders, check
        self._records = {record.name: record for record in before}
        self.problems: list[Problem | str] = []
        self._of_stages: list[tuple[StudyStage, Problem | str]] = []
        self._words: list[str] = []  # of all stages so far that start

    def add(self, stage: StudyStage) -> None:
        """Check a stage; those before it are planned."""
        done = {planned.name for planned in self.planned if planned.is_done}
        awaited = _Awaited([folder for name, folder in self._folders.items() if name not in done])
        awaited.places.extend(_paths(self._words))
        words = [filled(word, self._folders) for word in stage.words]
        planned, problems = None, list[Problem | str]()
        try:
            line = line_of(stage, self._line, name=self._name, folders=self._folders)
            folders = dict(self._folders) if stage.is_run else {}
            prepare = partial(_prepared, line, folders=folders, awaited=())
            run = prepare(awaited=awaited)
            if {*stage.after} <= {planned.name for planned in self.planned}:  # else one of them has problems
                planned = self._compared(stage, run, prepare)
                self.planned.append(planned)
        except ConfigError as error:
            problems += error.problems
        if planned is None or planned.because:
            if not (stage.is_run or words[0] == "--" or any(map(" ".join(words).count, PLACEHOLDERS))):
                problems += self._check(words, awaited)
            self._words += words
        self._of_stages += [(stage, problem) for problem in problems if not is_awaited(problem, awaited)]

    def _compared(
        self, stage: StudyStage, run: PreparedRun, prepare: Callable[[], PreparedRun]
    ) -> PlannedStage:
        earlier = {planned.name: planned for planned in self.planned}
        before = [earlier[name] for name in stage.after]
        if stage.when == BESIDE and MAIN in earlier:
            before.append(earlier[MAIN])
        digest = fingerprint(
            run, stage.words, folders=self._folders, before=[one.record.fingerprint for one in before]
        )
        last = self._records.get(stage.name)
        folders = self._folders | ({} if last is None else {stage.name: Path(last.run_dir)})
        words = [filled(word, folders) for word in stage.words]
        files = files_of(run, words, folders=[*self._folders.values(), *folders.values()])
        record = StageRecord(stage.name, str(self._folders[stage.name]), stage.after, digest, files)
        because = self._reason(record, before=before, words=words)
        if not because:
            record = replace(record, run_dir=self._records[stage.name].run_dir)
            self._folders[stage.name] = Path(record.run_dir)
        return PlannedStage(stage, run, record, because, prepare)

    def _reason(self, record: StageRecord, *, before: Sequence[PlannedStage], words: Sequence[str]) -> str:
        """Why the stage must run; empty if it is done and nothing has changed."""
        last = self._records.get(record.name)
        if last is None:
            return "it is new"
        run = read_run(Path(last.run_dir))
        (state,) = states([run])
        if not state.ended:
            rule = f"is going on in {label(run.path)}: {state}. Try {command_on(run.path, 'status')}"
            self.problems.append(f"then: the stage {record.name} {rule}.")
            return str(state)
        if state.name != COMPLETED:
            return f"it was {state}" if state.name != "not started" else "it was not started"
        if again := next((one.name for one in before if one.because), None):
            return f"{again} runs again"
        if last.fingerprint != record.fingerprint:
            return "its configuration has changed"
        runs = [run, *(read_run(Path(one.record.run_dir)) for one in self.planned)]
        windows = [window for one in runs if (window := window_of(one)) is not None]
        if changed := changed_file(last.files, record.files, words=words, windows=windows):
            return f"{from_here(absolute(changed))} has changed"
        return ""

    def _require_checkpoints(self) -> None:
        """A training that saves nothing leaves nothing to a stage that starts from its weights."""
        main = next((planned.run.config for planned in self.planned if planned.name == MAIN), None)
        if main is None or main.task.name != "train":
            return
        folder = self._folders[MAIN]
        words = {planned.name: planned.run.config.script.words for planned in self.planned}
        users = [
            planned.name for planned in self.planned
            if planned.run.config.weights == str(folder)
            or (words[planned.name][:1] == ["export"] and folder in map(Path, words[planned.name]))
        ]  # fmt: skip
        if users and main.training.checkpoint_every is None:
            rule = f"leaves no checkpoint for {' and '.join(users)}"
            self.problems.append(Problem("training.checkpoint_every", None, rule, (500,)))
        asked = re.compile(rf"--step[= ]{OF_BEST}( |$)")
        of_best = [name for name in users if asked.search(" ".join(words[name]))]
        callbacks = main.training.callbacks
        classes = [str(callback["_target_"]) for callback in callbacks]
        if of_best and all(name != KEEP_BEST and name.startswith(CALLBACKS) for name in classes):
            rule = f"leaves no best checkpoint for {' and '.join(of_best)}"
            near = [*callbacks, {"_target_": KEEP_BEST}]
            self.problems.append(Problem("training.callbacks", callbacks, rule, (near,)))

    def _stage_problems(self) -> Iterator[Problem | str]:
        """Yields what is wrong with each stage, but not again what it has from the words of the run."""
        of_the_run = [problem for stage, problem in self._of_stages if stage.name == MAIN]
        for stage, problem in self._of_stages:
            own = map(key_of, (*stage.words, *stage.settings))
            if stage.name == MAIN:
                yield problem
            elif problem not in of_the_run or (isinstance(problem, Problem) and problem.key in own):
                yield _named(f"then.{stage.name}: {problem}", self._folders)

    def require_valid(self) -> None:
        """Raises ConfigError with the problems of all stages."""
        self.problems += self._stage_problems()
        kinds = {planned.run.config.launcher.kind for planned in self.planned}
        for kind in sorted(kinds - {*_KINDS}):
            self.problems.append(Problem("launcher", kind, "leaves the start of stages to you", ("slurm",)))
        if len(kinds) > 1 and kinds <= {*_KINDS}:
            self.problems.append(f"then: stages of one study have one launcher, not {sorted(kinds)}.")
        self._require_checkpoints()
        followed = {name for planned in self.planned for name in planned.stage.after}
        for planned in self.planned:
            launcher = planned.run.config.launcher
            if launcher.kind == "slurm" and launcher.resubmit and planned.name in followed:
                rule = "gives the run a new job, which later stages would not wait for"
                self.problems.append(Problem("launcher.resubmit", True, rule, (False,)))
        raise_if_any(self.problems)


def _prepared(line: CommandLine, *, folders: Mapping[str, Path], awaited: Container[Path]) -> PreparedRun:
    """The checked run of a line, with folders in place of `{NAME}` in the values of its configuration."""
    with reporting_all_problems(line):
        cell = compose_run(line.overrides, **line.places)
        values = flatten(table(OmegaConf.to_container(cell.config)))
        others = {name: folder for name, folder in folders.items() if name != MAIN}
        named = {
            key: text for key, value in values.items()
            if isinstance(value, str) and not key.startswith("then")
            and (text := filled(value, others)) != value
        }  # fmt: skip
        if named:
            words = [f"{key}={hydra_value(text)}" for key, text in named.items()]
            line = line.with_words([*line.words, *words])
            cell = compose_run(line.overrides, **line.places)
        return prepared(line, cell, awaited=awaited)


def fingerprint(
    run: PreparedRun, words: Sequence[str], *, folders: Mapping[str, Path], before: Sequence[str]
) -> str:
    """A digest of what a stage does. before: the digests of the stages before it; folders: of all stages."""
    settings = {key: value for key, value in flatten(run.values).items() if not key.startswith(_PLACES)}
    text = _named(json.dumps([list(words), settings, list(before)], sort_keys=True, default=str), folders)
    return hashlib.sha256(text.encode()).hexdigest()


def _named(text: str, folders: Mapping[str, Path]) -> str:
    """The text with `{NAME}` for the folder of each stage."""
    for name, folder in folders.items():
        text = text.replace(str(folder), f"{{{name}}}")
    return text


def files_of(run: PreparedRun, words: Iterable[str], *, folders: Iterable[Path]) -> dict[str, Any]:
    """Each file or folder that the stage names, with its size and time; None if it is missing."""
    values = flatten(run.values)
    named = [f"{key}={values[key]}" for key in ("data.path", "weights") if values.get(key)]
    paths = {*_paths([*words, *named]), *_own_modules(values)}
    return {str(path): _state(path) for path in sorted(paths) if not any(map(path.is_relative_to, folders))}


def _paths(words: Iterable[str]) -> Iterator[Path]:
    """The paths that the words of a line may name."""
    texts = [word.partition("=")[2] or word for word in words if not word.startswith("-") or "=" in word]
    yield from [absolute(text) for text in texts if text and len(text) < 4096 and "\0" not in text]


def _own_modules(values: Mapping[str, Any]) -> Iterator[Path]:
    """The files in this folder of the user's own classes."""
    for key, value in values.items():
        if f".{key}".endswith(_OWN_CLASS) and isinstance(value, str) and not value.startswith(_PACKAGES):
            path = absolute(value.rpartition(".")[0].replace(".", "/") + ".py")
            if os.path.isfile(path):
                yield path


def _state(path: Path) -> list[float] | None:
    """The number of files, their bytes, and the newest time in seconds; None without the file or folder."""
    if not os.path.exists(path):
        return None
    files = [path] if not os.path.isdir(path) else [
        Path(folder, name) for folder, _, names in os.walk(path) for name in names
    ]  # fmt: skip
    stats = [file.stat() for file in files if file.exists()]
    return [len(stats), sum(one.st_size for one in stats), max([one.st_mtime for one in stats], default=0.0)]


def changed_file(
    before: Mapping[str, Any], now: Mapping[str, Any], *, words: Sequence[str], windows: Sequence[Window]
) -> str | None:
    """A file that has changed since the stage ended; None if there is none. windows: when stages ran."""
    outputs = {word for flag, word in pairwise(words) if flag == "--output"}
    for output in outputs:
        if not absolute(output).exists():
            return output
    for path in sorted({*before, *now}):
        state = now.get(path)
        if before.get(path) == state:
            continue
        if state is None or not any(first <= state[2] <= last for first, last in windows):
            return path
    return None


def window_of(run: RecordedRun) -> Window | None:
    """When the run began and ended, in seconds since 1970; None if it is not known."""
    try:
        times = (run.attempts.started, run.totals.ended)
        first, last = (datetime.fromisoformat(str(text)).timestamp() for text in times)
    except ValueError:
        return None
    return first - _CLOCKS_S, last + _CLOCKS_S
