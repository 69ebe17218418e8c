"""Find a user's own class, and describe an error of their code: its type, its message and their line."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from importlib import import_module
from inspect import signature
from typing import Any

from hpc_parallel.problems import ConfigError, shell_word
from hpc_parallel.shadowing import PUBLIC, is_private

_PACKAGE = os.path.dirname(os.path.abspath(__file__))
_INSTALLED = {"site-packages", "dist-packages"}  # also of another Python, and also in the home folder
_NOT_THE_USERS = tuple({_PACKAGE, *map(os.path.abspath, sysconfig.get_paths().values())})
_MOST_OF_ONE, _MOST_CHARACTERS = 400, 200  # the longest message of an error, and of one cause
_HINTS = (  # messages of torch and of the system
    (
        re.compile(
            r"unsigned char|Byte(Tensor|Type)|\b(got|found|type) Byte\b|for 'Byte'|[Gg]ot:? torch\.uint8"
        ),
        "The data has uint8: try x.float() / 255 for images, and x.long() for token ids",
    ),
    (
        re.compile(r"Input type \((long )?(int|long)\)|dtype, but got (Long|Int) and"),
        "The data has whole numbers: try x.float() in the data or the stem",
    ),
    (
        re.compile("Too many open files"),
        "The limit of open files is too low for so many ranks: try `ulimit -n 4096` before the start, or in "
        "launcher.setup",
    ),
    (
        re.compile("SQLite objects created in a thread"),
        "A thread reads the samples: open the database at the first sample, not in __init__",
    ),
    (
        re.compile(r"mark a variable ready only once|got mixed torch\.Tensor and DTensor"),
        "If the loss uses weights, let forward use them: it may return a tuple of tensors",
    ),
    (
        re.compile(r"KeyError: 'SLURM_\w+'"),
        "Slurm sets it in its jobs, if at all: RANK, LOCAL_RANK and WORLD_SIZE are always set",
    ),
)


class UserCodeError(ConfigError):
    """An error of a class that the configuration names. Its place in the user's code matters."""


def described(error: BaseException) -> str:
    """Returns `ValueError: a bad label (mydata.py:12)`, on one line; without a place if none is known.

    The place is that of a cause if no line of the user's code is in the traceback of `error` itself: a
    pipeline of torch raises its own exception for that of a block.
    """
    text, place = str(error), user_line(error)
    if isinstance(error, SyntaxError) and error.filename:
        text, place = error.msg, f"{os.path.basename(error.filename)}:{error.lineno}"
    text = " ".join(text.split())[:_MOST_OF_ONE].removesuffix(".")
    message = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if place is None and (place := next(filter(None, map(user_line, causes(error))), None)):
        return f"{message}{causes_of(error)} ({place})"
    return (f"{message} ({place})" if place else message) + causes_of(error)


def hint(message: str) -> str:
    """What to do about an error that names neither the sample nor the remedy; empty if unknown."""
    return next((f". {advice}" for pattern, advice in _HINTS if pattern.search(message)), "")


def causes_of(error: BaseException) -> str:
    """The exceptions that led to `error`, as in its traceback: `, caused by KeyError: 'x'`, or nothing."""
    message_of_error, text = str(error), ""
    for cause in causes(error):
        message = " ".join(str(cause).split())[:_MOST_CHARACTERS]
        if not message or message not in message_of_error + text:
            word = "caused by" if error.__cause__ is cause else "after"
            text += f", {word} {type(cause).__name__}" + f": {message}" * bool(message)
        error = cause
    return text


def causes(error: BaseException) -> Iterator[BaseException]:
    """The exceptions that led to `error`, the latest first."""
    seen = {id(error)}
    while (cause := _cause_of(error)) is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        error = cause


def _cause_of(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def user_line(error: BaseException) -> str | None:
    """The innermost line of the traceback in a file that is no part of Python or of an installed package."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(frame.filename):
            return f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return None


def is_users(file: str) -> bool:
    """Whether a file of a traceback is no part of Python or of an installed package."""
    path = os.path.abspath(file)
    if not os.path.isfile(path) or _INSTALLED & set(path.split(os.sep)):
        return False
    return not path.startswith(tuple(f"{root}{os.sep}" for root in _NOT_THE_USERS))


def failure_of(key: str, table: dict[str, Any], *, advice: str = "") -> str | None:
    """Why the class of `table` can't be imported or called with its arguments; None if it can.

    advice: a sentence for a class that can't be imported here.
    """
    path = str(table["_target_"])
    raised = f"raised by {path} ({key})"
    try:
        target = _find(path)
    except BaseException as error:  # also SystemExit of a script
        return f"{described(error)}, {raised}. {_unseen(error) or advice}".rstrip()
    if table.get("_partial_") or not callable(target):
        return None if callable(target) else f"{path} ({key}) is not a class or a function."
    arguments = {name: value for name, value in table.items() if not name.startswith("_")}
    try:
        signature(target).bind(*table.get("_args_", ()), **arguments)
    except TypeError as error:
        return f"TypeError: {error}, {raised}."
    except ValueError:  # some classes in C have no signature
        pass
    return None


def _unseen(error: BaseException) -> str:
    """Why Python does not find a module that lies in the working folder; empty if it lies elsewhere."""
    folder = os.getcwd()
    if not isinstance(error, ModuleNotFoundError) or folder in map(os.path.abspath, sys.path):
        return ""
    name = str(error.name).partition(".")[0]
    entries = [entry for entry in (f"{name}.py", name) if os.path.exists(os.path.join(folder, entry))]
    if not entries:
        return ""
    if not is_private(folder):
        return f"{entries[0]} lies in {folder}, and Python imports nothing from there: {PUBLIC}."
    return (
        f"{entries[0]} lies in {folder}, where Python does not look with PYTHONSAFEPATH, -P or -I. "
        f"Try without them, or PYTHONPATH={shell_word(folder)}."
    )


def _find(path: str) -> Any:
    """The object at a dotted path. The names after the longest prefix that is a module are attributes."""
    parts = path.split(".")
    value: Any = import_module(parts[0])
    for end, part in enumerate(parts[1:], start=2):
        if not hasattr(value, part):
            try:
                import_module(".".join(parts[:end]))
            except ModuleNotFoundError as error:
                if error.name != ".".join(parts[:end]):
                    raise
        value = getattr(value, part)
    return value
