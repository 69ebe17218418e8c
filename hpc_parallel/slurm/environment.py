"""The environment of Slurm's commands: the variables of a user's shell change neither jobs nor answers."""

from __future__ import annotations

import re
from collections.abc import Mapping

CLUSTERS = "SLURM_CLUSTERS"  # makes Slurm's commands use another cluster
# They select a Slurm installation and identify the user. All other SLURM_* describe a job or change output.
KEPT = {
    CLUSTERS, "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_SACK_JWKS", "SLURM_SACK_KEY",
    "SLURM_SACK_SOCKET",
}  # fmt: skip
# The flag of `SBATCH_<name>` if it differs from the name (man sbatch, "Input environment variables").
_FLAGS = {
    "ARRAY_INX": "array", "BURST_BUFFER": "bb", "CPU_FREQ_REQ": "cpu-freq", "DEBUG": "verbose",
    "MEM_PER_NODE": "mem", "NO_REQUEUE": "requeue", "REQ_SWITCH": "switches", "SEGMENT_SIZE": "segment",
    "TIMELIMIT": "time", "WAIT4SWITCH": "switches",
}  # fmt: skip
# Slurm accepts only one flag of each of these sets.
_ALTERNATIVES = (
    {"mem", "mem-per-cpu", "mem-per-gpu"},
    {"gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket"},
    {"cpus-per-task", "cpus-per-gpu"},
    {"core-spec", "thread-spec"},
    {"exclusive", "oversubscribe"},
    {"requeue", "no-requeue"},
)
# Several runs in one folder, another Slurm than the one that is asked, errors that are not in the job's log,
# and an sbatch that waits for the end of the job.
_HARMFUL = {"array", "clusters", "error", "wait"}
OVERRIDDEN = "of this shell: not used, because the job's configuration sets the same flag"
REFUSED = (
    "of this shell: not used, because this flag would break the run (another cluster: set SLURM_CLUSTERS)"
)
PASSED_ON = "of this shell: passed on to sbatch, because the job's configuration does not set the same flag"
_SET_FLAG = re.compile(r"^#SBATCH\s+--([a-z-]+)", re.MULTILINE)


def command_environment(
    command: str, environment: Mapping[str, str], *, cluster: str | None = None
) -> dict[str, str]:
    """The environment of a command that asks about jobs or changes them. cluster: the one to ask.

    Variables such as SQUEUE_USERS and SCANCEL_PARTITION would select other jobs, or change the format.
    """
    own = f"{command.upper()}_"
    kept = {name: value for name, value in _without_job(environment).items() if not name.startswith(own)}
    kept["SLURM_BITSTR_LEN"] = "0"  # list all pending tasks of an array
    return kept if cluster is None else kept | {CLUSTERS: cluster}


def submission_environment(environment: Mapping[str, str], *, script: str = "") -> dict[str, str]:
    """The environment of sbatch: without the job of this process and without `dropped` variables.

    In an interactive job SLURM_* describes that job. sbatch and srun would read these variables as requests
    (memory, tasks).
    """
    names = dropped(environment, script=script)
    return {name: value for name, value in _without_job(environment).items() if name not in names}


def _without_job(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value for name, value in environment.items() if name in KEPT or not name.startswith("SLURM_")
    }


def dropped(environment: Mapping[str, str], *, script: str) -> list[str]:
    """The variables SBATCH_* that sbatch must not see."""
    uses = {name: _use(flag, script=script) for name, flag in _requests(environment).items()}
    return [name for name, use in uses.items() if use != PASSED_ON]


def announcements(environment: Mapping[str, str], *, script: str) -> list[str]:
    """A line for each use of variables SBATCH_* of the user's shell."""
    names: dict[str, list[str]] = {}
    for name, flag in _requests(environment).items():
        names.setdefault(_use(flag, script=script), []).append(name)
    return [f"{', '.join(names[use])} {use}" for use in sorted(names)]


def _use(flag: str, *, script: str) -> str:
    flags = set(_SET_FLAG.findall(script))
    for alternatives in _ALTERNATIVES:
        if flags & alternatives:
            flags |= alternatives
    return OVERRIDDEN if flag in flags else REFUSED if flag in _HARMFUL else PASSED_ON


def _requests(environment: Mapping[str, str]) -> dict[str, str]:
    """Variable SBATCH_* -> its flag."""
    names = (name.removeprefix("SBATCH_") for name in sorted(environment) if name.startswith("SBATCH_"))
    return {f"SBATCH_{name}": _FLAGS.get(name, name.lower().replace("_", "-")) for name in names}
