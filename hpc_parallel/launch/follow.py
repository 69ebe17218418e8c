"""Follows a run from outside: shows `metrics.jsonl` as a progress bar or plain lines, then the outcome."""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from hpc_parallel.problems import printable
from hpc_parallel.record.log_noise import is_noise
from hpc_parallel.record.metrics_file import MetricsReader, describe
from hpc_parallel.record.names import from_here
from hpc_parallel.record.results import results
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import read_json, read_tail
from hpc_parallel.record.values import integer, number, text
from hpc_parallel.supervise.failure import CONFIGURATION

_TAIL_LINES = 12


class Follower:
    """Shows the progress of a run step by step, and its outcome.

    The launcher calls `poll` repeatedly while the run runs, and `finish` after it has ended.
    """

    def __init__(self, folder: RunFolder, *, steps: int, console: Console | None = None) -> None:
        self._folder = folder
        self._steps = steps
        self._console = console or Console()
        self._reader = MetricsReader(folder.metrics)
        self._last: dict[str, Any] = {}
        self._validation: list[float] = []
        self._note = ""
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def note(self, text: str) -> None:
        """Show what the run waits for (a place in the queue, its start); repeats are not shown."""
        if text == self._note:
            return
        self._note = text
        if self._console.is_terminal:
            self._show_bar(text)
        else:
            self._say(text)

    def poll(self) -> None:
        """Show the steps logged since the last call."""
        for metrics in self._reader.read():
            self._last = metrics
            if (loss := number(metrics.get("validation_loss"))) is not None:
                self._validation.append(loss)
            if not self._console.is_terminal:
                self._say(describe(metrics, steps=self._steps))
            else:
                self._show_bar(describe(metrics, steps=self._steps), validation=self._validation[-1:])

    def finish(self) -> int:
        """Show the outcome; after a failure the cause comes last. Returns the exit code: 0 if completed."""
        self.poll()
        if self._bar is not None:
            self._bar.stop()
        summary = {"outcome": "failed", **(read_json(self._folder.summary) or {})}
        failure = read_json(self._folder.failure) if summary["outcome"] == "failed" else None
        if failure is not None:
            for line in self._error_lines(failure):
                self._say(line)
        for line in results(self._folder, summary):
            self._say(line)
        self._say(self._outcome(summary))
        self._say(f"results: {from_here(self._folder.path)}")
        if self._last or self._drawn():
            self._say(f"plots: {self._plots()}")
        if failure is not None:
            self._say(text(failure.get("line")) or "")
        elif summary["outcome"] != "completed" and (stopped := read_json(self._folder.stopped)) is not None:
            self._say(text(stopped.get("line")) or "")
        return int(summary["outcome"] != "completed")

    def _outcome(self, summary: dict[str, Any]) -> str:
        step = self._last.get("step", 0)
        parts = [str(summary["outcome"]) + (f": step {step} of {self._steps}" if self._steps else "")]
        if (loss := number(self._last.get("loss"))) is not None:
            parts.append(f"loss {loss:.4g}")
        if self._validation:
            first, last = self._validation[0], self._validation[-1]
            parts.append(f"validation loss {first:.4g}" + (f" -> {last:.4g}" if last != first else ""))
        return ", ".join(parts)

    def _plots(self) -> str:
        """The plots that the run has drawn, and the command that shows all."""
        report = shlex.join(["python", "-m", "hpc_parallel", "report", from_here(self._folder.path)])
        drawn = self._drawn()
        shown = f"{from_here(drawn[0] if len(drawn) == 1 else self._folder.plots)}; all: " if drawn else ""
        return shown + report

    def _drawn(self) -> list[Path]:
        return sorted(self._folder.plots.glob("*.png"))

    def _error_lines(self, failure: dict[str, Any]) -> list[str]:
        """The end of the traceback (or of the job's log), else the end of the failing rank's `.err` log.

        A configuration that can't run needs no more than the one line at the end.
        """
        if failure.get("kind") == CONFIGURATION:
            return []
        lines = failure.get("traceback")
        rank = integer(failure.get("rank"))
        if (
            not lines and rank is not None and failure.get("signal") != "SIGKILL"
        ):  # a killed process writes nothing
            with suppress(FileNotFoundError):
                log = read_tail(self._folder.log(rank, "err"))
                lines = [line for line in log.decode(errors="replace").splitlines() if not is_noise(line)]
        return [str(line) for line in lines[-_TAIL_LINES:]] if isinstance(lines, list) else []

    def _show_bar(self, text: str, *, validation: list[float] | None = None) -> None:
        if self._bar is None:
            self._bar = Progress(
                BarColumn(),
                TextColumn("{task.description}", markup=False),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("", total=self._steps)
            self._bar.start()
        assert self._task is not None
        if validation and self._last.get("validation_loss") is None:
            text += f"  validation loss {validation[-1]:.4g}"  # keep the last measured one in view
        self._bar.update(self._task, description=text, completed=self._last.get("step", 0), refresh=True)

    def _say(self, line: str) -> None:
        """Print a line without markup or wrapping: paths and tracebacks contain brackets and are long."""
        self._console.print(printable(line, keep="\t"), markup=False, highlight=False, soft_wrap=True)
