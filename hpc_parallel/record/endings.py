"""How the newest start of a run ended early: `failure.json` and `stopped.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.record.typed import read_record, write_record


@dataclass(frozen=True)
class Follower:
    """A rank that failed after the first one."""

    rank: int
    host: str | None = None
    kind: str | None = None


@dataclass(frozen=True)
class Failure:
    """The root cause: `failure.json`. `rank`, `host` and `node` are None if no rank is to blame."""

    rank: int | None = None
    host: str | None = None
    node: int | None = None
    kind: str | None = None  # a constant of failure/failure.py
    message: str | None = None
    signal: str | None = None  # its name
    time: str | None = None  # ISO 8601, UTC
    traceback: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)  # depends on the kind
    followers: tuple[Follower, ...] = ()
    line: str | None = None  # a line of text that names the root cause

    @classmethod
    def read(cls, folder: RunFolder) -> Failure | None:
        """None if there is no file. Raises DamagedError."""
        return read_record(cls, folder.failure)

    def write(self, folder: RunFolder) -> None:
        write_record(folder.failure, self)


@dataclass(frozen=True)
class Stop:
    """The signal at which the ranks saved their state, or the exit code of a script: `stopped.json`.

    Keys whose value is None are not written, except `signal`.
    """

    signal: str | None = None  # its name; None if a script asks for a new start by its exit code
    step: int | None = None  # the step whose checkpoint is complete
    kept: str | None = None  # what was kept of a task that can't continue
    code: int | None = None  # exit code of a script, as in subprocess
    time: str | None = None  # ISO 8601, UTC
    how: str | None = None  # a constant of failure/restart.py; known only after the job has ended
    line: str | None = None  # known only after the job has ended

    @classmethod
    def read(cls, folder: RunFolder) -> Stop | None:
        """None if there is no file. Raises DamagedError."""
        return read_record(cls, folder.stopped)

    def write(self, folder: RunFolder) -> None:
        values = {key: value for key, value in asdict(self).items() if value is not None or key == "signal"}
        write_json(folder.stopped, values)
