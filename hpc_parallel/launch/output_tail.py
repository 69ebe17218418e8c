"""The lines that a script prints, while it runs and in any amount."""

from __future__ import annotations

import os
from pathlib import Path

from hpc_parallel.record.rank_output import shown_line
from hpc_parallel.record.safe_read import DamagedError, open_regular
from hpc_parallel.supervise.script_failure import size_of

_MOST_BYTES = 16 * 1024  # in one read


class OutputTail:
    """Reads the lines that were added to a log since the last read; of many, only the last ones."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset_bytes = size_of(path)  # what an earlier start has printed is not shown

    def read(self, *, last: bool = False) -> list[str]:
        """The new lines. last: also one without its line end, because nothing will follow."""
        try:
            with open_regular(self._path) as file:
                end = file.seek(0, os.SEEK_END)
                skipped = max(0, end - self._offset_bytes - _MOST_BYTES)
                file.seek(self._offset_bytes + skipped)
                added = file.read(_MOST_BYTES)
        except (OSError, DamagedError):
            return []
        whole = added if last else added[: added.rfind(b"\n") + 1]
        if not whole and len(added) < _MOST_BYTES:
            return []
        whole = whole or added  # one line of megabytes
        self._offset_bytes += skipped + len(whole)
        lines = [shown_line(line) for line in whole.decode(errors="replace").removesuffix("\n").split("\n")]
        return [f"({skipped:,} bytes are not shown: {self._path})", *lines[1:]] if skipped else lines
