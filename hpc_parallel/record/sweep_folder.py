"""The sweep folder: `sweep.json` lists the runs that one command created, and their folders.

The runs are ordinary run folders elsewhere. `status`, `cancel`, `report` and `sweep.resume` read the
manifest to treat them as one sweep. A study has `stages.json` beside the manifest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from hpc_parallel.record.run_folder import RUN_ID, locked
from hpc_parallel.record.safe_read import DamagedError, read_json
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.record.typed import WHOLE, build, read_if_possible, write_record
from hpc_parallel.record.values import job_id as job_id_of

MANIFEST = "sweep.json"
STAGES = "stages.json"
MAIN = "run"  # the stage of a study that the command line itself describes
Texts = Annotated[tuple[str, ...], WHOLE]


def _absolute(path: Any) -> Any:
    return path if isinstance(path, str) and os.path.isabs(path) else None


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep."""

    overrides: Texts
    run_dir: Annotated[Path, _absolute]
    nodes: int
    gpus_per_node: int
    job_id: Annotated[str, job_id_of] | None = None  # None: not a Slurm job, or not submitted


@dataclass(frozen=True)
class SkippedRun:
    """A combination that can't run, and why."""

    overrides: Texts
    problems: Texts


@dataclass(frozen=True)
class Sweep:
    """The content of `sweep.json`."""

    command: Texts  # as typed
    started: str  # ISO 8601, UTC
    parallelism: int | None  # runs at the same time; None: no limit
    runs: Annotated[tuple[SweepRun, ...], WHOLE]
    skipped: Annotated[tuple[SkippedRun, ...], WHOLE]

    def distinct_overrides(self, overrides: Sequence[str]) -> str:
        """The overrides of a run that are not common to the whole sweep."""
        return " ".join(override for override in overrides if override not in self._shared)

    @cached_property
    def _shared(self) -> set[str]:
        return common([*(run.overrides for run in self.runs), *(run.overrides for run in self.skipped)])


@dataclass(frozen=True)
class StageRecord:
    """A stage of a study. files: what it reads, each with its size and time or null if it was missing."""

    name: str
    run_dir: str
    after: Texts
    fingerprint: str
    files: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StageFile:
    """The content of `stages.json`, in order. It only decides whether a stage is started again."""

    stages: Annotated[tuple[StageRecord, ...], WHOLE]


def common(runs: Sequence[Sequence[str]]) -> set[str]:
    """The overrides that all runs have; empty for a single run."""
    return set.intersection(*map(set, runs)) if len(runs) > 1 else set()


def is_sweep_folder(path: Path) -> bool:
    return os.path.isfile(path / MANIFEST)


def create(path: Path) -> None:
    """Create the folder for this user alone (mode 0700); an existing folder with files keeps its mode.

    Raises FileExistsError if the folder holds a sweep, OSError if it can't be created.
    """
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    if is_sweep_folder(path):
        raise FileExistsError(f"{path} holds a sweep already")
    if not any(path.iterdir()):
        path.chmod(0o700)  # an existing empty folder may have a wider mode


def write_sweep(path: Path, sweep: Sweep) -> None:
    """Replace the manifest in the sweep folder `path` atomically."""
    write_json(path / MANIFEST, asdict(sweep, dict_factory=_plain))


def change_sweep(path: Path, change: Callable[[Sweep], Sweep]) -> None:
    """Apply `change` to the current manifest. A lock is held: several processes may change it at once."""
    with locked(path):
        write_sweep(path, change(read_sweep(path)))


def read_sweep(path: Path) -> Sweep:
    """The sweep in the folder `path`. Runs that were copied or moved with it are those beside it.

    Raises FileNotFoundError if there is no manifest, and DamagedError if it is invalid.
    """
    file = path / MANIFEST
    if (manifest := read_json(file)) is None:
        raise FileNotFoundError(file)
    if (sweep := build(Sweep, manifest)) is None:
        raise DamagedError(file, "it is not the manifest of a sweep")
    runs = (replace(run, run_dir=_beside(path, run.run_dir)) for run in sweep.runs)
    return replace(sweep, runs=tuple(runs))


def _beside(path: Path, run_dir: Path) -> Path:
    """`runs/NAME/ID` beside the sweep folder `runs/sweeps/ID`, if it has the run of `run_dir`.

    While `run_dir` exists, a name that the user chose does not tell that both are one run; an ID does.
    """
    here = path.absolute().parent.parent.joinpath(*run_dir.parts[-2:])
    is_one = here.is_dir() and (RUN_ID.fullmatch(run_dir.name) is not None or not run_dir.exists())
    return here if is_one else run_dir


def sweep_of(path: Path) -> Sweep | None:
    """The sweep of the folder `path`; None if it is not a sweep folder or can't be read."""
    try:
        return read_sweep(path)
    except (FileNotFoundError, DamagedError):
        return None


def read_stages(folder: Path) -> tuple[StageRecord, ...]:
    """The stages of the study in `folder`; empty if there are none, or if the file is damaged."""
    record = read_if_possible(StageFile, folder / STAGES)
    return () if record is None else record.stages


def write_stages(folder: Path, stages: tuple[StageRecord, ...]) -> None:
    write_record(folder / STAGES, StageFile(stages))


def _plain(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: str(value) if isinstance(value, Path) else value for key, value in pairs}
