"""The objects that observe a training without changing it: metrics, profilers, the watchdog, callbacks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from hpc_parallel.failure import hang_report
from hpc_parallel.failure.error_place import mark, mark_step
from hpc_parallel.strategies.ranges import marked
from hpc_parallel.training.callbacks import Callbacks
from hpc_parallel.training.metrics import Metrics
from hpc_parallel.training.pruning import Pruning
from hpc_parallel.training.writers import Writer

_MOST_PHASES = 2000  # as many as torch's flight recorder has collectives (failure/flight_recorder.py)


@dataclass
class Progress:
    """The last mark of one rank: the training sets it, a watchdog in another thread reads it.

    A mark replaces one tuple by another, so a reader never sees a partial mark. It takes 0.4 us.
    """

    first_step: int = 1  # of this process: it may take longer because it compiles
    latest: tuple[float, str, int] = (0.0, "start", 0)  # time.monotonic(), phase, step
    # time.time_ns(), the clock of torch's flight recorder, and `step 3`, for example
    begun: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=_MOST_PHASES))

    def mark(self, phase: str, step: int) -> None:
        """Record that `phase` (one of `failure.hang_report.PHASES`) begins or has completed a part."""
        self.latest = (time.monotonic(), phase, step)
        name = f"{phase} {step}"
        if not self.begun or self.begun[-1][1] != name:  # a long wait is marked again and again
            self.begun.append((time.time_ns(), name))

    def locate(self, error: BaseException) -> None:
        """Mark an exception with the step, and with the phase if no inner place is known."""
        _, phase, step = self.latest
        if phase in hang_report.PLACES:
            mark(error, f"{hang_report.PLACES[phase]} {step}")
        if phase != "start":
            mark_step(error, step)


class Profiler(Protocol):
    """Looks closely at some steps, which are numbered from 1 in this process."""

    def loading(self, step: int) -> AbstractContextManager[None]:
        """Returns the context in which to fetch the batch of `step`."""
        ...

    def watch(self, step: int) -> AbstractContextManager[None]:
        """Returns the context in which to run `step`."""
        ...


@dataclass(frozen=True)
class Observers:
    """The observers of this rank. `around` wraps each part of a step."""

    metrics: Metrics
    profilers: Sequence[Profiler]  # those that are on, in the order in which they enter a step
    writers: Sequence[Writer]  # empty on every rank except rank 0
    progress: Progress  # for a watchdog
    callbacks: Callbacks  # the user's; they may end the training
    pruning: Pruning | None = None  # compares with the other runs of a sweep; it may end the training

    @contextmanager
    def around(self, phase: str, step: int) -> Iterator[None]:
        """Observe a phase of the 1-based `step`: "data", the fetch of its batch, and then "step"."""
        self.progress.mark(phase, step)
        number = 1 + step - self.progress.first_step
        if phase == "data":
            contexts = [profiler.loading(number) for profiler in self.profilers]
            started = time.perf_counter()
            with _inside(contexts), marked("data"):
                yield
            self.metrics.data_s.append(time.perf_counter() - started)
            return
        contexts = [profiler.watch(number) for profiler in self.profilers]
        with _inside(contexts), marked(f"step {step}"):
            yield


@contextmanager
def _inside(contexts: Sequence[AbstractContextManager[None]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
