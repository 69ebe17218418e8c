"""Reads the figures of a script into `metrics.jsonl`, in the parent of rank 0.

They come from the lines that rank 0 prints (`script.metrics`), from `job_context.log`, and from the event
files that it writes for TensorBoard. One process writes the file, so a restart can drop the steps that it
repeats.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from hpc_parallel.failure.event_files import EventFiles
from hpc_parallel.job_context import LOGGED
from hpc_parallel.record.attempts import keep_metrics
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import DamagedError, open_regular, parse_line, size_of
from hpc_parallel.record.safe_write import append_line
from hpc_parallel.record.values import finite, integer, number

Figures = dict[str, Any]
_MOST_BYTES = 2**20  # in one read; a longer line is cut


class MetricsWriter:
    """Call it from time to time while the script runs, and once after its end."""

    def __init__(self, folder: RunFolder, *, pattern: str | None) -> None:
        """pattern: `script.metrics`. What an earlier start has written is not read again."""
        self._folder = folder
        logged = folder.path / LOGGED
        self._logs = [_Log(logged, _logged_figures)]
        if pattern is not None:
            self._logs.append(_Log(folder.log(0, "out"), partial(figures_of, pattern=re.compile(pattern))))
        self._events = EventFiles(folder.path)
        self._is_first = True

    def __call__(self, is_last: bool) -> None:
        figures = [line for log in self._logs for line in log.read(is_last)]
        for line in [*figures, *self._events.read(is_last)]:
            if self._is_first and line["step"] > 0:  # a restart repeats steps; hyperparameters have step 0
                keep_metrics(self._folder, until=line["step"] - 1)
                self._is_first = False
            append_line(self._folder.metrics, line)


class _Log:
    """The figures in the lines of a growing file."""

    def __init__(self, path: Path, parse: Callable[[str], Figures | None]) -> None:
        self._path, self._parse, self._offset = path, parse, size_of(path)

    def read(self, is_last: bool) -> list[Figures]:
        parsed: list[Figures | None] = []
        with suppress(OSError, DamagedError), open_regular(self._path) as file:
            file.seek(self._offset)
            while added := file.read(_MOST_BYTES):
                cut = added.rfind(b"\n") + 1 or (len(added) if is_last or len(added) == _MOST_BYTES else 0)
                parsed += map(self._parse, added[:cut].decode(errors="replace").splitlines())
                self._offset += cut
                file.seek(self._offset)
                if not cut:
                    break
        return [figures for figures in parsed if figures is not None]


def figures_of(line: str, pattern: re.Pattern[str]) -> Figures | None:
    """The figures in one line of output; None if it has no step. A figure that is not finite is null."""
    if (match := pattern.search(line)) is None:
        return None
    try:
        values = {key: finite(float(text)) for key, text in match.groupdict().items() if text is not None}
        step = values.pop("step", None)
    except ValueError:  # a group matched a text that is not a number
        return None
    return None if step is None else {"step": int(step), **values, "time": datetime.now(UTC).isoformat()}


def _logged_figures(line: str) -> Figures | None:
    """The figures of one call of `job_context.log`."""
    values = parse_line(line.encode()) or {}
    if integer(values.get("step")) is None:
        return None
    return {
        key: value
        for key, value in values.items()
        if key == "time" or value is None or number(value) is not None
    }
