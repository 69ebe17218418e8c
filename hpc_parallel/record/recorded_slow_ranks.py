"""The timed steps of a training: `rank_times.json`, which anybody may have written, and its slow ranks.

If the run is a script, each rank has its own file instead, which may hold anything too.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.record.typed import first, read_if_possible

MOST_SLOW, MOST_ACCUSATIONS = 8, 64
MOST_FILES = 4096  # of a script: one for each rank
MOST_LETTERS = 500  # of a host or a line
MOST_SAMPLES = 100


def _shortened(value: Any) -> Any:
    return value[:MOST_LETTERS] if isinstance(value, str) else None


def _newest(values: Any) -> Any:
    return values[-MOST_SAMPLES:] if isinstance(values, list) else None


@dataclass(frozen=True)
class Slow:
    """A rank that was slow when it was last timed."""

    line: str


@dataclass(frozen=True)
class Accusation:
    """A rank that was ever slow; also in `summary.json`."""

    rank: int
    first_step: int
    last_step: int
    host: Annotated[str, _shortened]
    cause: Annotated[str, _shortened]
    line: Annotated[str, _shortened]
    factor: float | None
    own_s: float | None
    median_s: float | None


@dataclass(frozen=True)
class DeviceState:
    """What the device of a rank did in a timed step."""

    rank: int
    host: str = "?"
    utilisation: float | None = None
    memory_bytes: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    cpu_cores: float | None = None
    resident_bytes: float | None = None


@dataclass(frozen=True)
class TimedStep:
    """A timed step on all ranks."""

    ranks: tuple[DeviceState, ...] = ()


@dataclass(frozen=True)
class TimedSteps:
    """The content of `rank_times.json`. `samples` and `accused` are None if no rank was timed."""

    samples: Annotated[tuple[TimedStep, ...], _newest] | None = None
    slow: Annotated[tuple[Slow, ...], first(MOST_SLOW)] = ()
    accused: Annotated[tuple[Accusation, ...], first(MOST_ACCUSATIONS)] | None = None

    @classmethod
    def read(cls, folder: RunFolder) -> TimedSteps:
        """Without values if the file can't be read."""
        return read_if_possible(cls, folder.rank_times) or cls()


def accusations(folder: RunFolder) -> list[dict[str, Any]] | None:
    """The ranks that were ever slow, in the form of `summary.json`; None if no rank was timed."""
    accused = TimedSteps.read(folder).accused
    return None if accused is None else list(map(asdict, accused))


def keep_accusations(folder: RunFolder) -> list[dict[str, Any]]:
    """The ranks that earlier starts accused. Their timed steps are removed: other ranks may follow."""
    accused = accusations(folder)
    if accused is not None:
        write_json(folder.rank_times, {"samples": [], "slow": [], "accused": accused})
    return accused or []


def device_file(folder: RunFolder, *, rank: int) -> Path:
    """The file in which the parent process of a script's rank keeps the figures of the rank's device."""
    return folder.logs / f"rank-{rank}.device.json"


def states_of_script(folder: RunFolder) -> list[DeviceState]:
    """The newest state of each device of a script."""
    files = sorted(folder.logs.glob("rank-*.device.json"))[:MOST_FILES]
    return [state for file in files if (state := read_if_possible(DeviceState, file)) is not None]
