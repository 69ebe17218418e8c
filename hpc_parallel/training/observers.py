"""What observes a training and does not change it: metrics, profilers, the watchdog, callbacks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from hpc_parallel.profiling.measurement import Measurement
from hpc_parallel.profiling.rank_times import RankTimes
from hpc_parallel.profiling.recording import Recording
from hpc_parallel.strategies.ranges import marked
from hpc_parallel.supervise.error_place import mark_step
from hpc_parallel.supervise.progress import Progress
from hpc_parallel.training.callbacks import Callbacks
from hpc_parallel.training.metrics import Metrics
from hpc_parallel.training.writers import Writer


@dataclass(frozen=True)
class Observers:
    """The observers of this rank. `around` stands around the parts of each step."""

    metrics: Metrics
    measurement: Measurement
    rank_times: RankTimes
    recording: Recording
    writers: Sequence[Writer]  # empty on every rank except rank 0
    progress: Progress  # for a watchdog
    callbacks: Callbacks  # of the user's; they may end the training

    @contextmanager
    def around(self, phase: str, step: int) -> Iterator[None]:
        """Observe a phase of the 1-based `step`: "data", the fetch of its batch, and then "step"."""
        self.progress.mark(phase, step)
        number = 1 + step - self.progress.first_step  # since this start
        if phase == "data":
            self.recording.begin(number)
            started = time.perf_counter()
            with self.measurement.loading(number), self.rank_times.loading(number), marked("data"):
                yield
            self.metrics.note_data(time.perf_counter() - started)
            return
        measured, timed = self.measurement.watch(number), self.rank_times.watch(number)
        try:
            with measured, timed, marked(f"step {step}"):
                yield
        except Exception as error:
            mark_step(error, step)
            raise
        self.recording.end(number)
