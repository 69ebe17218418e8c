"""How a run ended, from `summary.json`, which anybody may have written. `failure/summary.py` writes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.typed import read_if_possible, read_record

COMPLETED = "completed"
PREEMPTED = "preempted"  # the run starts again
INITIAL = "initial"  # weights that were not read from a file


@dataclass(frozen=True)
class Latency:
    """What `task=infer` measured with one batch size."""

    batch_size: float
    latency_s: float
    latency_p99_s: float
    samples_per_s: float
    tokens_per_s: float | None = None


@dataclass(frozen=True)
class RankState:
    """Bytes that one rank held."""

    parameters: float
    gradients: float
    optimizer: float  # its state

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class Summary:
    """The parts of the file that commands show besides its figures. Unknown parts are None or empty."""

    outcome: str | None = None
    world_size: float | None = None
    steps: float | None = None
    final_loss: float | None = None
    samples_per_s: float | None = None
    step_time_s: float | None = None
    ended: str | None = None  # ISO 8601, UTC
    step_parts_s: Mapping[str, float | None] = field(default_factory=dict)
    predicted: Mapping[str, float] = field(default_factory=dict)
    rank_state_bytes: tuple[RankState | None, ...] = ()
    shares: tuple[float | None, ...] | None = None
    statistics_samples: int | None = None
    in_bfloat16: str | None = None
    batch_sizes: tuple[Latency, ...] = ()
    weights: str | None = None
    comparison: str | None = None
    ended_early: str | None = None
    left_out: str | None = None

    @property
    def completed(self) -> bool:
        return self.outcome == COMPLETED

    @property
    def notes(self) -> list[str]:
        """Lines for people about the task."""
        return [note for note in (self.comparison, self.ended_early, self.left_out) if note]

    @classmethod
    def read(cls, folder: RunFolder) -> Summary | None:
        """None if there is no file. Raises DamagedError."""
        return read_record(cls, folder.summary)


def other_statistics(runs: Iterable[tuple[int | None, str]]) -> str:
    """That the losses of runs can't be compared, if BatchNorm sees other numbers of samples; empty otherwise.

    runs: over how many samples a run takes its statistics (None without BatchNorm), and its name.
    """
    names: dict[int, list[str]] = {}
    for count, name in runs:
        if count:
            names.setdefault(count, []).append(name)
    if len(names) < 2:
        return ""
    each = "; ".join(
        f"{count} samples in {_first_names(several)}" for count, several in sorted(names.items())
    )
    return (
        f"Losses can't be compared: BatchNorm takes its statistics over {each}. training.microbatch_size "
        "(times the replicas) decides it."
    )


def other_state(runs: Iterable[tuple[str | None, str]]) -> str:
    """That the losses of runs differ by what they keep in bfloat16; empty if all keep the same.

    runs: what a run keeps in bfloat16 (None: nothing), and its name.
    """
    names: dict[str, list[str]] = {}
    for kept, name in runs:
        names.setdefault(kept or "nothing", []).append(name)
    if len(names) < 2:
        return ""
    each = "; ".join(f"{kept} in {_first_names(several)}" for kept, several in sorted(names.items()))
    return (
        f"Losses differ by more than the layout: runs keep other parts in bfloat16: {each}. training.weights "
        "and optimizer.state decide it."
    )


def _first_names(names: list[str]) -> str:
    return ", ".join(names[:3]) + " ..." * (len(names) > 3)


def has_final_summary(folder: RunFolder) -> bool:
    """Whether the newest start of the run has ended and no restart follows, as far as the file says."""
    summary = read_if_possible(Summary, folder.summary)
    return summary is not None and summary.outcome not in (None, PREEMPTED)
