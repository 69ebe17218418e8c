"""Files that tasks write besides metrics: `generated.jsonl` and `calibration.json`.

Anybody may have written them. `record/collectives_file.py` has `collectives.json`, and
`record/machine_check_table.py` has `machine_check.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import MIB, parse_line, read_head
from hpc_parallel.record.safe_write import write_text
from hpc_parallel.record.typed import build, first, read_record, write_record

SHOWN_BYTES = 16 * MIB  # of generated.jsonl
MOST_LINES = 100  # of calibration.json


@dataclass(frozen=True)
class CalibrationFile:
    """The content of `calibration.json`. lines: for people; rows: each measurement of a device."""

    lines: Annotated[tuple[str, ...], first(MOST_LINES)] = ()
    rows: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def read(cls, folder: RunFolder) -> CalibrationFile | None:
        """None if there is no file. Raises DamagedError."""
        return read_record(cls, folder.calibration)

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
