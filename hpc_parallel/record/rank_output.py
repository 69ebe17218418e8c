"""What a rank has printed last, as a terminal would show it. Anyone may have written the logs."""

from __future__ import annotations

from pathlib import Path

from hpc_parallel.problems import printable
from hpc_parallel.record.log_noise import is_noise
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import DamagedError, read_tail, status_of

_MOST_BYTES = 16 * 1024  # from the end of a log
_MOST_CHARACTERS = 500  # of a line


def last_output(folder: RunFolder) -> str | None:
    """The last line that rank 0 has printed, escaped; None if it has printed none.

    It is in the log that was written last: many scripts print their progress to stderr.
    """
    logs = [folder.log(0, stream) for stream in ("out", "err")]
    for log in sorted(logs, key=_written_ns, reverse=True):
        try:
            content = read_tail(log, limit_bytes=_MOST_BYTES)
        except (OSError, DamagedError):
            continue
        for line in reversed(content.decode(errors="replace").split("\n")):
            if (shown := shown_line(line)).strip() and not is_noise(line):
                return printable(shown.strip())
    return None


def shown_line(line: str) -> str:
    """What a terminal would show: a progress bar overwrites its line."""
    return line.rstrip("\r").rpartition("\r")[2][:_MOST_CHARACTERS]


def _written_ns(log: Path) -> int:
    status = status_of(log)
    return 0 if status is None or not status.st_size else status.st_mtime_ns
