"""The run folder: the one place where the login half and the worker half meet."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hpc_parallel.record.safe_read import read_text, read_yaml
from hpc_parallel.record.safe_write import write_text


@dataclass(frozen=True)
class RunFolder:
    """Names and reads what a run keeps; writes beside and renames, so nothing half-written is read."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def batch_script(self) -> Path:
        return self.path / "batch_script.sh"

    @property
    def code(self) -> Path:
        """The source that the run imports, one folder a checkout."""
        return self.path / "code"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def attempts(self) -> Path:
        """Each start of the run and how it ended."""
        return self.path / "attempts.jsonl"

    @property
    def owner(self) -> Path:
        """Who runs here now (`record/owner.py`)."""
        return self.path / "owner.json"

    @property
    def stopped(self) -> Path:
        """By which signal the newest start was stopped, its state being saved; absent otherwise."""
        return self.path / "stopped.json"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def timeline(self) -> Path:
        """What each stage of a pipeline did when, in one step that was watched."""
        return self.path / "timeline.json"

    @property
    def failure(self) -> Path:
        return self.path / "failure.json"

    @property
    def generated(self) -> Path:
        """The texts of `task=generate`, one object a prompt."""
        return self.path / "generated.jsonl"

    @property
    def rendezvous(self) -> Path:
        """Where rank 0 publishes its address, one file an attempt."""
        return self.path / "rendezvous"

    @property
    def proof(self) -> Path:
        """What a proof compares (task=proof): gradients and weights by full name."""
        return self.path / "proof"

    @property
    def slurm(self) -> Path:
        """Slurm's and submitit's own files: the job's output, the pickled payload."""
        return self.path / "slurm"

    @property
    def resubmission(self) -> Path:
        """The batch script of a job that takes this one's place."""
        return self.slurm / "resubmit.sh"

    def read_config(self) -> dict[str, Any]:
        """The whole resolved configuration, as plain values. Raises FileNotFoundError and DamagedError."""
        return read_yaml(self.config)

    def log(self, rank: int, stream: str) -> Path:
        """`stream`: out or err."""
        return self.logs / f"rank-{rank}.{stream}"

    def create(self) -> None:
        """Make the folder and its sub-folders for this user alone (mode 0700).

        Raises FileExistsError where a run lives already: a run folder is never overwritten.
        """
        for parent in reversed(self.path.parents):  # whatever the umask: who may write them has the run
            if not parent.exists():
                parent.mkdir(mode=0o755, exist_ok=True)
        self.path.mkdir(mode=0o700, exist_ok=True)
        if any(self.path.iterdir()):
            raise FileExistsError(f"{self.path} is not empty")
        self.path.chmod(0o700)  # an existing empty folder may be wider
        try:
            for folder in (self.logs, self.rendezvous):
                folder.mkdir(mode=0o700)
        except FileExistsError:  # another process makes the same run now
            raise
        except BaseException:  # a full disk, Ctrl-C
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    @property
    def outcome(self) -> tuple[Path, ...]:
        """All that says how a start ended."""
        return self.generated, self.summary, self.timeline, self.failure, self.stopped

    def set_aside(self) -> None:
        """Keep what the last start was and came to under a number, for a new one.

        Configuration and environment stay until new ones replace them: who asks meanwhile whether the run can
        go on reads them.
        """
        number = self._starts_before() + 1
        try:
            for path in (self.code, *self.outcome):
                if path.exists():
                    path.rename(_numbered(path, number))
            for path in (self.environment, self.config):  # last what counts them
                if path.exists():
                    write_text(_numbered(path, number), read_text(path))
        except BaseException:  # a full disk, Ctrl-C
            self._restore(number)
            raise

    def put_back(self) -> None:
        """Undo the newest `set_aside`: nothing began after it."""
        shutil.rmtree(self.code, ignore_errors=True)
        self._restore(self._starts_before())

    def _restore(self, number: int) -> None:
        for path in (self.code, *self.outcome, self.environment, self.config):
            if (kept := _numbered(path, number)).exists():
                kept.replace(path)

    def begin_anew(self) -> None:
        """Drop how an earlier start ended."""
        for file in self.outcome:
            file.unlink(missing_ok=True)

    def _starts_before(self) -> int:
        return sum(1 for _ in self.path.glob("config-*.yaml"))


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}-{number}{path.suffix}")


def is_run_folder(path: Path) -> bool:
    """Whether `path` holds a run. False also for a folder that this user may not read."""
    return os.path.isfile(path / "config.yaml") and os.path.isdir(path / "rendezvous")


def unreadable(path: Path) -> str | None:
    """Why this user can't read the folder or file at `path`: it, or a folder on the way, is another user's.

    None if it can be read, or is not there.
    """
    path = path.absolute()
    for place in [*reversed(path.parents), path]:
        is_folder = os.path.isdir(place)
        if os.path.lexists(place) and not os.access(place, os.R_OK * (place == path) | os.X_OK * is_folder):
            try:
                owner = place.owner()
            except (KeyError, OSError):
                owner = "another user"
            return f"{place} belongs to {owner}, and you may not read it."
    return None


def new_run_id(now: datetime | None = None) -> str:
    """Sorts by time; the random end keeps runs of one second apart."""
    return f"{(now or datetime.now(UTC)):%Y%m%d-%H%M%S}-{secrets.token_hex(4)}"


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """While no other process is here with the same folder `path`."""
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
