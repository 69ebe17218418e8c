"""Which ranks have ended with exit code 0: `logs/rank-<r>.ended.json`.

The parent of a rank writes the file. An exit code 0 of the job alone does not show that any rank ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from hpc_parallel.failure.desync import name_ranks
from hpc_parallel.machine.world import World
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.record.typed import read_if_possible


@dataclass(frozen=True)
class NormalEnd:
    """A rank that has ended with exit code 0."""

    rank: int
    host: str
    attempt: str
    time: str  # ISO 8601, UTC


def record(folder: RunFolder, *, world: World) -> None:
    """Record the end of a rank. A full disk must not make a failure of it."""
    end = NormalEnd(world.rank, world.host, world.attempt, datetime.now(UTC).isoformat())
    with suppress(OSError):
        write_json(_path(folder, world.rank), asdict(end))


def has_ended(folder: RunFolder, *, rank: int) -> bool:
    """Whether a rank of this start has ended with exit code 0."""
    return _path(folder, rank).exists()


def ended_ranks(folder: RunFolder, *, attempt: str) -> list[NormalEnd]:
    """The ranks that have ended in this attempt. Reads every file, so only the end of a run calls it."""
    ends = [read_if_possible(NormalEnd, path) for path in folder.logs.glob("rank-*.ended.json")]
    of_attempt = [end for end in ends if end is not None and end.attempt == attempt]
    return sorted(of_attempt, key=lambda end: end.rank)


def clause(ends: Sequence[NormalEnd]) -> str:
    """The end of a line about ranks that lost a peer; empty without `ends`."""
    if not ends:
        return ""
    host = f" on {ends[0].host}" if len(ends) == 1 else ""
    return f"; {name_ranks([end.rank for end in ends])}{host} had ended with exit code 0"


def forget(folder: RunFolder, *, rank: int | None = None) -> None:
    """Remove the file of an earlier start; `rank` None: of all ranks."""
    for path in folder.logs.glob(f"rank-{'*' if rank is None else rank}.ended.json"):
        path.unlink(missing_ok=True)


def _path(folder: RunFolder, rank: int) -> Path:
    return folder.logs / f"rank-{rank}.ended.json"
