"""Read `metrics.jsonl`, also while a run writes it, and format one of its lines for people."""

from __future__ import annotations

import os
import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from hpc_parallel.problems import printable
from hpc_parallel.record.safe_read import LINES_BYTES, MAX_LINES, MIB, open_regular, parse_line, read_tail
from hpc_parallel.record.typed import build, first
from hpc_parallel.record.values import VALIDATION, integer, number, text

_TAIL_BYTES = 2048  # holds a line or two
SEPARATOR = "  "  # between the parts of a described line
MOST_CELLS = 16  # of a measured row
_MAX_TAIL_BYTES = MIB  # the last whole line is searched in this many bytes


@dataclass(frozen=True)
class MetricsLine:
    """One line, which anybody may have written. Values that are missing or have another type are None.

    Models, callbacks and scripts add their own keys. `values` has all keys.
    """

    values: Mapping[str, Any]
    step: int
    steps: int | None = None  # the number of rows of a measuring task
    time: str | None = None  # ISO 8601, UTC
    loss: float | None = None
    validation_loss: float | None = None
    step_time_s: float | None = None
    timed_steps: Any = 1  # without the steps that a profiler made slower
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    skipped_step: int | None = None  # the last one since the line before
    loss_scale_before: float | None = None  # of the skipped step, in float16
    loss_scale: float | None = None  # after it
    batch_size: float | None = None
    latency_s: float | None = None
    latency_p99_s: float | None = None
    measured: Annotated[tuple[Any, ...], first(MOST_CELLS)] = ()  # the cells of a row for the screen
    time_left_s: float | None = None  # the longest time that a measuring task will still take

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> MetricsLine:
        """The line with these values. They must have a step, as all lines that this module reads do."""
        line = build(cls, {**values, "values": values})
        assert line is not None
        return line

    @property
    def cells(self) -> list[str]:
        """The cells of a measured row; empty if the line has none, or if they are not a list."""
        return list(map(printable, self.measured))

    @property
    def of_total(self) -> str:
        """` 7/183`: the number of a measured row and of all rows, in the same width for all."""
        total = str(self.steps or "?")
        return f"{self.step:>{len(total)}}/{total}"

    @property
    def is_lasting(self) -> bool:
        """Whether a line stays on a terminal: a result, and not only the progress of a training."""
        lasting = {"validation_loss", "batch_size", "skipped_step"}
        return not lasting.isdisjoint(self.values) or bool(self.measured)

    @property
    def time_left(self) -> str | None:
        return None if self.time_left_s is None else f"at most {duration(self.time_left_s)} left"


def own_metrics_of(values: Mapping[str, Any]) -> dict[str, float]:
    """The model's own metrics in a line of metrics or in the summary, without the prefix."""
    return {
        key.removeprefix(VALIDATION): value
        for key, value in values.items()
        if key.startswith(VALIDATION) and key != "validation_loss" and number(value) is not None
    }


class MetricsReader:
    """Reads the lines that a running run has added since the last read. The file may have any length.

    A restart replaces the file by one without the steps that are trained again. The reader still returns each
    line only once: it identifies a line by its step and its time.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset_bytes = 0
        self._returned: set[int] = set()  # hashes of (step, time): a long run has a million lines

    def read(self) -> list[dict[str, Any]]:
        """The new whole lines; a line without its line end is left for the next read. Raises DamagedError."""
        try:
            with open_regular(self._path) as file:  # opened again: an open file on NFS may show old content
                if file.seek(0, os.SEEK_END) < self._offset_bytes:
                    self._offset_bytes = 0  # another attempt has replaced the file
                file.seek(self._offset_bytes)
                lines = []
                for content in file:
                    if not content.endswith(b"\n"):
                        break  # its rest may arrive now, and would look like a line
                    self._offset_bytes += len(content)
                    lines.append(_parse(content))
        except FileNotFoundError:
            return []
        new = [
            line for line in lines if line and ("time" not in line or _identity(line) not in self._returned)
        ]
        self._returned.update(map(_identity, new))
        return new


def _identity(line: dict[str, Any]) -> int:
    return hash((line["step"], text(line.get("time"))))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines in the last LINES_BYTES of a file that anyone may have written.

    Raises DamagedError.
    """
    try:
        content = read_tail(path, limit_bytes=LINES_BYTES)
    except FileNotFoundError:
        return []
    lines = content[: content.rfind(b"\n") + 1].splitlines()[-MAX_LINES:]
    values = [_parse(line) for line in lines[len(content) == LINES_BYTES :]]  # the first may be truncated
    return [line for line in values if line is not None]


def last_line(path: Path) -> dict[str, Any] | None:
    """The newest whole line, or None. Only the end of the file is read.

    Raises FileNotFoundError and DamagedError.
    """
    with open_regular(path) as file:
        end = file.seek(0, os.SEEK_END)
        size = 0
        while size < min(end, _MAX_TAIL_BYTES):
            size = min(end, 2 * size or _TAIL_BYTES)
            file.seek(end - size)
            tail = file.read(size)
            for line in reversed(tail[: tail.rfind(b"\n") + 1].splitlines()[size < end :]):
                if (values := _parse(line)) is not None:
                    return values
    return None


def described(line: MetricsLine, *, steps: int) -> list[str]:
    """The parts of a line as text, the most important first: `step 120/600`, `loss 2.413`, `512 samples/s`.

    The parts are the cells of the row if a measuring task wrote the line.
    """
    if line.cells:
        return [line.of_total, *line.cells]
    parts = [f"step {line.step}/{steps}"]
    if "loss" in line.values:
        parts.append(f"loss {loss_figure(line.loss)}")
    if line.skipped_step is not None:
        parts.append(f"skipped step {line.skipped_step}, which is not finite")
    if line.loss_scale is not None and line.loss_scale_before is not None:
        parts.append(f"loss scale {figure(line.loss_scale_before)} -> {figure(line.loss_scale)}")
    if "validation_loss" in line.values:
        parts.append(f"validation loss {loss_figure(line.validation_loss)}")
    parts += [f"{printable(name)} {figure(value)}" for name, value in own_metrics_of(line.values).items()]
    if line.latency_s is not None and line.batch_size is not None:
        parts += [f"batch size {line.batch_size}", f"latency {milliseconds(line.latency_s)}"]
    if line.samples_per_s is not None:
        parts.append(f"{per_second(line.samples_per_s)} samples/s")
    elif line.tokens_per_s is not None:
        parts.append(f"{per_second(line.tokens_per_s)} tokens/s")
    return parts


def fitting(parts: Sequence[str], *, columns: int) -> str:
    """Join as many of the first parts as fit into `columns` characters. The first part is always shown."""
    line = "".join(parts[:1])
    for part in parts[1:]:
        if len(line) + len(SEPARATOR) + len(part.rstrip()) > columns:
            break
        line += SEPARATOR + part
    return line.rstrip()


def aligned(cells: Sequence[Sequence[str]], *, right: Container[str] | None = None) -> list[str]:
    """The lines of a table. right: the headings of the columns that are aligned to the right; None: all."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    pads = [str.rjust if right is None or heading in right else str.ljust for heading in cells[0]]
    rows = ([pad(text, width) for pad, text, width in zip(pads, row, widths, strict=True)] for row in cells)
    return ["  ".join(row).rstrip() for row in rows]


def duration(seconds: float) -> str:
    """The two largest units: `42 s`, `3 min 20 s`, `5 h 7 min`, `2 d 3 h`."""
    rounded = round(seconds)
    minutes, hours, days = rounded // 60, rounded // 3600, rounded // 86400
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {rounded % 60} s" if minutes else f"{rounded} s"


def figure(value: float, *, digits: int = 4) -> str:
    """Format with `digits` significant digits; without exponent from 0.0001 to 1e15: 1520, not 1.52e+03."""
    if 10 ** (digits - 1) <= abs(value) < 1e15:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


def loss_figure(loss: float | None) -> str:
    return "not finite" if loss is None else figure(loss)


def per_second(rate: float) -> str:
    return figure(rate, digits=3)


def milliseconds(seconds: float) -> str:
    return f"{per_second(seconds * 1e3)} ms"


def _parse(line: bytes) -> dict[str, Any] | None:
    """The metrics in one line; None if it is not a metrics line (a torn write after a crash, for example)."""
    values = parse_line(line)
    if values is None or integer(values.get("step")) is None:
        return None
    return {sys.intern(key): value for key, value in values.items()}  # json makes each line's keys anew


def size(count: float) -> str:
    """Format `count` bytes with a unit that is easy to read: 300 MiB is shown as 0.3 GiB."""
    units = (("TiB", 2**40, 2**40), ("GiB", 2**30, 2**30 // 10), ("MiB", 2**20, 2**20), ("KiB", 2**10, 2**10))
    for unit, scale, least in units:
        if count >= least:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"
