"""Python's garbage collector on fixed steps, so that all ranks pause at once.

By default the collector runs when enough objects were made, at another time on each rank. All other ranks
then wait for this rank in the next collective.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def collecting(every: int | None) -> Iterator[Callable[[int], None]]:
    """Switch the collector off, and yield a function that collects before every `every`-th step.

    None: leave the collector on.
    """
    if every is None or not gc.isenabled():
        yield lambda step: None
        return
    gc.collect()
    gc.disable()
    try:
        yield lambda step: None if step % every else _collect()
    finally:
        gc.enable()


def _collect() -> None:
    gc.collect(1)  # the objects of the last steps; the oldest generation is large and changes little
