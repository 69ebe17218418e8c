"""A signal sets a flag, and the ranks agree on the step after which they stop.

Slurm sends SIGUSR2 before the time limit, and SIGTERM at preemption or scancel. A terminal sends SIGINT.

A rank that receives a signal writes the signal to the store of all ranks. Rank 0 reads the store and
broadcasts what it finds. gloo's broadcast is a binomial tree of log2 N hops (gloo/broadcast.cc). gloo's
all-reduce is a ring of 2 (N - 1) hops, and its reduce is a ring too.
"""

from __future__ import annotations

import math
import os
import signal
import time
from types import FrameType, TracebackType
from typing import Self

import numpy as np
import torch
import torch.distributed as dist

from hpc_parallel.torch_internals import default_store
from hpc_parallel.worker.time_limit import TimeLimit

STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
PERIOD_S = 2.0  # between two exchanges of the flags
REPEAT_S = 2.0  # one Ctrl-C may arrive several times within this time


_early: list[int] = []  # signals received before training


def remember(number: int, frame: FrameType | None) -> None:
    """The signal handler until training begins. A remembered signal stops the run after its first step."""
    _early.append(number)


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
