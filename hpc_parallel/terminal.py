"""Output of the commands that inspect runs: tables for people, JSON for scripts, problems on stderr.

Texts come from files that anyone may have written. All output to a terminal goes through `say`, `warn` or
`cell`, which escape control characters.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from hpc_parallel.problems import printable
from hpc_parallel.shell import complain, discard

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.text import Text

_UNBOUND_COLUMNS = 100_000  # for a file or a pipe, so that every run has one line
_BAR_FROM_COLUMNS = 60  # a narrower terminal gets no bar
_BAR_COLUMNS, _LEFT_COLUMNS = 24, 8  # widths of the bar and of the time left, each with a space


def stdout_console(*, columns: int = _UNBOUND_COLUMNS) -> Console:
    """A console on stdout, which has `columns` unless it is a terminal.

    Raises BrokenPipeError if nobody reads the output any more, where rich would end this process.
    """
    from rich.console import Console

    screen = Console(highlight=False)
    if not screen.is_terminal:
        screen.width = columns

    def stop() -> None:
        screen.quiet = True
        discard(sys.stdout)
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    screen.on_broken_pipe = stop  # type: ignore[method-assign]
    return screen


def progress_bars(console: Console, *, timed: bool = True) -> Progress:
    """Bars with a description and, if `timed`, the time left; on a narrow terminal without the bar itself."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        *([BarColumn(bar_width=_BAR_COLUMNS - 1)] if console.width >= _BAR_FROM_COLUMNS else []),
        TextColumn("{task.description}", markup=False),
        *([TimeRemainingColumn()] if timed else []),
        console=console,
        disable=not console.is_terminal,
    )


def room_beside_bar(console: Console, *, timed: bool = True) -> int:
    """The columns that the description of a bar may have."""
    bar = _BAR_COLUMNS if console.width >= _BAR_FROM_COLUMNS else 0
    return console.width - bar - (_LEFT_COLUMNS if timed else 0)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False, default=str))


def say(*lines: str) -> None:
    """Print lines without wrapping and without markup, because paths contain brackets."""
    for line in lines:
        print(printable(line, keep="\t"))


def warn(*lines: str) -> None:
    """Print lines as `say` does, but to stderr."""
    complain(printable(line, keep="\t") for line in lines)


def cell(text: str, style: str = "") -> Text:
    """A table cell with control characters escaped, except line ends."""
    from rich.text import Text

    return Text(printable(text, keep="\n"), style)
