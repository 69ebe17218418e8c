"""Tab completion of the commands, their flags and the names of runs, by argcomplete in bash, zsh and fish.

The shell runs the command for each key press, so this module imports only what parses arguments.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from hpc_parallel.commands.find import newest_first
from hpc_parallel.record.names import RUNS, label
from hpc_parallel.record.recorded import find_runs

WITH_PARSER = ("status", "logs", "cancel", "show")  # the modules of the others take too long to import
WITH_RUN = ("rerun", "export")


def complete(commands: Iterable[str]) -> None:
    """Answer the shell and exit. Returns if argcomplete is not installed."""
    try:
        import argcomplete
    except ImportError:
        return
    argcomplete.autocomplete(parser(commands))


def parser(commands: Iterable[str]) -> argparse.ArgumentParser:
    """All commands as one parser, which argcomplete needs."""
    made = argparse.ArgumentParser(prog="hpc-parallel")
    inner = made.add_subparsers()
    for name in commands:
        if name in WITH_PARSER:
            own = import_module(f"hpc_parallel.commands.{name}").parser()
        else:
            own = argparse.ArgumentParser()
            if name in WITH_RUN:
                own.add_argument("run")
        inner.add_parser(name, parents=[own], add_help=False)
        for action in own._actions:
            if action.dest in ("run", "runs"):
                action.completer = names
    return made


def names(prefix: str, **_: Any) -> list[str]:
    """Names of runs that begin with `prefix`, the newest first; if there are none, run ids."""
    runs = newest_first(find_runs(RUNS))
    matching = [name for run in runs if (name := label(run.path)).startswith(prefix)]
    return matching or [run.run_id for run in runs if run.run_id.startswith(prefix)]
