"""How the commands that look after runs speak: tables for people, JSON for scripts, problems on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpc_parallel.config.problems import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

DONE, FAILED, WRONG_USAGE, REFUSED = range(4)
_UNBOUND_COLUMNS = 1000  # of a file or a pipe: every run keeps to a line


def guarded(work: Callable[[], int]) -> int:
    """The exit code of a command; what can be mended is told, all of it, and a closed pipe is no error."""
    try:
        code = work()
        sys.stdout.flush()
        return code
    except ConfigError as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
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
    """As it is, however wide the screen: paths hold brackets."""
    print("\n".join(lines))
