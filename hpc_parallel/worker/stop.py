"""A signal sets a flag; the ranks agree at a step boundary on where to stop.

Slurm sends SIGUSR2 before the time limit, SIGTERM at a preemption or an scancel; a terminal sends SIGINT.
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

ASKING = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
PERIOD_S = 2.0  # between two looks at what the others were asked
SAME_S = 2.0  # Slurm says the same thing to a process several times


_early: list[int] = []  # signals that came before there was anything to stop


def remember(number: int, frame: FrameType | None) -> None:
    """A handler for the time before training: the run stops after its first step then."""
    _early.append(number)


class Stop:
    """This rank's flag, and the agreement of all; a context in which those signals end nothing at once.

    The flags are gathered about every two seconds, at steps that all ranks compute alike: a collective of two
    numbers then, and none in the steps between. A second signal ends the process at once.
    """

    def __init__(self, *, group: dist.ProcessGroup, step: int) -> None:
        """`group`: of all ranks, for tensors on the CPU; `step`: the last one done."""
        self._group = group
        self._asked = 0
        self._asked_s = math.nan
        self._looked, self._looked_s = step, time.monotonic()
        self._next = step + 1

    def __enter__(self) -> Self:
        while _early:
            self._ask(_early.pop(), None)
        self._before = {number: signal.signal(number, self._ask) for number in ASKING}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def after(self, step: int) -> signal.Signals | None:
        """The signal by which all ranks stop after this step; None where they go on."""
        if step < self._next:
            return None
        now = time.monotonic()
        most = np.array([self._asked, (now - self._looked_s) / max(1, step - self._looked)])
        dist.all_reduce(torch.from_numpy(most), op=dist.ReduceOp.MAX, group=self._group)
        asked, step_s = most
        self._looked, self._looked_s = step, now
        self._next = step + max(1, int(PERIOD_S / max(step_s, 1e-6)))
        return ASKING[int(asked) - 1] if asked else None

    def _ask(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked and now - self._asked_s > SAME_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if not self._asked:
            self._asked_s = now
        self._asked = max(self._asked, ASKING.index(signal.Signals(number)) + 1)
