"""The timed steps of a training: `rank_times.json`, which anybody may have written, and its slow ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

from hpc_parallel.problems import printable
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.typed import first, read_if_possible

MOST_RANKS = 8
MOST_ACCUSATIONS = 64
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
    slow: Annotated[tuple[Slow, ...], first(MOST_RANKS)] = ()
    accused: Annotated[tuple[Accusation, ...], first(MOST_ACCUSATIONS)] | None = None

    @classmethod
    def read(cls, folder: RunFolder) -> TimedSteps:
        """Without values if the file can't be read."""
        return read_if_possible(cls, folder.rank_times) or cls()


def slow_lines(folder: RunFolder) -> list[str]:
    """One line for each rank that was slow when it was last timed, the slowest first."""
    return [printable(rank.line) for rank in TimedSteps.read(folder).slow if rank.line]


def accused_lines(folder: RunFolder) -> list[str]:
    """One line for each rank that was ever slow, with the steps."""
    return [
        printable(f"{rank.line}, from step {rank.first_step} to {rank.last_step}")
        for rank in (TimedSteps.read(folder).accused or ())[:MOST_RANKS]
    ]


def accusations(folder: RunFolder) -> list[dict[str, Any]] | None:
    """The ranks that were ever slow, in the form of `summary.json`; None if no rank was timed."""
    accused = TimedSteps.read(folder).accused
    return None if accused is None else list(map(asdict, accused))
