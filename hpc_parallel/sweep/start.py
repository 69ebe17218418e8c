"""Start a planned sweep: write its folders, then submit it or run it on this machine.

Only one command can start a sweep at a time: two at once would both start the same runs.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from hpc_parallel.config.site_schema import HERE
from hpc_parallel.exit_codes import DONE, REFUSED
from hpc_parallel.failure.packed_job import last_start_s
from hpc_parallel.launch.batch_script import ScriptLauncher
from hpc_parallel.launch.launcher import Launcher, launcher_of
from hpc_parallel.launch.local_launcher import PERIOD_S, Agent, LocalLauncher, counting_signals
from hpc_parallel.problems import ConfigError, Problem, raise_if_any, shell_word
from hpc_parallel.record import owner
from hpc_parallel.record.names import from_here
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.sweep_folder import create, write_sweep
from hpc_parallel.record.trust import require_trusted
from hpc_parallel.shell import complain
from hpc_parallel.slurm.allocation import ALLOCATION, required
from hpc_parallel.slurm.jobs import queued_states
from hpc_parallel.slurm.node_room import RunPlace
from hpc_parallel.slurm.submit import estimate
from hpc_parallel.sweep import pack_runs, view
from hpc_parallel.sweep.pack_runs import AllocationPlaces, LocalPlaces
from hpc_parallel.sweep.sweep_plan import (
    PlannedRun,
    SweepPlan,
    folder_problems,
    for_each,
    take_back,
    write_runs,
)
from hpc_parallel.terminal import stdout_console


def start(plan: SweepPlan) -> int:
    """Run or submit the plan and return the exit code. Raises ConfigError if nothing was started."""
    for line in view.notes(plan):
        print(line)
    if not plan.runs:
        stdout_console().print(view.submitted(plan, {}, {}))
        print(f"nothing is missing in {plan.folder}")
        return DONE
    kind = plan.runs[0].run.config.launcher.kind
    launcher, choice = launcher_of(max(plan.runs, key=lambda planned: planned.run.config.nodes).run)
    if plan.runs[0].run.config.dry_run:
        return preview(plan, kind=kind, launcher=launcher)
    raise_if_any(folder_problems(plan.folder) if plan.earlier is None else ())
    count = len(plan.runs)
    print(f"sweep of {count} run{'s' * (count > 1)}; {choice}", flush=True)
    for note in dict.fromkeys(note for planned in plan.runs for note in planned.run.notes):
        print(note)
    if plan.earlier is None:
        open_folder(plan.folder)
    with nullcontext() if plan.earlier is not None else held(plan.folder, key="hydra.sweep.dir"):
        try:
            write(plan)
        except (ConfigError, KeyboardInterrupt):
            if plan.earlier is None:
                release(plan.folder)
                with suppress(OSError):  # it existed before and is not empty
                    plan.folder.rmdir()
            raise
        if isinstance(launcher, LocalLauncher):
            return run_all(plan, launcher)
        return write_scripts(plan) if kind == "script" else submit(plan)


def write(plan: SweepPlan) -> None:
    """Write every run folder and the manifest.

    Raises ConfigError if a folder can't be created, or if other users could replace the code that runs. No
    run folder remains in this case.
    """
    shared_folder = plan.runs[0].run.config.launcher.shared_folder
    require_trusted(plan.folder, key="hydra.sweep.dir", shared_folder=shared_folder)
    runs = [planned.run for planned in plan.runs]
    write_runs(runs)
    try:
        write_sweep(plan.folder, plan.manifest({}))
    except OSError as error:
        take_back(runs)
        rule = f"can't be written: {error.strerror or error}"
        raise ConfigError([Problem("hydra.sweep.dir", plan.folder, rule)]) from error


def open_folder(folder: Path) -> None:
    """Create the sweep folder. Raises ConfigError if that fails."""
    try:
        create(folder)
    except OSError as error:
        rule = f"can't hold the sweep: {error.strerror or error}"
        raise ConfigError([Problem("hydra.sweep.dir", folder, rule)]) from error


def submit(plan: SweepPlan) -> int:
    """Submit the runs to Slurm as arrays; with `sweep.wait`, wait until all have ended."""
    from hpc_parallel.sweep import arrays

    jobs, refusals = arrays.submit(plan)
    release(plan.folder)  # the jobs now own their runs
    ids = {path: job.id for path, job in jobs.items()}
    states = {job.id: state for job, state in queued_states(jobs.values()).items()}
    stdout_console().print(view.submitted(plan, ids, states, without_job="refused"))
    complain(refusals)
    print("\n".join(view.after_submission(plan.folder, submitted=bool(jobs))), flush=True)
    if refusals:
        return REFUSED
    return arrays.follow_jobs(plan, jobs) if plan.settings.wait else DONE


def write_scripts(plan: SweepPlan) -> int:
    """Write one batch script per run, which the user submits."""
    try:
        for planned in plan.runs:
            ScriptLauncher().write_script(planned.run)
            ScriptLauncher().announce(planned.run)
    except BaseException:  # a full disk, Ctrl-C
        take_back(planned.run for planned in plan.runs)
        raise
    print(f"sweep folder: {from_here(plan.folder)}")
    return DONE


def preview(plan: SweepPlan, *, kind: str, launcher: Launcher) -> int:
    """Print all batch scripts, Slurm's estimate of their start, and their resources; write nothing."""
    runs = [planned.run for planned in plan.runs]
    if kind != "slurm":
        is_packed = kind == ALLOCATION and pack_runs.choice(runs[0].config) == "auto"
        shown = AllocationPlaces(runs) if is_packed else launcher
        for number, planned in enumerate(plan.runs):
            print(f"# {number}: {planned.label}\n{shown.preview(planned.run)}")
    else:
        from hpc_parallel.sweep.arrays import arrays

        for array in arrays(plan):
            print(array.script)
            for number, planned in enumerate(array.runs):
                print(f"# {number}: {planned.label}")
            print(f"# {estimate(array.script)}\n")
    devices = sum(run.config.devices for run in runs)
    line = f"{len(runs)} run{'s' * (len(runs) > 1)} of {devices} device{'s' * (devices > 1)} together"
    if kind not in HERE:
        hours = math.fsum(run.config.devices_of_job * run.config.launcher.time_minutes / 60 for run in runs)
        line += f", at most {hours:g} device-hours by their time limits, before a requeue"
    print(f"# {line}", flush=True)
    from hpc_parallel.sweep.rank_variables import describe

    complain([*describe(runs[0]), f"  (run 0: {plan.runs[0].label})"])  # to stderr: stdout has the scripts
    return DONE


@contextmanager
def held(folder: Path, *, key: str) -> Iterator[None]:
    """Own the sweep folder until the end of the block, or until its runs have owners (`release`).

    The owner is recorded in `owner.json`, as for a run.

    key: the setting that named the folder.

    Raises ConfigError that names the owner.
    """
    owned = RunFolder(folder)
    try:
        owner.claim(owned)
    except owner.OwnedError as error:
        on_other_host = " on " in str(error).partition(", as ")[2]  # this host can't see if it runs
        rule = f"{error}" + f". If that process is gone: rm {shell_word(owned.owner)}" * on_other_host
        raise ConfigError([Problem(key, folder, rule)]) from error
    except OSError as error:
        rule = f"can't be written: {error.strerror or error}"
        raise ConfigError([Problem(key, folder, rule)]) from error
    try:
        yield
    finally:
        release(folder)


def release(folder: Path) -> None:
    """Give up ownership if this process still has it. If not, another start may own the folder."""
    if folder.is_dir():
        owner.release(RunFolder(folder))


def run_all(plan: SweepPlan, launcher: LocalLauncher) -> int:
    """Run all planned runs, whose folders exist. A failed run does not stop the others.

    After the first Ctrl-C or SIGTERM, active runs save and end, and no other run starts. The second signal
    kills them at once. Then KeyboardInterrupt is raised. A run that is cancelled before its turn is skipped.

    Returns 0 if all runs completed, else 1.
    """
    for_each(lambda planned: owner.queue(planned.run.folder), plan.runs)
    with counting_signals() as signals, view.SweepView(len(plan.runs)) as display:
        runner = _Runner(plan, launcher, display=display, signals=signals)
        runner.run()
        waiting = runner.waiting
        if waiting and not signals:
            display.say(f"{required()} ends soon, so no other run starts in it")
        display.say(f"{display.counts()}" + f", {len(waiting)} not started" * bool(waiting))
        for line in view.after_the_end(plan.folder, completed=runner.completed and not waiting):
            display.say(line)
    take_back(planned.run for planned in waiting)
    if signals:
        raise KeyboardInterrupt
    return 0 if runner.completed and not waiting else 1


class _Runner:
    def __init__(
        self, plan: SweepPlan, launcher: LocalLauncher, *, display: view.SweepView, signals: list[int]
    ) -> None:
        self._launcher = launcher
        self.waiting = deque(plan.runs)
        self.active: dict[PlannedRun, Agent] = {}
        self.completed = True  # all runs so far
        runs = [planned.run for planned in plan.runs]
        packed = pack_runs.choice(runs[0].config) == "auto"
        self._limit = plan.settings.parallelism or (len(plan.runs) if packed else 1)
        self._machine: LocalPlaces | AllocationPlaces | None = None
        self._last_start_s = math.inf
        if packed:
            self._machine = LocalPlaces(os.environ, runs_per_gpu=plan.settings.runs_per_gpu)
        if runs[0].config.launcher.kind == ALLOCATION:
            grace_s = max(run.config.launcher.grace_s for run in runs)
            self._last_start_s = last_start_s(os.environ, job=required().job, grace_s=grace_s)
            if packed:
                self._machine = AllocationPlaces(runs)
                self.waiting = deque(sorted(plan.runs, key=lambda planned: pack_runs.turn_of(planned.run)))
        self._display = display
        self._signals = signals  # received so far

    def run(self) -> None:
        handled = 0
        try:
            while self.active or (self.waiting and self._may_start()):
                self._start_waiting()
                if len(self._signals) > handled:
                    handled = len(self._signals)
                    self._display.say("stopping; Ctrl-C again kills at once")
                    for agent in self.active.values():
                        agent.stop(self._signals)
                self._end_finished()
                for planned in self.active:
                    self._display.poll(planned)
                time.sleep(PERIOD_S)
        finally:
            for agent in self.active.values():
                agent.end(signals=self._signals or [signal.SIGTERM])

    def _may_start(self) -> bool:
        return not self._signals and time.time() <= self._last_start_s

    def _start_waiting(self) -> None:
        for planned in list(self.waiting):
            if len(self.active) >= self._limit or not self._may_start():
                return
            place = self._machine.take(planned.run) if self._machine is not None else RunPlace()
            if place is None:
                continue
            self.waiting.remove(planned)
            if owner.take_turn(planned.run.folder):
                self._display.start(planned)
                self.active[planned] = self._launcher.agent(planned.run, place=place)
            else:
                self._give_back(planned)
                self._display.skip(planned)
                self.completed = False

    def _give_back(self, planned: PlannedRun) -> None:
        if self._machine is not None:
            self._machine.give_back(planned.run)

    def _end_finished(self) -> None:
        for planned in [planned for planned, agent in self.active.items() if agent.has_ended()]:
            self.active.pop(planned).end(signals=self._signals)
            self._give_back(planned)
            self.completed = self._display.end(planned) and self.completed
