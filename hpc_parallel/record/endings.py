"""How the newest start of a run ended: `summary.json`, `failure.json` and `stopped.json`.

Anybody may have written `summary.json`. `failure/summary.py` writes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hpc_parallel.record.run_folder import FolderRecord, RunFolder
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.record.typed import read_if_possible, write_record

COMPLETED = "completed"
STARTS_AGAIN = "preempted"  # also after a failure or a time limit; the public word
PRUNED = "pruned"  # it was behind the other runs of its sweep, and saved its state
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
    """Bytes that one rank holds from the backward pass to the update."""

    parameters: int
    gradients: int
    optimizer: int  # its state

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class Summary(FolderRecord):
    """The parts of the file that commands show besides its figures. Unknown parts are None or empty."""

    _file = "summary"
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
    useful_share: float | None = None
    time_use_s: Mapping[str, float] = field(default_factory=dict)  # `time_use.CAUSES`
    energy: Mapping[str, float] = field(default_factory=dict)  # `time_use.energy_use`

    @property
    def completed(self) -> bool:
        return self.outcome == COMPLETED

    @property
    def ended_well(self) -> bool:
        """Whether the run did what it was to do; also one that `sweep.prune` has ended."""
        return self.outcome in (COMPLETED, PRUNED)

    @property
    def notes(self) -> list[str]:
        return [note for note in (self.comparison, self.ended_early, self.left_out) if note]


def other_statistics(runs: Iterable[tuple[int | None, str]]) -> str:
    """That the losses of runs can't be compared, if BatchNorm sees other numbers of samples; empty otherwise.

    runs: over how many samples a run takes its statistics (None without BatchNorm), and its name.
    """
    each = _differences(((count, name) for count, name in runs if count), unit=" samples")
    return each and (
        f"Losses can't be compared: BatchNorm takes its statistics over {each}. training.microbatch_size "
        "(times the replicas) decides it."
    )


def other_state(runs: Iterable[tuple[str | None, str]]) -> str:
    """That the losses of runs differ by what they keep in bfloat16; empty if all keep the same.

    runs: what a run keeps in bfloat16 (None: nothing), and its name.
    """
    each = _differences((kept or "nothing", name) for kept, name in runs)
    return each and (
        f"Losses differ by more than the layout: runs keep other parts in bfloat16: {each}. training.weights "
        "and optimizer.state decide it."
    )


def other_versions(runs: Iterable[tuple[str | None, str]]) -> str:
    """That runs differ by their software, too; empty if all known versions are the same.

    runs: the versions of a run (None: unknown), and its name.
    """
    each = _differences((versions, name) for versions, name in runs if versions)
    return each and f"Speeds and losses may differ by the software: {each}."


def _differences(runs: Iterable[tuple[Any, str]], *, unit: str = "") -> str:
    """Each value with the first names of its runs; empty if all have the same value."""
    names: dict[Any, list[str]] = {}
    for value, name in runs:
        names.setdefault(value, []).append(name)
    each = [
        f"{value}{unit} in {', '.join(several[:3])}{' ...' * (len(several) > 3)}"
        for value, several in sorted(names.items())
    ]
    return "; ".join(each) if len(each) > 1 else ""


def has_final_summary(folder: RunFolder) -> bool:
    """Whether the newest start of the run has ended and no restart follows, as far as the file says."""
    summary = read_if_possible(Summary, folder.summary)
    return summary is not None and summary.outcome not in (None, STARTS_AGAIN)


@dataclass(frozen=True)
class Follower:
    """A rank that failed after the first one."""

    rank: int
    host: str | None = None
    kind: str | None = None


@dataclass(frozen=True)
class Failure(FolderRecord):
    """The root cause: `failure.json`. `rank`, `host` and `node` are None if no rank is to blame."""

    _file = "failure"
    rank: int | None = None
    host: str | None = None
    node: int | None = None
    kind: str | None = None  # a constant of failure/failure.py
    message: str | None = None
    signal: str | None = None  # its name
    time: str | None = None  # ISO 8601, UTC
    traceback: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)  # depends on the kind
    followers: tuple[Follower, ...] = ()
    line: str | None = None  # a line of text that names the root cause

    def write(self, folder: RunFolder) -> None:
        write_record(folder.failure, self)


@dataclass(frozen=True)
class Stop(FolderRecord):
    """The signal at which the ranks saved their state, or the exit code of a script: `stopped.json`.

    Keys whose value is None are not written, except `signal`.
    """

    _file = "stopped"
    signal: str | None = None  # its name; None if a script asks for a new start by its exit code
    step: int | None = None  # the step whose checkpoint is complete
    kept: str | None = None  # what was kept of a task that can't continue
    code: int | None = None  # exit code of a script, as in subprocess
    time: str | None = None  # ISO 8601, UTC
    how: str | None = None  # a constant of failure/restart.py; known only after the job has ended
    line: str | None = None  # known only after the job has ended

    def write(self, folder: RunFolder) -> None:
        values = {key: value for key, value in asdict(self).items() if value is not None or key == "signal"}
        write_json(folder.stopped, values)
