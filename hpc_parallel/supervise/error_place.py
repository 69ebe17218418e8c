"""Where an exception came from (block 7, the optimizer, step 12): kept on the exception, read by its record.

Nothing is done while all goes well: a mark is set by whoever the exception passes on its way out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_PLACE = "hpc_parallel_place"
_STEP = "hpc_parallel_step"


def mark(error: BaseException, place: str) -> None:
    """Say where `error` was raised; the innermost place stands. Its traceback shows it too."""
    if place_of(error) is None:
        setattr(error, _PLACE, place)
        error.add_note(f"in {place}")


def place_of(error: BaseException) -> str | None:
    """What was said of `error` or of what caused it: pipeline stages wrap what their blocks raise."""
    found: str | None = getattr(error, _PLACE, None)
    return found if found or error.__cause__ is None else place_of(error.__cause__)


@contextmanager
def located(place: str) -> Iterator[None]:
    """Mark what is raised inside; of a function as a decorator."""
    try:
        yield
    except Exception as error:
        mark(error, place)
        raise


@contextmanager
def at_step(step: int) -> Iterator[None]:
    """Say in which 1-based step it was, beside the place."""
    try:
        yield
    except Exception as error:
        setattr(error, _STEP, step)
        error.add_note(f"in step {step}")
        raise


def step_of(error: BaseException) -> int | None:
    found: int | None = getattr(error, _STEP, None)
    return found
