"""How many runs a proof needs, how long one takes, and how long the rest will take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import TYPE_CHECKING

from hpc_parallel.record.metrics_file import duration, figure

if TYPE_CHECKING:
    from hpc_parallel.proof.cases import Case


class Pace:
    """Counts and times the runs: one for each row that can run, and the one-device runs that rows share."""

    def __init__(self, cases: Sequence[Case], *, clock: Callable[[], float] = time.monotonic) -> None:
        self.rows = sum(case.run is not None for case in cases)
        self.left_out = len(cases) - self.rows
        self.alone = len({case.alone.folder.path for case in cases if case.alone is not None})
        self._clock = clock
        self._times_s: list[float] = []

    @contextmanager
    def run(self) -> Iterator[None]:
        """Time one run."""
        began_s = self._clock()
        yield
        self._times_s.append(self._clock() - began_s)

    def plan(self) -> str:
        """The text that tells the user which runs will start."""
        plan = (
            f"{self.rows} row{'s' * (self.rows != 1)} to run, {self.alone} more on one device to compare with"
        )
        return plan + (f"; {self.left_out} can't apply and are left out" if self.left_out else "")

    def figures(self) -> list[str]:
        """The estimated time left, then the seconds of a run, which a narrow terminal leaves out first.

        The list is empty until the first run has ended.
        """
        if not self._times_s:
            return []
        usual_s = fmean(self._times_s)
        left = max(0, self.rows + self.alone - len(self._times_s))
        return [f"about {duration(left * usual_s)} left", f"{figure(usual_s, digits=2)} s a run"]

    def total(self) -> str:
        """How long all runs took."""
        runs = len(self._times_s)
        rate = f" ({figure(fmean(self._times_s), digits=2)} s a run)" if runs else ""
        return f"{runs} run{'s' * (runs != 1)} in {duration(sum(self._times_s))}{rate}"
