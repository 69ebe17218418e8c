"""A sweep on Slurm: one job array for each resource shape, so one call of sbatch for each."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_parallel.launch.batch_script import render, render_array
from hpc_parallel.launch.launcher import SiteRefusedError
from hpc_parallel.launch.slurm_launcher import NEVER, in_slurms_words
from hpc_parallel.record import owner
from hpc_parallel.record.job_state import JobState, job_states
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_text
from hpc_parallel.record.sweep_folder import write_sweep
from hpc_parallel.sweep.plan import PlannedRun, SweepPlan
from hpc_parallel.sweep.write import each_of, take_back

REASON_S = 1.0  # for the scheduler to look at what was submitted
MOST_TASKS = 1000  # Slurm's own default (MaxArraySize=1001), where it does not answer


@dataclass(frozen=True)
class Array:
    """Runs that ask sbatch for the same; `tasks`: the folder with a link to each of them, by number."""

    runs: Sequence[PlannedRun]
    tasks: Path
    script: str

    @property
    def is_single(self) -> bool:
        return len(self.runs) == 1


def shapes(runs: Sequence[PlannedRun]) -> list[list[PlannedRun]]:
    """The runs grouped by what their batch scripts say, all but the run's own name and folder."""
    found: dict[str, list[PlannedRun]] = {}
    for planned in runs:
        script = render_array(planned.run, tasks=Path("/"), name="", count=1)
        found.setdefault(script, []).append(planned)
    return list(found.values())


def arrays(plan: SweepPlan) -> list[Array]:
    """What will be submitted; a shape of more runs than an array may have is several of them."""
    groups = shapes(plan.runs)
    most = most_tasks() if any(len(group) > 1 for group in groups) else 1
    first = len(list((plan.folder / "arrays").glob("*")))  # of earlier starts
    chunks = [group[at : at + most] for group in groups for at in range(0, len(group), most)]
    return [_array(chunk, plan, number) for number, chunk in enumerate(chunks, start=first)]


def _array(chunk: Sequence[PlannedRun], plan: SweepPlan, number: int) -> Array:
    tasks = plan.folder / "arrays" / str(number)
    one = chunk[0].run
    if len(chunk) == 1:
        return Array(chunk, tasks, render(one))
    names = {planned.run.config.name for planned in chunk}
    name = one.config.name if len(names) == 1 else plan.folder.name
    script = render_array(
        one, tasks=tasks, name=name, count=len(chunk), parallelism=plan.settings.parallelism
    )
    return Array(chunk, tasks, script)


def most_tasks() -> int:
    """How many tasks an array may have here; 1 on a site without arrays."""
    try:
        shown = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return MOST_TASKS
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", shown.stdout, re.MULTILINE)
    return max(1, int(found[1])) if found else MOST_TASKS


def submit(plan: SweepPlan) -> tuple[dict[Path, str], list[str]]:
    """Submit all runs, whose folders are written; returns run folder -> job id, and what Slurm refused."""
    arranged = arrays(plan)
    try:
        each_of(_write_scripts, arranged)
    except BaseException:  # a full disk, Ctrl-C
        take_back(planned.run for planned in plan.runs)
        raise
    jobs: dict[Path, str] = {}
    refusals: list[str] = []
    try:
        for array in arranged:
            try:
                job_id = _sbatch(array)
            except SiteRefusedError as refusal:
                refusals.append(f"{_told(array)}: {refusal}")
                take_back(planned.run for planned in array.runs)
                continue
            ids = [job_id] if array.is_single else [f"{job_id}_{index}" for index in range(len(array.runs))]
            jobs |= {planned.run.folder.path: one for planned, one in zip(array.runs, ids, strict=True)}
            write_sweep(plan.folder, plan.manifest(jobs))
    finally:  # also after a Ctrl-C: what was submitted is known
        each_of(lambda item: owner.hand_to_job(item[0], item[1]), _folders(plan, jobs))
    for array, reason in _never(arranged, jobs):
        ids = [jobs.pop(planned.run.folder.path) for planned in array.runs]
        subprocess.run(["scancel", ids[0].partition("_")[0]], check=False)
        take_back(planned.run for planned in array.runs)
        refusals.append(f"{_told(array)}: {in_slurms_words(f'it could never start ({reason})')}")
    write_sweep(plan.folder, plan.manifest(jobs))
    return jobs, refusals


def _folders(plan: SweepPlan, jobs: dict[Path, str]) -> Iterator[tuple[RunFolder, str]]:
    for planned in plan.runs:
        if (job := jobs.get(planned.run.folder.path)) is not None:
            yield planned.run.folder, job


def _write_scripts(array: Array) -> None:
    array.tasks.mkdir(mode=0o700, parents=True)
    write_text(array.tasks / "batch_script.sh", array.script)
    for index, planned in enumerate(array.runs):
        folder = planned.run.folder
        folder.slurm.mkdir(mode=0o700, exist_ok=planned.run.resumes)
        write_text(folder.batch_script, array.script)
        write_text(folder.resubmission, render(planned.run))
        (array.tasks / str(index)).symlink_to(folder.path)


def _sbatch(array: Array) -> str:
    """The job's id. Raises SiteRefusedError with Slurm's words."""
    script = str(array.tasks / "batch_script.sh")
    try:
        done = subprocess.run(["sbatch", "--parsable", script], capture_output=True, text=True)
    except FileNotFoundError as error:
        raise SiteRefusedError("there is no sbatch on this machine; launcher=local runs here") from error
    if done.returncode != 0:
        raise SiteRefusedError(in_slurms_words(done.stderr))
    return done.stdout.strip().partition(";")[0]


def _never(arranged: Sequence[Array], jobs: dict[Path, str]) -> Iterator[tuple[Array, str]]:
    """Arrays that Slurm keeps, but will never start, with its reason (many sites: EnforcePartLimits=NO)."""
    firsts = {jobs[path]: array for array in arranged if (path := array.runs[0].run.folder.path) in jobs}
    deadline = time.monotonic() + REASON_S
    while True:
        states = job_states(list(firsts))
        if not any(map(_unlooked, states.values())) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    for job, state in states.items():
        if state.state == "PENDING" and state.reason in NEVER:
            yield firsts[job], state.reason


def _unlooked(state: JobState) -> bool:
    return state.state == "PENDING" and state.reason in ("", "None")


def _told(array: Array) -> str:
    config = array.runs[0].run.config
    several = f" and {len(array.runs) - 1} more" * (not array.is_single)
    return f"nodes={config.nodes} gpus_per_node={config.gpus_per_node} ({array.runs[0].label}{several})"
