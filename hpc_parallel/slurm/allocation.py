"""The allocation that this shell is in (`salloc`, `srun --pty`, a notebook in a job, a batch script)."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from hpc_parallel.problems import ConfigError
from hpc_parallel.slurm.client import KEPT, UNANSWERED, Inquiry, WhichSlurm, which_slurm
from hpc_parallel.slurm.short_forms import expand_hosts, expand_numbers, gpu_count

ALLOCATION = "allocation"  # the `launcher.kind` of a run inside a job that is not its own
_JOB = "SLURM_JOB_ID"
_FIELD = re.compile(r"(?:^|\s)(JobState|NodeList|NumCPUs|UserId)=(\S+)")
_NODES = re.compile(r"\sNodes=\S+ CPU_IDs=(\S+) Mem=(\d*)\S* GRES\w*=(\S*)")
# Facts of the job that runs record. Each other SLURM_* of a shell in a job describes a step or a request of
# that shell (tasks, memory, binding), and srun would read it as a request of the run.
_FACTS = {
    _JOB, "SLURM_CLUSTER_NAME", "SLURM_JOB_ACCOUNT", "SLURM_JOB_END_TIME", "SLURM_JOB_NAME",
    "SLURM_JOB_PARTITION", "SLURM_JOB_QOS", "SLURM_TMPDIR",
}  # fmt: skip
# Of the shell's own step, which may be `srun --pty`, or of its commands.
_OF_THE_SHELL = re.compile(r"SLURMD_|SRUN_|SQUEUE_|SCANCEL_|PMI|MPI_LOCAL")


@dataclass(frozen=True)
class Allocation:
    """A running job of this user. cpus, gpus, memory_mb: of its node with the fewest; 0: not counted."""

    job: str
    hosts: tuple[str, ...]
    cpus: int
    gpus: int
    memory_mb: int = 0

    def __str__(self) -> str:
        return f"job {self.job} (the allocation you are in)"


class Surroundings(NamedTuple):
    """The allocation of a shell, or why it has none that runs can use.

    is_stale: the shell names a job that is not there; it is as if there were none.
    """

    allocation: Allocation | None = None
    reason: str = "there is no SLURM_JOB_ID in this shell"
    is_stale: bool = True


def surroundings(environment: Mapping[str, str] = os.environ) -> Surroundings:
    """What Slurm says of the job that the environment names. It is asked once a minute."""
    if not (job := environment.get(_JOB)):
        return Surroundings()
    return _asked(job, which_slurm(environment))


def required() -> Allocation:
    """The allocation of a run that was checked. Raises ConfigError if it has ended since."""
    allocation, reason, _ = surroundings()
    if allocation is None:
        raise ConfigError([f"launcher.kind = {ALLOCATION}: {reason}."])
    return allocation


def in_allocation(launcher: Mapping[str, object]) -> bool:
    """Whether the section `launcher` of a recorded configuration is that of a run in an allocation."""
    return launcher.get("kind") == ALLOCATION


def own_step(kind: str, *, start: str, environment: Mapping[str, str]) -> str | None:
    """The number of the step of all ranks in an allocation or a job; None for another `launcher.kind`.

    mpirun has a step of its own daemons, which a signal would end.

    start: `cluster.start`.
    """
    return environment.get("SLURM_STEP_ID") if kind in (ALLOCATION, "slurm") and start != "mpirun" else None


def step_runs(step: str) -> bool:
    """Whether Slurm says that a step (`123.4`) runs. False also if it does not answer."""
    # squeue lists none of the steps that a stepmgr starts.
    answer = Inquiry().ask("scontrol", "--oneliner", "--all", "show", "step", step)
    return f"StepId={step}" in answer.stdout.split()


@lru_cache(maxsize=1)
def _asked(job: str, which: WhichSlurm) -> Surroundings:
    if shutil.which("srun") is None:
        return Surroundings(None, f"already inside job {job}, and there is no srun on this machine", False)
    answer = Inquiry().ask("scontrol", "--oneliner", "--details", "show", "job", job)
    if answer.returncode == UNANSWERED or (answer.returncode and "Invalid job id" not in answer.stderr):
        return Surroundings(None, f"already inside job {job}, and Slurm does not answer about it", False)
    return read_answer(job, answer.stdout, user=os.geteuid())


def read_answer(job: str, record: str, *, user: int) -> Surroundings:
    """Read the answer of `scontrol --details show job`; an empty one if Slurm does not know the job."""
    fields = dict(_FIELD.findall(record))
    if not fields:
        return Surroundings(None, f"SLURM_JOB_ID={job} of this shell is no job of this Slurm")
    if not fields.get("UserId", "").endswith(f"({user})"):
        return Surroundings(None, f"job {job} of SLURM_JOB_ID is another user's")
    if fields.get("JobState") != "RUNNING":
        state = fields.get("JobState", "unknown").lower()
        return Surroundings(None, f"job {job} of SLURM_JOB_ID does not run ({state})")
    hosts = tuple(expand_hosts(fields.get("NodeList", "")))
    nodes = _NODES.findall(record)
    cpus = min((len(expand_numbers(ids)) for ids, _, _ in nodes), default=0)
    gpus = min((gpu_count(gres, gpu_type=None) for _, _, gres in nodes), default=0)
    memory_mb = min((int(mb or 0) for _, mb, _ in nodes), default=0)
    return Surroundings(Allocation(job, hosts, max(1, cpus), gpus, memory_mb), "", False)


def variables_of_steps(
    environment: Mapping[str, str], *, job: str, hosts: tuple[str, ...], tasks: int
) -> dict[str, str]:
    """The environment of a batch script that runs inside an allocation, on `hosts` with `tasks` on each.

    Slurm's variables are those that a job of this size would have (mpirun reads them), without those of the
    shell. SLURM_RESTART_COUNT counts the starts of the allocation, not of the run, so it is left out.
    """
    kept = {
        name: value
        for name, value in environment.items()
        if name in KEPT or name in _FACTS or not (name.startswith("SLURM_") or _OF_THE_SHELL.match(name))
    }
    names = ",".join(hosts)
    return kept | {
        _JOB: job, "SLURM_JOBID": job, "SLURM_JOB_NODELIST": names, "SLURM_NODELIST": names,
        "SLURM_JOB_NUM_NODES": str(len(hosts)), "SLURM_NNODES": str(len(hosts)),
        "SLURM_TASKS_PER_NODE": f"{tasks}(x{len(hosts)})",
    }  # fmt: skip
