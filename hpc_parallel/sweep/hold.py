"""Allow one start of a sweep at a time: two at once would both start the same runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpc_parallel.problems import ConfigError, Problem
from hpc_parallel.record import owner
from hpc_parallel.record.run_folder import RunFolder


@contextmanager
def held(folder: Path, *, key: str) -> Iterator[None]:
    """Own the sweep folder until the end of the block, or until its runs have owners (`release`).

    The owner is recorded in `owner.json`, as for a run.

    key: the setting that named the folder.

    Raises ConfigError that names the owner.
    """
    owned = RunFolder(folder)
    try:
        owner.claim(owned)
    except owner.OwnedError as error:
        on_other_host = " on " in str(error).partition(", as ")[2]  # this host can't see if it runs
        rule = f"{error}" + f". If that process is gone: rm {owned.owner}" * on_other_host
        raise ConfigError([Problem(key, folder, rule)]) from error
    except OSError as error:
        rule = f"can't be written: {error.strerror or error}"
        raise ConfigError([Problem(key, folder, rule)]) from error
    try:
        yield
    finally:
        release(folder)


def release(folder: Path) -> None:
    """Give up ownership if this process still has it. If not, another start may own the folder."""
    if folder.is_dir():
        owner.release(RunFolder(folder))
