"""Converts a command line to a checked run, or finds all problems of the command line."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from yaml import YAMLError

from hpc_parallel.config.command_line import CommandLine
from hpc_parallel.config.compose import COMPOSE_ERRORS, Cell, compose_run
from hpc_parallel.config.resolve import UnresolvedError
from hpc_parallel.launch.prepare import PreparedRun, prepare
from hpc_parallel.problems import ConfigError, Problem
from hpc_parallel.shell import warn_on_stderr


def with_resumed(line: CommandLine, *, warn: Callable[[str], None] = warn_on_stderr) -> CommandLine:
    """Put the overrides of the run that `resume=` names before those of the command line.

    warn: receives one line for each run that is skipped.

    Raises ConfigError with all problems.
    """
    if not any(word.startswith("resume=") for word in line.words):
        return line
    from hpc_parallel.launch.resume import resumed

    try:
        return line.with_words(resumed(line.words, warn=warn))
    except COMPOSE_ERRORS as error:
        problems = error.problems if isinstance(error, ConfigError) else []
        words = [word for word in line.words if not word.startswith(("resume=", "run_dir="))]
        others = line.with_words(words)
        try:
            checked_run(others)
        except ConfigError as other_error:
            raise ConfigError([*problems, *other_error.problems]) from None
        raise


def checked_run(line: CommandLine, *, awaited: Container[Path] = ()) -> PreparedRun:
    """The checked run of a command line. Raises ConfigError with all problems."""
    with reporting_all_problems(line):
        return prepared(line, compose_run(line.overrides, **line.places), awaited=awaited)


def prepared(line: CommandLine, cell: Cell, *, awaited: Container[Path] = ()) -> PreparedRun:
    """The checked run of a composed command line. Raises ConfigError with all problems."""
    with reporting_all_problems(line):
        return prepare(
            cell.config, overrides=cell.overrides, config_dir=line.extra_dir, build_model=True,
            awaited=awaited,
        )  # fmt: skip


@contextmanager
def reporting_all_problems(line: CommandLine) -> Iterator[None]:
    """Turn a refusal inside the block into a ConfigError with all problems of the command line."""
    try:
        yield
    except Exception as error:
        raise ConfigError(all_problems(error, line)) from error


def all_problems(error: Exception, line: CommandLine, *, also: Sequence[str] = ()) -> list[Problem | str]:
    """All problems of a command line that Hydra, a schema or a check refused with `error`.

    also: the overrides of one combination, if a study adds overrides that the command line does not have.

    Raises `error` again if it is not a refusal.
    """
    from hpc_parallel.config.diagnose import diagnose
    from hpc_parallel.config.file_problems import unreadable_file

    if isinstance(error, ConfigError) and not isinstance(error, UnresolvedError):
        return error.problems  # already from all checks
    if not isinstance(error, COMPOSE_ERRORS):
        raise error
    try:
        problems = diagnose(line.overrides, **line.places, sweep=line.sweeps)
        problems = problems or diagnose(also, **line.places)
    except COMPOSE_ERRORS as primary:  # the primary configuration itself can't be composed
        problems, error = [], primary
    if not problems and isinstance(error, ConfigError):
        return error.problems
    if not problems and isinstance(error, YAMLError):
        return [unreadable_file(error)]
    return problems or [" ".join(str(error).partition("\n\n")[0].split())]
