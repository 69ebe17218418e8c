"""Files that tasks write besides metrics: `generated.jsonl`, `calibration.json` and `timeline.json`.

Anybody may have written them. `record/collectives_file.py` has `collectives.json`, and
`record/recorded_preflight.py` has `machine_check.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, NamedTuple

from hpc_parallel.record.run_folder import FolderRecord, RunFolder
from hpc_parallel.record.safe_read import MIB, parse_line, read_head
from hpc_parallel.record.safe_write import write_json, write_text
from hpc_parallel.record.typed import WHOLE, build, first, read_if_possible, write_record

SHOWN_BYTES = 16 * MIB  # of generated.jsonl
MOST_LINES = 100  # of calibration.json
MAX_RANKS, MAX_CHUNKS = 256, 10_000  # of timeline.json


@dataclass(frozen=True)
class CalibrationFile(FolderRecord):
    """The content of `calibration.json`. lines: for people; rows: each measurement of a device."""

    _file = "calibration"
    lines: Annotated[tuple[str, ...], first(MOST_LINES)] = ()
    rows: tuple[Mapping[str, Any], ...] = ()

    def write(self, folder: RunFolder) -> None:
        write_record(folder.calibration, self)


@dataclass(frozen=True)
class Continued:
    """A line of `generated.jsonl`: a prompt and the text that follows it."""

    prompt: str | None = None
    text: str | None = None
    prompt_tokens: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()

    @classmethod
    def read_first(cls, folder: RunFolder) -> list[Continued]:
        """The lines in the first SHOWN_BYTES of a file of any length."""
        try:
            content = read_head(folder.generated, limit_bytes=SHOWN_BYTES)
        except FileNotFoundError:
            return []
        lines = (build(cls, parse_line(line)) for line in content.splitlines())
        return [line for line in lines if line is not None]


def write_generated(folder: RunFolder, lines: Sequence[Continued]) -> None:
    write_text(folder.generated, "".join(json.dumps(asdict(line)) + "\n" for line in lines))


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
    """The content of `timeline.json`: what the stages of the first pipeline did in one timed step."""

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
