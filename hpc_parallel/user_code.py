"""Describe an error of the user's own code: its type, its message and the user's line."""

from __future__ import annotations

import os
import sysconfig
import traceback

from hpc_parallel.problems import ConfigError

_PACKAGE = os.path.dirname(os.path.abspath(__file__))
_NOT_THE_USERS = tuple({_PACKAGE, *map(os.path.abspath, sysconfig.get_paths().values())})


class UserCodeError(ConfigError):
    """An error of a class that the configuration names. Its place in the user's code matters."""


def described(error: BaseException) -> str:
    """Returns `ValueError: a bad label (mydata.py:12)`, on one line; without a place if none is known."""
    text, place = str(error), user_line(error)
    if isinstance(error, SyntaxError) and error.filename:
        text, place = error.msg, f"{os.path.basename(error.filename)}:{error.lineno}"
    text = " ".join(text.split())
    message = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return f"{message} ({place})" if place else message


def user_line(error: BaseException) -> str | None:
    """The innermost line of the traceback in a file that is no part of Python or of an installed package."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = os.path.abspath(frame.filename)
        if os.path.isfile(path) and not path.startswith(tuple(f"{root}{os.sep}" for root in _NOT_THE_USERS)):
            return f"{os.path.basename(path)}:{frame.lineno}"
    return None
