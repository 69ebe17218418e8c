"""How the commands that look after runs speak: tables for people, JSON for scripts, problems on stderr.

Texts come from files that anyone may have written. What leaves for a terminal goes through `say`, `warn` or
`cell`, which show control characters as escapes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from hpc_parallel.config.problems import ConfigError, printable
from hpc_parallel.record.safe_read import DamagedError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

DONE, FAILED, WRONG_USAGE, REFUSED = range(4)
_UNBOUND_COLUMNS = 1000  # of a file or a pipe: every run keeps to a line


def guarded(work: Callable[[], int]) -> int:
    """The exit code of a command; every problem is printed, and a closed pipe is no error."""
    try:
        code = work()
        sys.stdout.flush()
        return code
    except ConfigError as error:
        warn(*map(str, error.problems))
        return WRONG_USAGE
    except DamagedError as error:
        warn(f"{error}.")
        return WRONG_USAGE
    except KeyboardInterrupt:
        return FAILED
    except BrokenPipeError:  # `| head`; Python must not try to flush at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE


def console() -> Console:
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=_UNBOUND_COLUMNS)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False, default=str))


def say(*lines: str) -> None:
    """However wide the screen, and without markup: paths hold brackets."""
    _print(lines, sys.stdout)


def warn(*lines: str) -> None:
    """The same on stderr."""
    _print(lines, sys.stderr)


def _print(lines: Sequence[str], stream: TextIO) -> None:
    if lines:
        print("\n".join(printable(line, keep="\t") for line in lines), file=stream)


def cell(text: str, style: str = "") -> Text:
    """A text in a table; only its line ends are kept."""
    from rich.text import Text

    return Text(printable(text, keep="\n"), style)
