"""`stages.json` beside the manifest of a study: its stages in order, and what each was started with.

The file only decides whether a stage is started again. No command in it is ever started.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from hpc_parallel.record.safe_read import DamagedError
from hpc_parallel.record.sweep_folder import Texts
from hpc_parallel.record.typed import WHOLE, read_record, write_record

MAIN = "run"  # the stage that the command line itself describes
FILE = "stages.json"


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
    """The content of the file."""

    stages: Annotated[tuple[StageRecord, ...], WHOLE]


def read_stages(folder: Path) -> tuple[StageRecord, ...]:
    """The stages of the study in `folder`; empty if there are none, or if the file is damaged."""
    try:
        record = read_record(StageFile, folder / FILE)
    except (OSError, DamagedError):
        return ()
    return () if record is None else record.stages


def write_stages(folder: Path, stages: tuple[StageRecord, ...]) -> None:
    write_record(folder / FILE, StageFile(stages))
