"""Prints the table of a proof. Each line appears when its run ends; the last may take minutes.

`Pace` says how many runs a proof needs, how long one takes, and how long the rest will take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rich import table as rich_table
from rich.padding import Padding
from rich.status import Status
from rich.text import Text

from hpc_parallel.proof.compare import Tolerance, Verdict
from hpc_parallel.record.metrics_file import duration, figure, fitting
from hpc_parallel.terminal import stdout_console

if TYPE_CHECKING:
    from hpc_parallel.proof.cases import Case

WIDTHS = (16, 6, None, 9, 9, 9, 8)  # of strategy, data, layout, the measures, verdict
# A terminal with fewer columns than WIDE shows only strategy, layout and verdict. parity.json has all values.
WIDE, NARROW = 80, (0, 2, 6)
SPINNER_COLUMNS = 2
WIDTH = 100  # if stdout is a file or a pipe
MEASURES = ("losses", "gradients", "weights")
STYLES = {"equal": "green", "MISS": "bold red", "failed": "bold red", "left out": "yellow"}


class Table:
    """Prints to stdout in its full width; on a terminal, a status line below shows the current run."""

    def __init__(self, tolerance: Tolerance, *, precision: str) -> None:
        self._console = stdout_console(columns=WIDTH)
        self._console.file = self._console.file  # keeps this stdout while a run redirects sys.stdout
        self._tolerance = tolerance
        self._precision = precision

    def begin(self, plan: str) -> None:
        """Print which runs will start, then the head of the table."""
        self._say(f"{plan}\n")
        self._say(
            "Largest relative differences from one device. losses: of all steps. gradients: of any tensor at "
            "step 1. weights: of any tensor after the last step. Tensors are compared by their norms.\n"
        )
        self._line("strategy", "data", "layout", *MEASURES, "verdict", style="bold")
        bounds = (f"<= {getattr(self._tolerance, measure):g}" for measure in MEASURES)
        if self._is_wide:
            self._line("", "", "", *bounds, "", style="dim")

    def working(self, parts: Sequence[str]) -> Status:
        """Show on a terminal which row runs, how fast, and what is left."""
        return self._console.status(Text(fitting(parts, columns=self._console.width - SPINNER_COLUMNS)))

    def add(self, case: Case, verdict: Verdict) -> None:
        differences = (str(verdict.differences.get(measure, "")) for measure in MEASURES)
        style = STYLES[verdict.word]
        self._line(case.row.strategy, case.net, case.layout, *differences, verdict.word, last_style=style)
        for reason in verdict.reasons:
            self._console.print(Padding(Text(reason, style=style), (0, 0, 0, 4)))

    def end(self, counts: Mapping[str, int], notes: Sequence[str], *, folder: Path) -> None:
        for note in notes:
            self._say(f"\n{note}")
        self._say(f"\nWhy these bounds: {self._tolerance.why}")
        total = sum(counts.values())
        verdicts = ", ".join(f"{count} {word}" for word, count in counts.items())
        self._say(f"{total} row{'s' * (total > 1)} in {self._precision}: {verdicts}.")
        if counts.get("MISS") and self._precision == "float32":
            self._say(
                "A miss is a mistake, or rounding at the edge of a ReLU. Try precision=float64 to decide."
            )
        self._console.print(f"results: {folder}", markup=False, soft_wrap=True)

    @property
    def _is_wide(self) -> bool:
        return self._console.width >= WIDE

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def _line(self, *cells: str, style: str = "", last_style: str = "") -> None:
        """Print a table of one line; all lines have the same columns."""
        line = rich_table.Table(
            box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0), expand=True
        )
        columns = range(len(WIDTHS)) if self._is_wide else NARROW
        for number in columns:
            width = WIDTHS[number]
            line.add_column(width=width, ratio=None if width else 1, overflow="fold")
        texts = [Text(cells[number]) for number in columns]
        texts[-1].stylize(last_style)
        line.add_row(*texts, style=style)
        self._console.print(line)


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
