"""What the stages of a pipeline did in one timed step: `timeline.json`, which anybody may have written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.record.typed import WHOLE, first, read_if_possible

MAX_RANKS, MAX_CHUNKS = 256, 10_000


class StageWork(NamedTuple):
    """Work of a stage. Times are seconds since the start of the step. In the file, it is a list."""

    start_s: float
    end_s: float
    stage: int
    kind: str  # `strategies.pipeline.busy` lists the kinds
    microbatch: int | None


@dataclass(frozen=True)
class RankTimeline:
    """One rank. waiting: when it waited for other ranks, as (start, end)."""

    rank: int
    length_s: float  # of the step
    chunks: Annotated[tuple[StageWork, ...], WHOLE]
    waiting: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class StepTimeline:
    """The content of `timeline.json`: the ranks of the first pipeline."""

    ranks: Annotated[tuple[RankTimeline, ...], first(MAX_RANKS), WHOLE]
    columns: tuple[str, ...] = StageWork._fields

    @classmethod
    def read(cls, folder: RunFolder) -> tuple[RankTimeline, ...]:
        """The ranks; empty if the file can't be read, or is too large to be drawn."""
        timeline = read_if_possible(cls, folder.timeline)
        ranks = timeline.ranks if timeline is not None else ()
        return ranks if sum(len(rank.chunks) for rank in ranks) <= MAX_CHUNKS else ()

    def write(self, folder: RunFolder) -> None:
        write_json(folder.timeline, {"columns": self.columns, "ranks": list(map(vars, self.ranks))})
