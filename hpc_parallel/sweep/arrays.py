"""A sweep on Slurm: one job array, and one call of sbatch, for each set of requested resources.

With `sweep.wait`, all its jobs are shown in one display until the last one has ended.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_parallel.config.site_schema import ClusterConfig
from hpc_parallel.exit_codes import DONE, FAILED
from hpc_parallel.failure.packed_job import QUEUE, Queue
from hpc_parallel.launch.batch_script import render, render_array, render_pack, render_packed
from hpc_parallel.launch.follow import (
    ASK_EVERY_S,
    PERIOD_S,
    conclude_job,
    has_ended,
    has_summary,
    summary_timeout_s,
)
from hpc_parallel.record import owner
from hpc_parallel.record.safe_write import write_text
from hpc_parallel.record.sweep_folder import write_sweep
from hpc_parallel.record.typed import write_record
from hpc_parallel.slurm.jobs import Job, job_states, never_starting
from hpc_parallel.slurm.records import max_array_size
from hpc_parallel.slurm.submit import SiteRefusedError, refusal_message, submit_script, withdraw
from hpc_parallel.sweep import pack_runs
from hpc_parallel.sweep.pack_runs import Pack
from hpc_parallel.sweep.sweep_plan import PlannedRun, SweepPlan, for_each, take_back
from hpc_parallel.sweep.view import SweepView, after_the_end

REASON_S = 1.0  # time for the scheduler to examine a submitted job
MAX_TASKS = 1000  # Slurm's default (MaxArraySize=1001), if it does not answer


@dataclass(frozen=True)
class Array:
    """Runs with the same batch script. queue: of a packed job; None: each run is a job."""

    runs: Sequence[PlannedRun]
    tasks: Path  # the folder with a link to each run, by task number
    script: str
    queue: Queue | None = None

    @property
    def is_single(self) -> bool:
        return len(self.runs) == 1

    @property
    def batch_script(self) -> Path:
        """What is submitted. `cancel` knows the job of one run by the script in the folder of this run."""
        if self.is_single and self.queue is None:
            return self.runs[0].run.folder.batch_script
        return self.tasks / "batch_script.sh"


def shapes(runs: Sequence[PlannedRun]) -> list[list[PlannedRun]]:
    """Group the runs by their batch scripts, ignoring the run's name and folder."""
    by_script: dict[str, list[PlannedRun]] = {}
    for planned in runs:
        script = render_array(planned.run, tasks=Path("/"), name="", count=1)
        by_script.setdefault(script, []).append(planned)
    return list(by_script.values())


def arrays(plan: SweepPlan) -> list[Array]:
    """The arrays to submit. A group larger than Slurm's limit is split into several arrays."""
    runs = [planned.run for planned in plan.runs]
    if pack_runs.choice(runs[0].config) == "auto" and (packs := pack_runs.packs(runs)):
        return _packed(plan, packs)
    groups = shapes(plan.runs)
    limit = max_tasks(plan.runs[0].run.config.cluster) if any(len(group) > 1 for group in groups) else 1
    chunks = [group[at : at + limit] for group in groups for at in range(0, len(group), limit)]
    return [_array(chunk, plan, number) for number, chunk in enumerate(chunks, start=_first_number(plan))]


def _first_number(plan: SweepPlan) -> int:
    return len(list((plan.folder / "arrays").glob("*")))  # the arrays of earlier starts come before


def _packed(plan: SweepPlan, packs: Sequence[Pack]) -> list[Array]:
    jobs = []
    for number, pack in enumerate(packs, start=_first_number(plan)):
        runs, tasks = [plan.runs[at] for at in pack.positions], plan.folder / "arrays" / str(number)
        script = render_pack(
            runs[0].run, queue=tasks, name=plan.folder.name, nodes=pack.nodes, room=pack.queue.room,
            minutes=pack_runs.minutes_of([planned.run for planned in plan.runs]), grace_s=pack.queue.grace_s,
        )  # fmt: skip
        jobs.append(Array(runs, tasks, script, pack.queue))
    return jobs


def _array(chunk: Sequence[PlannedRun], plan: SweepPlan, number: int) -> Array:
    tasks = plan.folder / "arrays" / str(number)
    first = chunk[0].run
    if len(chunk) == 1:
        return Array(chunk, tasks, render(first))
    names = {planned.run.config.name for planned in chunk}
    name = first.config.name if len(names) == 1 else plan.folder.name
    script = render_array(
        first, tasks=tasks, name=name, count=len(chunk), parallelism=plan.settings.parallelism
    )
    return Array(chunk, tasks, script)


def max_tasks(cluster: ClusterConfig) -> int:
    """The largest number of tasks in an array on this site; 1 if the site does not allow arrays."""
    if cluster.max_array_size is not None:
        return cluster.max_array_size
    size = max_array_size()
    return MAX_TASKS if size is None else max(1, size)


def submit(plan: SweepPlan) -> tuple[dict[Path, Job], list[str]]:
    """Submit all runs, whose folders exist. Returns run folder -> job, and Slurm's refusals."""
    to_submit = arrays(plan)
    try:
        for_each(_write_scripts, to_submit)
    except BaseException:  # a full disk, Ctrl-C
        take_back(planned.run for planned in plan.runs)
        raise
    jobs: dict[Path, Job] = {}
    refusals: list[str] = []
    try:
        for array in to_submit:
            try:
                job = submit_script(array.batch_script)
            except SiteRefusedError as refusal:
                refusals.append(f"{_describe(array)}: {refusal}")
                take_back(planned.run for planned in array.runs)
                continue
            for index, planned in enumerate(array.runs):
                shared = array.is_single or array.queue is not None
                task = job if shared else replace(job, id=f"{job.id}_{index}")
                jobs[planned.run.folder.path] = task
            write_sweep(plan.folder, plan.manifest(jobs))
    finally:  # also after Ctrl-C, so that the submitted jobs are recorded
        hand = owner.queue_in_job if any(array.queue for array in to_submit) else owner.hand_to_job
        folders = [planned.run.folder for planned in plan.runs if planned.run.folder.path in jobs]
        for_each(lambda folder: hand(folder, jobs[folder.path]), folders)
    firsts = [(jobs[path], item) for item in to_submit if (path := item.runs[0].run.folder.path) in jobs]
    reasons = never_starting([job for job, _ in firsts], within_s=REASON_S)
    for job, array in firsts:
        if (reason := reasons.get(job)) is None:
            continue
        for planned in array.runs:
            del jobs[planned.run.folder.path]
        withdraw([replace(job, id=job.array)])
        take_back(planned.run for planned in array.runs)
        refusals.append(f"{_describe(array)}: {refusal_message(f'it could never start ({reason})')}")
    write_sweep(plan.folder, plan.manifest(jobs))
    return jobs, refusals


def _write_scripts(array: Array) -> None:
    array.tasks.mkdir(mode=0o700, parents=True)
    write_text(array.batch_script, array.script)
    if array.queue is not None:
        write_record(array.tasks / QUEUE, array.queue)
    for index, planned in enumerate(array.runs):
        folder = planned.run.folder
        folder.slurm.mkdir(mode=0o700, exist_ok=planned.run.resumes)
        if array.queue is None:
            write_text(folder.batch_script, array.script)
            write_text(folder.resubmission, render(planned.run))
        else:  # the packed job starts the script, and is what starts again
            need = array.queue.runs[index].need
            room = array.queue.room if array.queue.runs_per_gpu > 1 else None
            write_text(folder.batch_script, render_packed(planned.run, need, room=room))
            write_text(folder.resubmission, array.script)
        (array.tasks / str(index)).symlink_to(folder.path)


def _describe(array: Array) -> str:
    config = array.runs[0].run.config
    others = f" and {len(array.runs) - 1} more" * (not array.is_single)
    return f"nodes={config.nodes} gpus_per_node={config.gpus_per_node} ({array.runs[0].label}{others})"


def follow_jobs(plan: SweepPlan, jobs: Mapping[Path, Job]) -> int:
    """Show the jobs' states and metrics. Returns 0 if all runs completed, else 1.

    Ctrl-C ends the display, not the jobs.
    """
    active = {planned: jobs[planned.run.folder.path] for planned in plan.runs}
    ended_s: dict[PlannedRun, float] = {}  # jobs whose summary is not visible on this host yet
    completed = True
    with SweepView(len(active)) as view:
        try:
            for planned, job in active.items():
                view.start(planned, f"job {job.id} submitted")
            while active:
                states = job_states(active.values())
                for planned, job in list(active.items()):
                    view.poll(planned)
                    state = states[job]
                    if not has_ended(planned.run.folder, state):
                        waits = state.state == "RUNNING" and owner.waits(planned.run.folder)
                        view.note(
                            planned,
                            f"waits for its turn in job {job.id}" if waits else f"job {job.id} {state}",
                        )
                        continue
                    since_s = time.monotonic() - ended_s.setdefault(planned, time.monotonic())
                    if not has_summary(planned.run) and since_s < summary_timeout_s(state.state):
                        continue
                    if not has_summary(planned.run):
                        conclude_job(planned.run.folder, job.id, state)
                    completed = view.end(planned) and completed
                    del active[planned]
                _poll(view, active)
        except KeyboardInterrupt:
            print(f"\nno longer following; the jobs go on ({len(active)} have not ended)", file=sys.stderr)
            return FAILED
        for line in (view.counts(), *after_the_end(plan.folder, completed=completed)):
            view.say(line)
    return DONE if completed else FAILED


def _poll(view: SweepView, active: Mapping[PlannedRun, Job]) -> None:
    """Read only the run folders between two queries to Slurm, which serves many users."""
    until_s = time.monotonic() + ASK_EVERY_S
    while active and time.monotonic() < until_s:
        for planned in active:
            view.poll(planned)
        time.sleep(PERIOD_S)
