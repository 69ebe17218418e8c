"""Starts Slurm's commands. No other folder starts one (checked by `tests/unit/test_slurm_client.py`)."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from hpc_parallel.slurm.environment import CLUSTERS, command_environment

UNANSWERED = 124  # as timeout(1) returns
MISSING = 127  # as a shell returns
CONTROL_S = 60.0  # the longest wait for a command that changes a job
_PROMPT_S = 1.0  # after this time we ping the controller
_PING_S = 2.0
_FIRST_PING_S = 5.0
_PATIENCE_S = 20.0  # further wait for a busy controller that answers the ping
_KEPT_S = 60  # how long an answer is kept, for the runs of a sweep
_BEGAN_S = time.monotonic()


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
    three seconds once, and all later queries return at once.
    """

    def __init__(self, *, patience_s: float = _PATIENCE_S) -> None:
        self.silent = False
        self._patience_s = patience_s

    def ask(self, *command: str, cluster: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command that only reads. The return code is `UNANSWERED` if there is no answer."""
        if self.silent:
            return subprocess.CompletedProcess(command, UNANSWERED, stdout="", stderr="")
        waits_s = (_PROMPT_S, self._patience_s)
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


def answers() -> bool:
    """Whether Slurm's controller answers. It is asked at most once a minute."""
    return _answers(os.environ.get("PATH"), os.environ.get("SLURM_CONF"), minute())


@lru_cache(maxsize=1)
def _answers(path: str | None, slurm_conf: str | None, minute: int) -> bool:
    return _ping(within_s=_FIRST_PING_S)


def _ping(*, within_s: float) -> bool:
    answer = run("scontrol", "ping", waits_s=(within_s,))
    return answer.returncode == 0 and "UP" in answer.stdout


def minute() -> int:
    """A number that changes once a minute. A cached function with this argument keeps results that long."""
    return int((time.monotonic() - _BEGAN_S) / _KEPT_S)
