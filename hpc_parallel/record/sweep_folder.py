"""The sweep folder: `sweep.json`, the manifest of the runs that one command made, and where each is.

The runs themselves are ordinary run folders elsewhere; the manifest is what `status`, `cancel`, `report`
and `sweep.resume` know of them as one sweep.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_parallel.record.run_folder import alone
from hpc_parallel.record.safe_read import DamagedError, read_json
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.record.values import job_id, table, text, whole

MANIFEST = "sweep.json"


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep. `job_id`: as sacct and scancel take it (`123_4` of an array); None: no job of
    Slurm's, or not submitted."""

    overrides: tuple[str, ...]
    run_dir: Path
    nodes: int
    gpus_per_node: int
    job_id: str | None = None


@dataclass(frozen=True)
class SkippedRun:
    """A combination that can't run, and why."""

    overrides: tuple[str, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Sweep:
    """What `sweep.json` says. `started`: ISO 8601, UTC; `parallelism`: most runs at once (None: no limit)."""

    command: tuple[str, ...]  # the words as typed
    started: str
    parallelism: int | None
    runs: tuple[SweepRun, ...] = ()
    skipped: tuple[SkippedRun, ...] = ()

    def own(self, overrides: Sequence[str]) -> str:
        """Those of a run that not all of the sweep have."""
        shared = common([*(run.overrides for run in self.runs), *(left.overrides for left in self.skipped)])
        return " ".join(word for word in overrides if word not in shared)


def common(runs: Sequence[Sequence[str]]) -> set[str]:
    """The overrides in which runs do not differ; of one run none."""
    said = [set(each) for each in runs]
    return set.intersection(*said) if len(said) > 1 else set()


def is_sweep_folder(path: Path) -> bool:
    return os.path.isfile(path / MANIFEST)


def create(path: Path) -> None:
    """Make the folder for this user alone (mode 0700); one that holds other files keeps its mode.

    Raises FileExistsError where a sweep lives already, OSError where the folder can't be made.
    """
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    if is_sweep_folder(path):
        raise FileExistsError(f"{path} holds a sweep already")
    if not any(path.iterdir()):
        path.chmod(0o700)  # an existing empty folder may be wider


def write_sweep(path: Path, sweep: Sweep) -> None:
    """Replace the manifest in the sweep folder `path`, in one move."""
    write_json(path / MANIFEST, asdict(sweep, dict_factory=_plain))


def change_sweep(path: Path, change: Callable[[Sweep], Sweep]) -> None:
    """The same by what the manifest says now, also where several processes do so at once."""
    with alone(path):
        write_sweep(path, change(read_sweep(path)))


def read_sweep(path: Path) -> Sweep:
    """The sweep in the folder `path`. Raises FileNotFoundError, and DamagedError for what is no manifest."""
    file = path / MANIFEST
    said = read_json(file)
    if said is None:
        raise FileNotFoundError(file)
    try:
        return Sweep(
            command=_texts(said["command"]),
            started=str(said["started"]),
            parallelism=whole(said["parallelism"]),
            runs=tuple(_run(table(each)) for each in said["runs"]),
            skipped=tuple(
                SkippedRun(_texts(each["overrides"]), _texts(each["problems"]))
                for each in map(table, said["skipped"])
            ),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(file, f"it is not the manifest of a sweep ({error!r})") from error


def _run(said: Mapping[str, Any]) -> SweepRun:
    """Raises KeyError, TypeError and ValueError."""
    nodes, gpus_per_node = whole(said["nodes"]), whole(said["gpus_per_node"])
    if nodes is None or gpus_per_node is None:
        raise ValueError("a run without a number of nodes and devices")
    return SweepRun(
        overrides=_texts(said["overrides"]),
        run_dir=_path(said["run_dir"]),
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        job_id=job_id(said["job_id"]),
    )


def _path(value: Any) -> Path:
    path = Path(text(value) or "")
    if not path.is_absolute() or "\0" in str(path):
        raise ValueError("a run_dir that is no absolute path")
    os.fsencode(path)  # a UnicodeEncodeError is a ValueError
    return path


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise TypeError("no list of texts")
    return tuple(map(str, values))


def _plain(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: str(value) if isinstance(value, Path) else value for key, value in pairs}
