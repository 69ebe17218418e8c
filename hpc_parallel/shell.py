"""How every command behaves in the shell.

This covers closed or full streams, Ctrl-C, a deleted folder, and characters that the terminal can't show.
"""

from __future__ import annotations

import argparse
import atexit
import codecs
import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from hpc_parallel.exit_codes import DONE, FAILED, WRONG
from hpc_parallel.problems import ConfigError, escape, printable, shell_word
from hpc_parallel.record.safe_read import DamagedError


def command_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m hpc_parallel NAME`. The description keeps its line breaks."""
    return argparse.ArgumentParser(
        prog=f"python -m hpc_parallel {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def run_command(work: Callable[[], int]) -> int:
    """Run a command; returns its exit code.

    A system error (a full disk, a file that can't be read) prints one line to stderr and returns 1. Ctrl-C
    prints nothing and returns 1. If the reader closes the pipe early (`| head`), the exit code is 0, because
    the reader has what it wants, unless `work` has returned another one.
    """
    # Ignore Ctrl-C while Python exits: it would kill the process and replace the command's exit code.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    _open_closed_streams()
    _escape_what_streams_cannot_encode()
    code = DONE
    try:
        _require_folder()
        try:
            code = work()
        finally:  # also where argparse exits after --help
            sys.stdout.flush()
        return code
    except ConfigError as error:
        complain(error.problems)
        return WRONG
    except DamagedError as error:
        complain([f"{error}."])
        return WRONG
    except KeyboardInterrupt:
        return FAILED
    except BrokenPipeError:
        discard(sys.stdout)
        return code
    except OSError as error:
        complain([_describe(error)])
        discard(sys.stdout)
        return FAILED


def refuse(problems: Sequence[object], *, text: str = " in the configuration; nothing was started") -> int:
    """Print all problems to stderr after a line with their number and `text`; returns the exit code."""
    count = len(problems)
    complain([f"{count} problem{'s' * (count > 1)}{text}."])
    complain(problems, indent="  ")
    return WRONG


def complain(problems: Iterable[object], *, indent: str = "") -> None:
    """Print each problem to stderr, with control characters escaped except tabs and line ends.

    If stderr is full or closed, nothing is printed.
    """
    try:
        for problem in problems:
            print(indent + printable(problem, keep="\n\t"), file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def output_problems(output: Path, *, ending: str, awaited: Container[Path] = ()) -> Iterator[str]:
    """Yields what is wrong with `--output FILE`: another ending, or no folder to put it in.

    awaited: folders that an earlier stage makes.
    """
    if output.suffix != ending:
        legal = output.with_suffix(ending) if output.name else output / f"mine{ending}"
        yield f"--output {output} must end in {ending}. Try --output {shell_word(legal)}."
    if not os.path.isdir(output.parent) and output.parent not in awaited:
        folder = output.parent
        yield f"--output {output}: there is no folder {folder}. Try mkdir -p {shell_word(folder)}."


def names_awaited(overrides: Iterable[str], awaited: Container[Path] | None) -> bool:
    """Whether an override names a place that an earlier stage writes, so that it can't be checked yet."""
    return any("/" in word and Path(word.rpartition("=")[2]) in (awaited or ()) for word in overrides)


def warn_on_stderr(message: str) -> None:
    complain([message])


def _open_closed_streams() -> None:
    """Open standard streams that the shell has closed (`>&-`) on /dev/null.

    Otherwise the next file that this process opens would be its stdout, and a child would print into it.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is not None:
            continue
        with contextlib.suppress(OSError):
            os.fstat(number)
            continue
        null = os.open(os.devnull, os.O_RDWR)
        if null != number:
            os.dup2(null, number)
            os.close(null)
        setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _escape_what_streams_cannot_encode() -> None:
    """Print `\\u2026` instead of an error if the terminal's encoding (LC_ALL=C) lacks the character."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ESCAPING)


def _escaping(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(escape, error.object[error.start : error.end])), error.end


_ESCAPING = "hpc_parallel_escape"
codecs.register_error(_ESCAPING, _escaping)


def _require_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError(["The current folder has been deleted. Try cd to another one."]) from None


def _describe(error: OSError) -> str:
    reason = error.strerror or str(error) or type(error).__name__
    if error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {reason}."
    subject = "stdout can't be written" if _is_broken(sys.stdout) else "The system reports"
    return f"{subject}: {reason}."


def _is_broken(stream: TextIO) -> bool:
    try:
        stream.flush()  # what could not be written is still in its buffer
    except OSError:
        return True
    return False


def discard(stream: TextIO) -> None:
    """Redirect the stream to /dev/null. Otherwise Python fails again (exit code 120) at its exit."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: a stream without a descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
