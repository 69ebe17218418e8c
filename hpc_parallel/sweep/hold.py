"""One start of a sweep at a time: of two at once, both would start the same runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpc_parallel.problems import ConfigError, Problem
from hpc_parallel.record import owner
from hpc_parallel.record.run_folder import RunFolder


@contextmanager
def held(folder: Path, *, key: str) -> Iterator[None]:
    """Own the sweep folder, until its runs have owners of their own (`release`) or, at the latest, the end.

    By `owner.json`, as a run is. Raises ConfigError that names who holds it; key: what named the folder.
    """
    place = RunFolder(folder)
    try:
        owner.claim(place)
    except owner.OwnedError as error:
        is_elsewhere = " on " in str(error).partition(", as ")[2]  # and not to be seen from here
        rule = f"{error}" + f". If that is gone: rm {place.owner}" * is_elsewhere
        raise ConfigError([Problem(key, folder, rule)]) from error
    except OSError as error:
        rule = f"can't be written: {error.strerror or error}"
        raise ConfigError([Problem(key, folder, rule)]) from error
    try:
        yield
    finally:
        release(folder)


def release(folder: Path) -> None:
    """Where this process owns it: else another start may have begun."""
    if folder.is_dir():
        owner.release(RunFolder(folder))
