"""How the commands that look after runs speak: tables for people, JSON for scripts, problems on stderr.

Texts come from files that anyone may have written. What leaves for a terminal goes through `say`, `warn` or
`cell`, which show control characters as escapes.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from hpc_parallel.problems import printable
from hpc_parallel.shell import complain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_UNBOUND_COLUMNS = 1000  # of a file or a pipe: every run keeps to a line


def console() -> Console:
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=_UNBOUND_COLUMNS)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False, default=str))


def say(*lines: str) -> None:
    """However wide the screen, and without markup: paths hold brackets."""
    for line in lines:
        print(printable(line, keep="\t"))


def warn(*lines: str) -> None:
    """The same on stderr."""
    complain(printable(line, keep="\t") for line in lines)


def cell(text: str, style: str = "") -> Text:
    """A text in a table; only its line ends are kept."""
    from rich.text import Text

    return Text(printable(text, keep="\n"), style)
