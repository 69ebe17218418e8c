"""What a run does at its start and end, outside its steps: a line in `phase`, which each phase replaces.

First the process that starts the ranks writes the line, and then rank 0. A reader must not trust the line,
because anyone may have written it.
"""

from __future__ import annotations

from contextlib import suppress

from hpc_parallel.problems import printable
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import DamagedError, read_head
from hpc_parallel.record.safe_write import write_text

_MOST_BYTES = 100


def note_phase(folder: RunFolder, text: str) -> None:
    """Record what begins now. A full disk must not end a run, so errors are ignored."""
    with suppress(OSError):
        write_text(folder.phase, f"{text}\n")


def read_phase(folder: RunFolder) -> str | None:
    """What the run does now; None if the run has not recorded it."""
    try:
        content = read_head(folder.phase, limit_bytes=_MOST_BYTES)
    except (OSError, DamagedError):
        return None
    lines = content.decode(errors="replace").splitlines()
    return printable(lines[0]) if lines else None
