"""A signal sets a flag, and the ranks agree on the step after which they stop.

Slurm sends SIGUSR2 before the time limit, and SIGTERM at preemption or scancel. A terminal sends SIGINT.

A rank that receives a signal writes the signal to the store of all ranks. Rank 0 reads the store and
broadcasts what it finds. gloo's broadcast is a binomial tree of log2 N hops (gloo/broadcast.cc). gloo's
all-reduce is a ring of 2 (N - 1) hops, and its reduce is a ring too.
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist

from hpc_parallel.slurm.jobs import job_fields, job_of, seconds_since_1970
from hpc_parallel.torch_internals import default_store

STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
PERIOD_S = 2.0  # between two exchanges of the flags
REPEAT_S = 2.0  # one Ctrl-C may arrive several times within this time
MARGIN_S = 30.0  # to notice, to end all ranks, and to requeue
SAVES = 2  # one may be in progress, and the next one waits for it
_END = "SLURM_JOB_END_TIME"  # seconds since 1970; Slurm 23.02 and newer set it

_early: list[int] = []  # signals received before training


def remember(number: int, frame: FrameType | None) -> None:
    """The signal handler until training begins. A remembered signal stops the run after its first step."""
    _early.append(number)


def show_place_at_sigterm() -> None:
    """Let SIGTERM write the main thread's stack to the log of errors, and then do what it did.

    The clean-up after another rank's failure sends it. In C code no handler of Python would run.
    """
    _python_handler()
    faulthandler.register(signal.SIGTERM, 2, all_threads=False, chain=True)


def forget_handlers() -> None:
    """Let SIGTERM end a process that code of the user forks, such as a worker of `multiprocessing.Pool`."""
    if getattr(_python_handler(), "__func__", None) is StopFlag._handle:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _python_handler() -> Any:
    """The handler of SIGTERM without faulthandler, whose `unregister` sets an earlier one."""
    handler = signal.getsignal(signal.SIGTERM)
    faulthandler.unregister(signal.SIGTERM)
    signal.signal(signal.SIGTERM, handler)
    return handler


@dataclass
class TimeLimit:
    """The end of this job by Slurm's clock, and the time that the run needs before it.

    Slurm sends its signal `launcher.grace_s` before the limit. `grace_s` was chosen before any save was
    measured. A save of a large model takes longer, so rank 0 compares the time left with that of saves.

    end_s: the end of the job, as known when it began. current_end_s: asks Slurm, because an administrator may
    have moved the limit; None if Slurm does not answer. save_s: how long the newest save took; None before
    the first.
    """

    end_s: float
    current_end_s: Callable[[], float | None]
    save_s: Callable[[], float | None]
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._most_s = (self.end_s - self.clock()) / 2  # a short job keeps half of its time

    def is_near(self, *, step_s: float) -> bool:
        """Whether the run must save now; `step_s`: the time of a step, which delays the next check."""
        save_s = self.save_s()
        if save_s is None:
            return False
        needed_s = min(SAVES * (save_s + step_s) + MARGIN_S, self._most_s)
        if self.end_s - self.clock() > needed_s:
            return False
        self.end_s = self.current_end_s() or self.end_s
        left_s = self.end_s - self.clock()
        if left_s > needed_s:
            return False
        print(f"saving {left_s:.0f} s before the time limit, because a save takes {save_s:.0f} s", flush=True)
        return True


def time_limit_of(environment: Mapping[str, str], *, save_s: Callable[[], float | None]) -> TimeLimit | None:
    """The limit of the job that `environment` describes; None outside of a job or if its end is unknown."""
    job = job_of(environment)
    if job is None:
        return None

    def current_end_s() -> float | None:
        return seconds_since_1970((job_fields(job) or {}).get("EndTime"))

    text = environment.get(_END, "")
    end_s = float(text) if text.isdecimal() else current_end_s()
    return None if not end_s else TimeLimit(end_s=end_s, current_end_s=current_end_s, save_s=save_s)


class StopFlag:
    """The stop flag of this rank, and the agreement of all ranks. Inside the context, signals set the flag.

    About every `period_s` seconds rank 0 broadcasts two numbers. All ranks calculate the same number for the
    step at which it does. Steps between have no collective, and are at most twice as many as before: the
    first step after a validation may have its data already, and says little about the time of the next ones.
    A second SIGINT ends the process at once. A further SIGTERM does not: Slurm repeats it at the end of a
    preemption's grace time, and sends it at the time limit after SIGUSR2. It sends SIGKILL after KillWait,
    so a save may use that time.
    """

    def __init__(self, *, step: int, time_limit: TimeLimit | None = None, period_s: float = PERIOD_S) -> None:
        """`step`: the last step done.

        `time_limit`: the limit of the job, given to one rank only. When it is near, the ranks stop as after
        Slurm's SIGUSR2. `period_s`: the time between two collectives; 0 for a collective after each step, if
        steps take very different times.
        """
        self._time_limit = time_limit
        self._period_s = period_s
        self._store = dist.PrefixStore("stop", default_store())
        self._flag = self._published = 0  # 1 + index in STOP_SIGNALS
        self._interrupted_s = math.inf  # when the first SIGINT came
        self._agreed_step, self._agreed_s = step, time.monotonic()
        self._next_step = step + 1

    def __enter__(self) -> Self:
        while _early:
            self._handle(_early.pop(), None)
        self._handlers = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *failure: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def after(self, step: int) -> signal.Signals | None:
        """Returns the signal if all ranks stop after this step, else None."""
        self._publish()
        if step < self._next_step:
            return None
        now = time.monotonic()
        steps = max(1, step - self._agreed_step)
        step_s = (now - self._agreed_s) / steps
        if not self._flag and self._time_limit is not None and self._time_limit.is_near(step_s=step_s):
            self._flag = 1 + STOP_SIGNALS.index(signal.SIGUSR2)
            self._publish()
        numbers = np.array([self._requested() if dist.get_rank() == 0 else 0, step_s])
        dist.broadcast(torch.from_numpy(numbers), src=0)
        flag, step_s = numbers
        self._agreed_step, self._agreed_s = step, now
        self._next_step = step + max(1, min(2 * steps, int(self._period_s / max(step_s, 1e-6))))
        return STOP_SIGNALS[int(flag) - 1] if flag else None

    def _publish(self) -> None:
        """Write this rank's flag to the store, once. A handler can't: it may interrupt a store call."""
        if (flag := self._flag) > self._published:
            self._store.add(str(flag), 1)
            self._published = flag

    def _requested(self) -> int:
        """The largest flag that a rank has published; 0 if no rank has published one."""
        flags = range(len(STOP_SIGNALS), 0, -1)
        return next((flag for flag in flags if self._store.add(str(flag), 0)), 0)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            if now - self._interrupted_s > REPEAT_S:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            self._interrupted_s = min(self._interrupted_s, now)
        self._flag = max(self._flag, STOP_SIGNALS.index(signal.Signals(number)) + 1)
