"""Starts Slurm's commands. No other folder starts one (checked by `tests/unit/test_slurm_client.py`).

The variables of a user's shell change neither jobs nor answers: each command has an environment of its own.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

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
_UP = re.compile(r"\bis UP\b")
_UNCONFIGURED = re.compile(r"configuration (source|file)|slurm\.conf|ClusterName", re.IGNORECASE)
UNANSWERED = 124  # as timeout(1) returns
MISSING = 127  # as a shell returns
CONTROL_S = 60.0  # the longest wait for a command that changes a job
_PROMPT_S = 1.0  # after this time we ping the controller
_PING_S = 2.0
_FIRST_PING_S = 5.0
_PATIENCE_S = 20.0  # further wait for a busy controller that answers the ping
_KEPT_S = 60  # how long an answer is kept, for the runs of a sweep
_BEGAN_S = time.monotonic()
WhichSlurm = tuple[int, tuple[str | None, ...]]  # the minute, PATH and the values of KEPT


def run(
    *command: str,
    waits_s: Sequence[float | None] = (None,),
    is_worth_waiting: Callable[[], bool] = lambda: True,
    stdin: str | None = None,
    cluster: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm to its end, or for the sum of the times `waits_s`.

    After each of these times `is_worth_waiting` may end the wait. The return code is `UNANSWERED` if there is
    no answer, and `MISSING` if the command can't be started; stderr then has the reason.

    cluster: the one to ask; None: the one that the shell selects. environment: by default that of
    `command_environment`.
    """
    if environment is None:
        environment = command_environment(command[0], os.environ, cluster=cluster)
    if command[0] == "sacct" and (name := environment.get(CLUSTERS)):  # it ignores the variable
        command = ("sacct", "-M", name, *command[1:])
    try:
        process = subprocess.Popen(
            command, stdin=None if stdin is None else subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, encoding="utf-8", errors="replace", env=environment,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        return subprocess.CompletedProcess(command, MISSING, stdout="", stderr=str(error))
    reason = ""
    with process:
        try:
            for timeout_s in waits_s:
                try:
                    out, err = process.communicate(stdin, timeout=timeout_s)
                    return subprocess.CompletedProcess(command, process.returncode, out, err)
                except subprocess.TimeoutExpired as error:
                    reason, stdin = str(error), None  # stdin has been sent
                if not is_worth_waiting():
                    break
        finally:  # also after Ctrl-C
            process.kill()
    return subprocess.CompletedProcess(command, UNANSWERED, stdout="", stderr=reason)


class Inquiry:
    """Queries to Slurm for a user who waits.

    A busy controller has `patience_s` to answer. A controller that is down, or a missing slurm.conf, costs
    three seconds once, and all later queries return at once. until: the end of the patience on the monotonic
    clock, if it comes earlier.
    """

    def __init__(self, *, patience_s: float = _PATIENCE_S, until: float = math.inf) -> None:
        self.silent = False
        self._patience_s = patience_s
        self._until = until

    def ask(self, *command: str, cluster: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command that only reads. The return code is `UNANSWERED` if there is no answer."""
        if self.silent:
            return subprocess.CompletedProcess(command, UNANSWERED, stdout="", stderr="")
        waits_s = (_PROMPT_S, min(self._patience_s, max(0.0, self._until - time.monotonic() - _PROMPT_S)))
        return run(*command, waits_s=waits_s, is_worth_waiting=self._answers, cluster=cluster)

    def _answers(self) -> bool:
        self.silent = not _ping(within_s=_PING_S)
        return not self.silent


def printed(*command: str, patience_s: float = _PATIENCE_S) -> str | None:
    """The output of a command that only reads; None if the command is missing, fails or does not answer."""
    answer = Inquiry(patience_s=patience_s).ask(*command)
    return answer.stdout if answer.returncode == 0 else None


def is_installed() -> bool:
    return shutil.which("sbatch") is not None


def answers() -> bool | None:
    """Whether Slurm's controller answers; None if none is configured. It is asked at most once a minute."""
    return _answers(which_slurm())


@lru_cache(maxsize=1)
def _answers(which: WhichSlurm) -> bool | None:
    return _ping(within_s=_FIRST_PING_S)


def _ping(*, within_s: float) -> bool | None:
    answer = run("scontrol", "ping", waits_s=(within_s,))
    if answer.returncode == 0 and _UP.search(answer.stdout):
        return True
    is_named = " is DOWN" in answer.stdout  # so there is one, whatever its warnings say of slurm.conf
    is_absent = answer.returncode == MISSING or _UNCONFIGURED.search(answer.stderr) is not None
    return None if is_absent and not is_named else False


def which_slurm(environment: Mapping[str, str] = os.environ) -> WhichSlurm:
    """The Slurm that commands ask now. A cached function with this argument keeps its answer for a minute."""
    minute = int((time.monotonic() - _BEGAN_S) / _KEPT_S)
    return minute, tuple(environment.get(name) for name in ("PATH", *sorted(KEPT)))


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
