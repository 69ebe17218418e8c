"""The run folder. The login half and the worker half exchange data only through it."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hpc_parallel.problems import printable
from hpc_parallel.record.safe_read import DamagedError, read_head, read_text, read_yaml
from hpc_parallel.record.safe_write import write_text

_MOST_PHASE_BYTES = 100


@dataclass(frozen=True)
class RunFolder:
    """The files of a run. Each is written under a temporary name and renamed, so readers see whole files."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def smaller(self) -> Path:
        """The configuration for each number of nodes that `launcher.min_nodes` allows: `nodes/3.yaml`."""
        return self.path / "nodes"

    def on_nodes(self, nodes: int) -> Path:
        return self.smaller / f"{nodes}.yaml"

    def node_counts(self) -> tuple[int, ...]:
        """The numbers of nodes on which the run may go on, largest first; empty without `smaller`."""
        names = (path.stem for path in self.smaller.glob("*.yaml"))
        return tuple(sorted((int(name) for name in names if name.isdecimal()), reverse=True))

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def batch_script(self) -> Path:
        return self.path / "batch_script.sh"

    @property
    def code(self) -> Path:
        """The source that the run imports, one folder per checkout."""
        return self.path / "code"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        """Lines of validation that another run has added to those of `metrics` (`task.follow`)."""
        return self.path / "evaluations.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def attempts(self) -> Path:
        """Each start of the run and how it ended (`record/attempts.py`)."""
        return self.path / "attempts.jsonl"

    @property
    def owner(self) -> Path:
        """The process or job that runs here now (`record/owner.py`)."""
        return self.path / "owner.json"

    @property
    def stopped(self) -> Path:
        """The signal that stopped the newest start after its state was saved; absent otherwise."""
        return self.path / "stopped.json"

    @property
    def phase(self) -> Path:
        """What the run does at its start and end, outside its steps: one line, which each phase replaces.

        First the process that starts the ranks writes it, and then rank 0. Anyone may have written it.
        """
        return self.path / "phase"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def timeline(self) -> Path:
        """The work of each stage of a pipeline over time, in one profiled step."""
        return self.path / "timeline.json"

    @property
    def failure(self) -> Path:
        return self.path / "failure.json"

    @property
    def compiled(self) -> Path:
        """The output of torch.compile, for all ranks and later starts (`training.compile`)."""
        return self.path / "compiled"

    @property
    def plots(self) -> Path:
        """The plots of the run, drawn at its end."""
        return self.path / "plots"

    @property
    def profile(self) -> Path:
        """Traces of the recorded ranks (`profile=torch|nsys|ncu`)."""
        return self.path / "profile"

    @property
    def rank_times(self) -> Path:
        """The times of the parts of some steps on every rank, and the ranks that were slow."""
        return self.path / "rank_times.json"

    @property
    def generated(self) -> Path:
        """The texts of `task=generate`, one object per prompt."""
        return self.path / "generated.jsonl"

    @property
    def collectives(self) -> Path:
        """What `task=collectives` measured; `collectives.csv` has the same rows."""
        return self.path / "collectives.json"

    @property
    def collectives_table(self) -> Path:
        """The rows of `collectives` as a table in the form of nccl-tests."""
        return self.path / "collectives.txt"

    @property
    def machine(self) -> Path:
        """The machine profile of `task=collectives`."""
        return self.path / "machine.yaml"

    @property
    def hardware(self) -> Path:
        """A file for `hardware/` with the values that `task=calibrate` measured."""
        return self.path / "hardware.yaml"

    @property
    def calibration(self) -> Path:
        """The measured rows behind `hardware`, and the lines that `show` prints."""
        return self.path / "calibration.json"

    @property
    def preflight(self) -> Path:
        """What the hosts reported at the start, and the hosts that were accused."""
        return self.path / "preflight.json"

    @property
    def unfit_spares(self) -> Path:
        """The spares of the job that failed their checks, one a line (`sbatch_templates/hosts.sh.j2`)."""
        return self.path / "unfit_spares"

    @property
    def machine_check(self) -> Path:
        """What `task=preflight` measured."""
        return self.path / "machine_check.json"

    @property
    def rendezvous(self) -> Path:
        """Where rank 0 publishes its address, one file per attempt."""
        return self.path / "rendezvous"

    @property
    def proof(self) -> Path:
        """What `task=proof` compares: gradients and weights by full name."""
        return self.path / "proof"

    @property
    def slurm(self) -> Path:
        """Files of Slurm and submitit: the job's output, the pickled payload."""
        return self.path / "slurm"

    @property
    def resubmission(self) -> Path:
        """The batch script of a job that replaces this one."""
        return self.slurm / "resubmit.sh"

    def read_config(self) -> dict[str, Any]:
        """The whole resolved configuration as plain values. Raises FileNotFoundError and DamagedError."""
        return read_yaml(self.config)

    def log(self, rank: int, stream: str) -> Path:
        """The log of a rank. stream: out or err."""
        return self.logs / f"rank-{rank}.{stream}"

    def nccl_log(self, rank: int | str) -> Path:
        """NCCL's messages about its start; see `machine/nccl_log.py`."""
        return self.logs / f"rank-{rank}.nccl"

    def create(self) -> None:
        """Create the folder and its sub-folders for this user alone (mode 0700).

        Raises FileExistsError if the folder is not empty: a run is never overwritten.
        """
        # Parents are not group-writable under any umask: a user who can write to them controls the run.
        for parent in reversed(self.path.parents):
            if not parent.exists():
                parent.mkdir(mode=0o755, exist_ok=True)
        self.path.mkdir(mode=0o700, exist_ok=True)
        if any(self.path.iterdir()):
            raise FileExistsError(f"{self.path} is not empty")
        self.path.chmod(0o700)  # an existing empty folder may have a wider mode
        try:
            for folder in (self.logs, self.rendezvous):
                folder.mkdir(mode=0o700)
        except FileExistsError:  # another process creates the same run now
            raise
        except BaseException:  # a full disk, Ctrl-C
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    @property
    def outcome(self) -> tuple[Path, ...]:
        """The files that record how a start ended."""
        return self.generated, self.summary, self.timeline, self.failure, self.stopped

    def set_aside(self) -> None:
        """Keep the files of the last start under numbered names, to make room for a new start.

        Configuration and environment are copied, not moved: until new ones replace them, other commands
        read them to check whether the run can be resumed.
        """
        number = self._count_set_aside() + 1
        try:
            for path in (self.code, *self.outcome):
                if path.exists():
                    path.rename(_numbered(path, number))
            for path in (self.environment, self.config):  # config last: `_count_set_aside` counts its copies
                if path.exists():
                    write_text(_numbered(path, number), read_text(path))
        except BaseException:  # a full disk, Ctrl-C
            self._restore(number)
            raise
        with suppress(OSError):  # the phase is only for people: an error must not prevent a new start
            self.phase.unlink(missing_ok=True)

    def put_back(self) -> None:
        """Undo the newest `set_aside`, because no start followed it."""
        shutil.rmtree(self.code, ignore_errors=True)
        self._restore(self._count_set_aside())

    def _restore(self, number: int) -> None:
        for path in (self.code, *self.outcome, self.environment, self.config):
            if (kept := _numbered(path, number)).exists():
                kept.replace(path)

    def begin_anew(self) -> None:
        """Remove the records of how an earlier start ended."""
        for file in self.outcome:
            file.unlink(missing_ok=True)

    def _count_set_aside(self) -> int:
        return sum(1 for _ in self.path.glob("config-*.yaml"))


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}-{number}{path.suffix}")


def is_run_folder(path: Path) -> bool:
    """Whether `path` is a run folder; also False for a folder that this user may not read."""
    return os.path.isfile(path / "config.yaml") and os.path.isdir(path / "rendezvous")


def unreadable(path: Path) -> str | None:
    """Why this user can't read `path`: another user owns it or a folder above it.

    Returns None if it can be read or does not exist.
    """
    path = path.absolute()
    for part in [*reversed(path.parents), path]:
        is_folder = os.path.isdir(part)
        if os.path.lexists(part) and not os.access(part, os.R_OK * (part == path) | os.X_OK * is_folder):
            try:
                owner = part.owner()
            except (KeyError, OSError):
                owner = "another user"
            return f"{part} belongs to {owner}, and you may not read it."
    return None


def note_phase(folder: RunFolder, text: str) -> None:
    """Record what begins now. A full disk must not end a run, so errors are ignored."""
    with suppress(OSError):
        write_text(folder.phase, f"{text}\n")


def read_phase(folder: RunFolder) -> str | None:
    """What the run does now; None if the run has not recorded it."""
    try:
        content = read_head(folder.phase, limit_bytes=_MOST_PHASE_BYTES)
    except (OSError, DamagedError):
        return None
    lines = content.decode(errors="replace").splitlines()
    return printable(lines[0]) if lines else None


def new_run_id(now: datetime | None = None) -> str:
    """A run id that sorts by time; its random end separates runs that start in the same second."""
    return f"{(now or datetime.now(UTC)):%Y%m%d-%H%M%S}-{secrets.token_hex(4)}"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the folder `path`; wait while another process holds it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
