"""Tab completion of commands, flags, names of runs and overrides, by argcomplete in bash, zsh and fish.

The shell runs the command for each key press, so this module imports only what it needs to parse arguments.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

from hpc_parallel.record.find import newest_first
from hpc_parallel.record.names import RUNS, label
from hpc_parallel.record.recorded import find_runs

WITH_PARSER = ("status", "logs", "cancel", "show")  # other commands take too long to import
WITH_RUN = ("rerun", "export")


def complete(commands: Iterable[str]) -> None:
    """Answer the shell and exit."""
    _answer(run_parser() if _starts_a_run(os.environ) else parser(commands))


def complete_run() -> None:
    """Answer the shell for `python -m hpc_parallel.run`, and exit."""
    _answer(run_parser())


def _answer(line: argparse.ArgumentParser) -> None:
    import argcomplete

    argcomplete.autocomplete(line)


def _starts_a_run(environment: Mapping[str, str]) -> bool:
    """Whether the line is `hpc-parallel run ...`, or `hpc-parallel KEY=VALUE ...` without `run`."""
    start = environment.get("_ARGCOMPLETE", "")  # the number of words that name the program
    arguments = environment.get("COMP_LINE", "").split(" ")[int(start) if start.isdigit() else 1 :]
    return (arguments[:1] == ["run"] and len(arguments) > 1) or "=" in "".join(arguments[:1])


def run_parser() -> argparse.ArgumentParser:
    """The flags of Hydra, and the overrides."""
    from hpc_parallel.config.hydra_internals import flags_parser

    made = flags_parser()
    for action in made._actions:
        if action.dest == "overrides":
            action.completer = _overrides  # type: ignore[attr-defined]
    return made


def _overrides(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    from hpc_parallel.config.override_words import override_words

    return override_words(prefix, extra_dir=parsed_args.config_dir)


def parser(commands: Iterable[str]) -> argparse.ArgumentParser:
    """All commands as one parser, which argcomplete needs."""
    made = argparse.ArgumentParser(prog="hpc-parallel")
    inner = made.add_subparsers()
    for name in commands:
        if name in WITH_PARSER:
            parent = import_module(f"hpc_parallel.commands.{name}").parser()
        else:
            parent = argparse.ArgumentParser()
            if name in WITH_RUN:
                parent.add_argument("run")
        inner.add_parser(name, parents=[parent], add_help=False)
        for action in parent._actions:
            if action.dest in ("run", "runs"):
                action.completer = names
    return made


def names(prefix: str, **_: Any) -> list[str]:
    """Names of runs that begin with `prefix`, the newest first; if there are none, run ids."""
    runs = newest_first(find_runs(RUNS))
    matching = [name for run in runs if (name := label(run.path)).startswith(prefix)]
    return matching or [run.run_id for run in runs if run.run_id.startswith(prefix)]
