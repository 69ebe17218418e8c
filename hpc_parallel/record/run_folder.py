"""The run folder. The login half and the worker half exchange data only through it."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Self

from hpc_parallel.problems import printable
from hpc_parallel.record.safe_read import (
    DamagedError,
    list_folder,
    read_head,
    read_json,
    read_text,
    read_yaml,
)
from hpc_parallel.record.safe_write import write_json, write_text
from hpc_parallel.record.typed import read_record

_MOST_PHASE_BYTES = 100
_SOURCE = ("import_path", "checkouts", "left_out", "git_commit", "git_diff")  # keys of environment.json


class FolderFile:
    """The path of a file or folder in the run folder, by its name there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: RunFolder, kind: type[RunFolder]) -> Path:
        return folder.path / self.name


@dataclass(frozen=True)
class RunFolder:
    """The files of a run. Each is written under a temporary name and renamed, so readers see whole files."""

    path: Path

    config = FolderFile("config.yaml")
    # The configuration for each number of nodes that `launcher.min_nodes` allows: `nodes/3.yaml`.
    smaller = FolderFile("nodes")
    environment = FolderFile("environment.json")
    batch_script = FolderFile("batch_script.sh")
    code = FolderFile("code")  # the source that the run imports, one folder per checkout
    logs = FolderFile("logs")
    metrics = FolderFile("metrics.jsonl")
    # Lines of validation that another run has added to those of `metrics` (`task.follow`).
    evaluations = FolderFile("evaluations.jsonl")
    checkpoints = FolderFile("checkpoints")
    attempts = FolderFile("attempts.jsonl")  # each start and how it ended (`record/attempts.py`)
    owner = FolderFile("owner.json")  # the process or job that runs here now (`record/owner.py`)
    # The signal that stopped the newest start after its state was saved; absent otherwise.
    stopped = FolderFile("stopped.json")
    # What the run does at its start and end, outside its steps: one line, which each phase replaces. First
    # the process that starts the ranks writes it, and then rank 0. Anyone may have written it.
    phase = FolderFile("phase")
    summary = FolderFile("summary.json")
    timeline = FolderFile("timeline.json")  # the work of each stage of a pipeline in one profiled step
    failure = FolderFile("failure.json")
    # The output of torch.compile, for all ranks and later starts (`training.compile`).
    compiled = FolderFile("compiled")
    plots = FolderFile("plots")  # drawn at the end of the run
    profile = FolderFile("profile")  # traces of the recorded ranks (`profile=torch|nsys|ncu`)
    # The times of the parts of some steps on every rank, and the ranks that were slow.
    rank_times = FolderFile("rank_times.json")
    generated = FolderFile("generated.jsonl")  # the texts of `task=generate`, one object per prompt
    # What `task=collectives` measured; `collectives.csv` has the same rows.
    collectives = FolderFile("collectives.json")
    collectives_table = FolderFile("collectives.txt")  # the same rows in the form of nccl-tests
    machine = FolderFile("machine.yaml")  # the machine profile of `task=collectives`
    hardware = FolderFile("hardware.yaml")  # for `hardware/`: the values that `task=calibrate` measured
    calibration = FolderFile("calibration.json")  # the rows behind `hardware`, and the lines of `show`
    preflight = FolderFile("preflight.json")  # what the hosts reported at the start, and those accused
    # The spares of the job that failed their checks, one a line (`sbatch_templates/hosts.sh.j2`).
    unfit_spares = FolderFile("unfit_spares")
    machine_check = FolderFile("machine_check.json")  # what `task=preflight` measured
    rendezvous = FolderFile("rendezvous")  # where rank 0 publishes its address, one file per attempt
    torchrun_secret = FolderFile("rendezvous/torchrun")  # with which torchruns sign what they exchange
    proof = FolderFile("proof")  # what `task=proof` compares: gradients and weights by full name
    slurm = FolderFile("slurm")  # files of Slurm and submitit: the job's output, the pickled payload
    resubmission = FolderFile("slurm/resubmit.sh")  # the batch script of a job that replaces this one

    def on_nodes(self, nodes: int) -> Path:
        return self.smaller / f"{nodes}.yaml"

    def node_counts(self) -> tuple[int, ...]:
        """The numbers of nodes on which the run may go on, largest first; empty without `smaller`."""
        names = (path.stem for path in self.smaller.glob("*.yaml"))
        return tuple(sorted((int(name) for name in names if name.isdecimal()), reverse=True))

    def read_config(self) -> dict[str, Any]:
        """The whole resolved configuration as plain values. Raises FileNotFoundError and DamagedError."""
        return read_yaml(self.config)

    def log(self, rank: int, stream: str) -> Path:
        """The log of a rank. stream: out or err."""
        return self.logs / f"rank-{rank}.{stream}"

    def job_outputs(self, job_id: str) -> list[Path]:
        """The files into which Slurm has written the output of a job of the run."""
        names = sorted(entry.name for entry in list_folder(self.slurm))
        return [self.slurm / name for name in names if name.startswith(job_id) and name.endswith(".out")]

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
        number = self._newest_set_aside() + 1
        try:
            for path in (self.code, *self.outcome):
                if path.exists():
                    path.rename(_numbered(path, number))
            for path in (self.environment, self.config):  # config last: `_newest_set_aside` reads its copies
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
        self._restore(self._newest_set_aside())

    def _restore(self, number: int) -> None:
        for path in (self.code, *self.outcome, self.environment, self.config):
            if (kept := _numbered(path, number)).exists():
                kept.replace(path)

    def take_line_back(self) -> bool:
        """Take again the configuration and the record of the start before; the kept source stays.

        Returns whether that start had completed.

        Without effect if this folder has had one start, or if a file can't be read or written.
        """
        number = self._newest_set_aside()
        with suppress(OSError, DamagedError):
            config = read_text(_numbered(self.config, number))
            earlier = read_json(_numbered(self.environment, number)) or {}
            now = read_json(self.environment) or {}
            write_text(self.config, config)
            write_json(self.environment, earlier | {key: now[key] for key in _SOURCE if key in now})
            return bool((read_json(_numbered(self.summary, number)) or {}).get("outcome") == "completed")
        return False

    def begin_anew(self) -> None:
        """Remove the records of how an earlier start ended."""
        for file in self.outcome:
            file.unlink(missing_ok=True)

    def _newest_set_aside(self) -> int:
        """The highest number: an older copy may have been deleted."""
        numbers = [path.stem.removeprefix("config-") for path in self.path.glob("config-*.yaml")]
        return max((int(number) for number in numbers if number.isdecimal()), default=0)


class FolderRecord:
    """A dataclass that is a file of a run folder."""

    _file: ClassVar[str]  # the name of the file's attribute in `RunFolder`

    @classmethod
    def read(cls, folder: RunFolder) -> Self | None:
        """None if there is no file. Raises DamagedError."""
        return read_record(cls, getattr(folder, cls._file))


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


RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{8}")


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
