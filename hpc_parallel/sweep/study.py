"""Start the stages of a study: in order on this machine, or as jobs of Slurm that depend on each other."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hpc_parallel.config.command_line import CommandLine
from hpc_parallel.config.node_devices import visible_gpus
from hpc_parallel.exit_codes import DONE, FAILED, REFUSED
from hpc_parallel.launch.launcher import launcher_of
from hpc_parallel.launch.prepare import PreparedRun
from hpc_parallel.launch.run_files import undo_write, write
from hpc_parallel.problems import ConfigError
from hpc_parallel.record.endings import COMPLETED
from hpc_parallel.record.names import command_on, label
from hpc_parallel.record.recorded import read_run
from hpc_parallel.record.sweep_folder import MAIN, read_stages
from hpc_parallel.record.trust import require_trusted
from hpc_parallel.shell import complain
from hpc_parallel.slurm.node_room import RunPlace
from hpc_parallel.sweep.study_plan import Check, PlannedStage, Study, plan
from hpc_parallel.sweep.study_stages import BESIDE, StudyStage


def start(line: CommandLine, config: Any, *, check: Check) -> int:
    """Start the stages of a composed configuration that are not done; returns the exit code.

    Raises ConfigError with the problems of all stages; nothing was started then.
    """
    study = plan(line, config, check=check)
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
            study = plan(line, config, check=check)
        study.show()
        if not study.waiting:
            jobs = {planned.name: read_run(Path(planned.record.run_dir)).job for planned in study.stages}
            study.record({name: job.id for name, job in jobs.items() if job is not None})
            return DONE
        return submit(study) if launcher.kind == "slurm" else run_in_order(study)


def run_in_order(study: Study) -> int:
    """Run the stages here, one after another; returns FAILED if one of them failed."""
    study.record({})
    ended: dict[str, str] = {planned.name: COMPLETED for planned in study.stages if planned.is_done}
    beside = [planned for planned in study.waiting if planned.stage.when == BESIDE]
    threads: dict[str, threading.Thread] = {}
    for planned in study.waiting:
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
        outcome = ended.get(failed[0])
        why = "was not started" if outcome == "not started" else f"ended: {outcome}"
        complain([f"{planned.name}: not started, because {failed[0]} {why}"])
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
        logs = command_on(planned.run.folder.path, "logs")
        print(f"{planned.name:11} runs beside the run: {logs}", flush=True)
        yield planned.name, watched_agent(planned.run.folder, start=agent)


def _join(name: str, threads: dict[str, threading.Thread], study: Study, ended: dict[str, str]) -> None:
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
        for planned in study.waiting:
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
