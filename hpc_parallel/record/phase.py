"""What a run does beside its steps, at its start and end: a line of text in `phase`, replaced at each phase.

Its writer is the process that starts the ranks, then rank 0. Anyone may have written what is read.
"""

from __future__ import annotations

from contextlib import suppress

from hpc_parallel.problems import printable
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import DamagedError, read_head
from hpc_parallel.record.safe_write import write_text

_MOST_BYTES = 100


def note_phase(folder: RunFolder, text: str) -> None:
    """Say what begins now. A full disk must not end a run, so errors are ignored."""
    with suppress(OSError):
        write_text(folder.phase, f"{text}\n")


def read_phase(folder: RunFolder) -> str | None:
    """What the run does now; None if it has not said it."""
    try:
        content = read_head(folder.phase, limit_bytes=_MOST_BYTES)
    except (OSError, DamagedError):
        return None
    lines = content.decode(errors="replace").splitlines()
    return printable(lines[0]) if lines else None
