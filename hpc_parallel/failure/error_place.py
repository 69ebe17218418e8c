"""Mark an exception with its origin (block 7, the optimizer, step 12) for the failure record.

The mark is set while the exception propagates, so it costs nothing without an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_PLACE = "hpc_parallel_place"
_STEP = "hpc_parallel_step"


def mark(error: BaseException, place: str) -> None:
    """Record where `error` was raised, also in its traceback; an earlier, inner mark is kept."""
    if place_of(error) is None:
        setattr(error, _PLACE, place)
        error.add_note(f"in {place}")


def place_of(error: BaseException) -> str | None:
    """The mark of `error` or of its cause, because pipeline stages wrap the exceptions of their blocks."""
    place: str | None = getattr(error, _PLACE, None)
    return place if place or error.__cause__ is None else place_of(error.__cause__)


@contextmanager
def located(place: str) -> Iterator[None]:
    """Mark exceptions from inside the block, or from a function if used as a decorator."""
    try:
        yield
    except Exception as error:
        mark(error, place)
        raise


def mark_step(error: BaseException, step: int) -> None:
    """Record in which 1-based step `error` was raised."""
    setattr(error, _STEP, step)
    error.add_note(f"in step {step}")


def step_of(error: BaseException) -> int | None:
    """The step in which `error` was raised; None if not recorded."""
    step: int | None = getattr(error, _STEP, None)
    return step
