"""Start the stages of a study: in order on this machine, or as jobs of Slurm that depend on each other."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hpc_parallel.config.command_line import CommandLine
from hpc_parallel.config.compose import compose_run
from hpc_parallel.config.node_devices import visible_gpus
from hpc_parallel.config.script import absolute
from hpc_parallel.exit_codes import DONE, FAILED, REFUSED
from hpc_parallel.failure.run_state import states
from hpc_parallel.launch.checked_run import prepared, reporting_all_problems
from hpc_parallel.launch.launcher import launcher_of
from hpc_parallel.launch.prepare import PreparedRun
from hpc_parallel.launch.recompose import override_value
from hpc_parallel.launch.run_files import undo_write, write
from hpc_parallel.problems import ConfigError, Problem
from hpc_parallel.record.names import RUNS, command_on, from_here, label
from hpc_parallel.record.recorded import read_run
from hpc_parallel.record.run_folder import new_run_id
from hpc_parallel.record.stage_file import FILE, MAIN, StageRecord, read_stages, write_stages
from hpc_parallel.record.sweep_folder import Sweep, SweepRun, is_sweep_folder, write_sweep
from hpc_parallel.record.trust import require_trusted
from hpc_parallel.record.values import flatten, table
from hpc_parallel.shell import complain
from hpc_parallel.slurm.node_room import RunPlace
from hpc_parallel.sweep.stage_inputs import changed_file, files_of, fingerprint, window_of
from hpc_parallel.sweep.study_stages import BESIDE, StudyStage, filled, line_of, stages_of, unknown_folders

COMPLETED = "completed"
_KINDS = ("local", "allocation", "slurm")


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
        """Print what each stage does, and why."""
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


def start(line: CommandLine, config: Any) -> int:
    """Start the stages of a composed configuration that are not done; returns the exit code.

    Raises ConfigError with the problems of all stages; nothing was started then.
    """
    study = plan(line, config)
    if config.dry_run:
        study.show()
        for planned in study.waiting:
            print(f"# {planned.name}\n{launcher_of(planned.run)[0].preview(planned.run)}")
        return DONE
    from hpc_parallel.sweep.start import held

    launcher = study.main.run.config.launcher
    study.folder.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    study.folder.mkdir(mode=0o700, exist_ok=True)
    require_trusted(study.folder, key="name", shared_folder=launcher.shared_folder)
    with held(study.folder, key="name"):
        if read_stages(study.folder) != study.before:  # the same line was typed at the same time
            study = plan(line, config)
        study.show()
        if not study.waiting:
            study.record(_jobs(study))
            return DONE
        return submit(study) if launcher.kind == "slurm" else run_in_order(study)


def plan(line: CommandLine, config: Any) -> Study:
    """Compose and check all stages. Raises ConfigError with all problems."""
    then = config.then if isinstance(config.then, str) else OmegaConf.to_container(config.then, resolve=True)
    stages = stages_of(then)
    name, run_id = str(config.name), new_run_id()
    chosen = absolute(config.run_dir) if config.run_dir else None
    if problems := [*unknown_folders(stages)]:
        raise ConfigError(problems)
    folders = {
        stage.name: chosen.with_name(f"{chosen.name}.{stage.name}") if chosen
        else absolute(str(RUNS / f"{name}.{stage.name}" / run_id))
        for stage in stages
    }  # fmt: skip
    folders[MAIN] = chosen or absolute(str(RUNS / name / run_id))
    folder = absolute(str(RUNS / "sweeps" / name))
    if is_sweep_folder(folder) and not (folder / FILE).exists():
        raise ConfigError([Problem("name", name, "is the name of a sweep", (f"{name}_study",))])
    before = read_stages(folder)
    planner = _Planner(line, name=name, folders=folders, before=before)
    for stage in stages:
        planner.add(stage)
    planner.require_valid()
    return Study(folder, tuple(planner.planned), line.words, before)


class _Planner:
    def __init__(
        self, line: CommandLine, *, name: str, folders: dict[str, Path], before: Sequence[StageRecord]
    ) -> None:
        self.planned: list[PlannedStage] = []
        self._line, self._name, self._folders = line, name, folders
        self._records = {record.name: record for record in before}
        self._problems: list[Problem | str] = []
        self._words: list[str] = []  # of all stages so far

    def add(self, stage: StudyStage) -> None:
        """Check a stage; those before it are planned."""
        awaited = [*self._folders.values()]
        awaited += [absolute(word.rpartition("=")[2]) for word in self._words if not word.startswith("-")]
        self._words += stage.words
        try:
            line = line_of(stage, self._line, name=self._name, folders=self._folders)
            folders = dict(self._folders) if stage.is_run else {}
            again = partial(_prepared, line, folders=folders)
            run = again(awaited=awaited)
        except ConfigError as error:
            prefix = "" if stage.name == MAIN else f"then.{stage.name}: "
            self._problems += [f"{prefix}{problem}" if prefix else problem for problem in error.problems]
            return
        if any(name not in {planned.name for planned in self.planned} for name in stage.after):
            return  # a stage before has problems
        self.planned.append(self._compared(stage, run, again))

    def _compared(
        self, stage: StudyStage, run: PreparedRun, again: Callable[[], PreparedRun]
    ) -> PlannedStage:
        earlier = {planned.name: planned for planned in self.planned}
        before = [earlier[name] for name in stage.after]
        if stage.when == BESIDE and MAIN in earlier:
            before.append(earlier[MAIN])
        digest = fingerprint(
            run, stage.words, folders=self._folders, before=[one.record.fingerprint for one in before]
        )
        known = self._records.get(stage.name)
        folders = self._folders | ({} if known is None else {stage.name: Path(known.run_dir)})
        words = [filled(word, folders) for word in stage.words]
        files = files_of(run, words, folders=[*self._folders.values(), *folders.values()])
        record = StageRecord(
            stage.name, str(self._folders[stage.name]), stage.after, digest, files, stage.when == BESIDE
        )
        because = self._reason(record, before=before, words=words)
        if not because:
            record = replace(record, run_dir=self._records[stage.name].run_dir)
            self._folders[stage.name] = Path(record.run_dir)
        return PlannedStage(stage, run, record, because, again)

    def _reason(self, record: StageRecord, *, before: Sequence[PlannedStage], words: Sequence[str]) -> str:
        """Why the stage must run; empty if it is done and nothing has changed."""
        known = self._records.get(record.name)
        if known is None:
            return "it is new"
        run = read_run(Path(known.run_dir))
        (state,) = states([run])
        if not state.ended:
            rule = f"is going on in {label(run.path)}: {state}. Try {command_on(run.path, 'status')}"
            self._problems.append(f"then: the stage {record.name} {rule}.")
            return str(state)
        if state.name != COMPLETED:
            return f"it was {state}" if state.name != "not started" else "it was not started"
        if again := next((one.name for one in before if one.because), None):
            return f"{again} runs again"
        if known.fingerprint != record.fingerprint:
            return "its configuration has changed"
        runs = [run, *(read_run(Path(one.record.run_dir)) for one in self.planned)]
        windows = [window for one in runs if (window := window_of(one)) is not None]
        if changed := changed_file(known.files, record.files, words=words, windows=windows):
            return f"{from_here(absolute(changed))} has changed"
        return ""

    def _require_checkpoints(self) -> None:
        """A training that saves nothing leaves nothing to a stage that starts from its weights."""
        main = next((planned.run.config for planned in self.planned if planned.name == MAIN), None)
        if main is None or main.task.name != "train" or main.training.checkpoint_every is not None:
            return
        folder = str(self._folders[MAIN])
        users = [
            planned.name for planned in self.planned
            if planned.run.config.weights == folder or planned.run.config.script.words[:1] == ["export"]
        ]  # fmt: skip
        if users:
            rule = f"leaves no checkpoint for {' and '.join(users)}"
            self._problems.append(Problem("training.checkpoint_every", None, rule, (500,)))

    def require_valid(self) -> None:
        """Raises ConfigError with the problems of all stages."""
        kinds = {planned.run.config.launcher.kind for planned in self.planned}
        for kind in sorted(kinds - {*_KINDS}):
            self._problems.append(Problem("launcher", kind, "leaves the start of stages to you", ("slurm",)))
        if len(kinds) > 1 and kinds <= {*_KINDS}:
            self._problems.append(f"then: stages of one study have one launcher, not {sorted(kinds)}.")
        self._require_checkpoints()
        followed = {name for planned in self.planned for name in planned.stage.after}
        for planned in self.planned:
            launcher = planned.run.config.launcher
            if launcher.kind == "slurm" and launcher.resubmit and planned.name in followed:
                rule = "gives the run a new job, which later stages would not wait for"
                self._problems.append(Problem("launcher.resubmit", True, rule, (False,)))
        if self._problems:
            raise ConfigError(list(dict.fromkeys(self._problems)))


def _prepared(line: CommandLine, *, folders: Mapping[str, Path], awaited: Sequence[Path] = ()) -> PreparedRun:
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
            words = [f"{key}={override_value(text)}" for key, text in named.items()]
            line = line.with_words([*line.words, *words])
            cell = compose_run(line.overrides, **line.places)
        return prepared(line, cell, awaited=awaited)


def run_in_order(study: Study) -> int:
    """Run the stages here, one after another; returns FAILED if one of them failed."""
    study.record({})
    ended: dict[str, str] = {planned.name: COMPLETED for planned in study.stages if planned.is_done}
    beside = [planned for planned in study.stages if planned.stage.when == BESIDE and not planned.is_done]
    threads: dict[str, threading.Thread] = {}
    order = [planned for planned in study.stages if not planned.is_done]
    for planned in order:
        for name in planned.stage.after:
            _join(name, threads, study, ended)
        if planned.name == MAIN:
            threads |= dict(_start_beside(planned, beside, ended))
        if planned.name not in threads:
            _run_one(planned, ended)
    for name in [*threads]:
        _join(name, threads, study, ended)
    return DONE if all(outcome == COMPLETED for outcome in ended.values()) else FAILED


def _run_one(planned: PlannedStage, ended: dict[str, str]) -> None:
    """Run a stage to its end, if all before it have completed. Prints why it could not."""
    if failed := [name for name in planned.stage.after if ended.get(name) != COMPLETED]:
        ended[planned.name] = "not started"
        complain([f"{planned.name}: not started, because {failed[0]} {_was(ended.get(failed[0]))}"])
        return
    print(f"\nstage       {planned.name}", flush=True)
    try:
        run = planned.prepare()  # what stages before it wrote is now there to be checked
    except ConfigError as error:
        ended[planned.name] = "failed"
        complain([f"{planned.name} failed:", *error.problems])
        return
    launcher, choice = launcher_of(run)
    print("\n".join([str(run), choice, *run.notes]), flush=True)
    launcher.launch(run)
    ended[planned.name] = _outcome(planned)


def _was(outcome: str | None) -> str:
    return "was not started" if outcome == "not started" else f"ended: {outcome}"


def _outcome(planned: PlannedStage) -> str:
    run = read_run(Path(planned.record.run_dir))
    if run.totals.completed:
        return COMPLETED
    return run.cause or run.totals.outcome or "failed"


def _start_beside(
    main: PlannedStage, beside: Sequence[PlannedStage], ended: dict[str, str]
) -> Iterator[tuple[str, threading.Thread]]:
    """Start the stages beside the run, on devices that it leaves. Others run after it."""
    from hpc_parallel.launch.local_launcher import LocalLauncher, watched_agent

    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    count = visible_gpus(os.environ)
    free = (names if "CUDA_VISIBLE_DEVICES" in os.environ else list(map(str, range(count))))[:count]
    free = free[main.run.config.devices :] if main.run.config.device != "cpu" else free
    for planned in beside:
        needed = planned.run.config.devices if count and planned.run.config.device != "cpu" else 0
        launcher, _ = launcher_of(planned.run)
        if any(ended.get(name) != COMPLETED for name in planned.stage.after):
            continue
        if not isinstance(launcher, LocalLauncher) or needed > len(free):
            print(f"{planned.name:11} runs after the run: this machine has no device left beside it")
            continue
        mine, free = free[:needed], free[needed:]
        write(planned.run)
        variables = {"CUDA_VISIBLE_DEVICES": ",".join(mine)} if needed else {}
        agent = partial(launcher.agent, planned.run, place=RunPlace(variables))
        print(
            f"{planned.name:11} runs beside the run: {command_on(planned.run.folder.path, 'logs')}",
            flush=True,
        )
        yield planned.name, watched_agent(planned.run.folder, start=agent)


def _join(name: str, threads: dict[str, threading.Thread], study: Study, ended: dict[str, str]) -> None:
    """Wait for the end of a stage beside the run."""
    if (thread := threads.pop(name, None)) is None:
        return
    print(f"waits for   {name}", flush=True)
    thread.join()
    planned = next(planned for planned in study.stages if planned.name == name)
    ended[name] = _outcome(planned)
    print(f"{name:11} {ended[name]}", flush=True)


def submit(study: Study) -> int:
    """Submit all stages that are not done, each with its dependencies. If one is refused, none stays."""
    from hpc_parallel.launch.follow import wait_for_job
    from hpc_parallel.launch.slurm_launcher import submit as submit_run
    from hpc_parallel.slurm.jobs import Job
    from hpc_parallel.slurm.submit import SiteRefusedError, withdraw

    jobs: dict[str, Job] = {}
    runs: dict[str, PreparedRun] = {}
    try:
        for planned in study.stages:
            if planned.is_done:
                continue
            runs[planned.name] = replace(planned.run, dependency=_dependency(planned.stage, jobs))
            write(runs[planned.name])
            jobs[planned.name] = submit_run(runs[planned.name])
        study.record({name: job.id for name, job in jobs.items()})
    except BaseException as error:  # a refusal, a full disk, Ctrl-C
        withdraw(jobs.values())
        for run in runs.values():
            undo_write(run)
        if not isinstance(error, SiteRefusedError):
            raise
        complain([f"no stage was submitted: {error}"])
        return REFUSED
    for name, job in jobs.items():
        print(f"{name:11} job {job.id}  {label(runs[name].folder.path)}")
    print(f"status      {command_on(study.folder, 'status')}")
    print(f"cancel      {command_on(study.folder, 'cancel')}", flush=True)
    if not study.main.run.config.launcher.wait:
        return DONE
    return max([wait_for_job(runs[name], job) for name, job in jobs.items()])


def _dependency(stage: StudyStage, jobs: Mapping[str, Any]) -> str:
    """sbatch's `--dependency` for a stage: those before it must complete, and a run beside must start."""
    parts = [f"afterok:{jobs[name].id}" for name in stage.after if name in jobs]
    parts += [f"after:{jobs[MAIN].id}"] if stage.when == BESIDE and MAIN in jobs else []
    return ",".join(parts)


def _jobs(study: Study) -> dict[str, str]:
    found = {planned.name: read_run(Path(planned.record.run_dir)).job for planned in study.stages}
    return {name: job.id for name, job in found.items() if job is not None}
