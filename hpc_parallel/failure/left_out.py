"""A measurement never ends a training: what fails is left out, with one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from hpc_parallel.problems import print_warning

T = TypeVar("T")


@contextmanager
def left_out(what: str) -> Iterator[None]:
    """Run a part of a measurement. If it fails, say in one line that `what` is left out, and go on.

    No collective may run inside, because the other ranks would wait for this one.
    """
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        print_warning(f"{what} left out ({type(error).__name__}: {reason}); the training goes on")


@contextmanager
def optional(context: AbstractContextManager[T], *, what: str) -> Iterator[T | None]:
    """Enter `context`; None without it if it can't begin. Errors of the body are raised as usual."""
    value, entered = None, False
    with left_out(what):
        value = context.__enter__()
        entered = True
    try:
        yield value
    finally:
        if entered:
            with left_out(what):
                context.__exit__(*sys.exc_info())
