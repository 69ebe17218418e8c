"""What a rank prints, as a terminal would show it. Anyone may have written the logs."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from hpc_parallel.problems import printable
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import DamagedError, open_regular, read_head, read_tail, size_of, status_of

_MOST_BYTES = 16 * 1024  # in one read
_MOST_CHARACTERS = 500  # of a line
WARNS, _MOST_WARNINGS = "WARNING: ", 20
# torch's store looks up the host name of each connection (c10d/socket.cpp, `formatSockAddr`). If the site's
# DNS has no name for the address, every rank prints this warning. The environment variable that hides it
# hides every other warning too, so commands that show a log leave the line out. The file keeps it.
_HOST_NAME = re.compile(
    r"(\[rank\d+\]:)?\[W[^\]]*\] \[c10d\] The hostname of the client socket cannot be retrieved\. err=-?\d+"
)


class OutputTail:
    """Reads the lines that were added to a log since the last read. Of long output, it reads only the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset_bytes = size_of(path)  # what an earlier start has printed is not shown

    def read(self, *, last: bool = False) -> list[str]:
        """The new lines. last: include an unfinished last line, because nothing will follow."""
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
        lines = [_shown(line) for line in whole.decode(errors="replace").removesuffix("\n").split("\n")]
        return [f"({skipped:,} bytes are not shown: {self._path})", *lines[1:]] if skipped else lines


def last_output(folder: RunFolder) -> str | None:
    """The last line that rank 0 has printed, escaped; None if it has printed none.

    The log that was written last is read first, because many scripts print their progress to stderr.
    """
    logs = [folder.log(0, stream) for stream in ("out", "err")]
    for log in sorted(logs, key=_written_ns, reverse=True):
        try:
            content = read_tail(log, limit_bytes=_MOST_BYTES)
        except (OSError, DamagedError):
            continue
        for line in reversed(content.decode(errors="replace").split("\n")):
            if (text := _shown(line)).strip() and not is_noise(line):
                return printable(text.strip())
    return None


def warnings_of(folder: RunFolder) -> list[str]:
    """The first and the last warnings that rank 0 has printed, each once, escaped."""
    warnings: dict[str, None] = {}
    for stream in ("out", "err"):
        for read in (read_head, read_tail):
            with suppress(OSError, DamagedError):
                lines = read(folder.log(0, stream), limit_bytes=_MOST_BYTES).decode(errors="replace")
                warnings |= dict.fromkeys(line for line in lines.split("\n") if line.startswith(WARNS))
    texts = [printable(_shown(line.removeprefix(WARNS))) for line in warnings]
    half = _MOST_WARNINGS // 2
    return [*texts[:half], *texts[half:][-half:]]


def is_noise(line: str) -> bool:
    """Whether a line of a rank's log says nothing about the run."""
    return _HOST_NAME.fullmatch(line.rstrip()) is not None


def _shown(line: str) -> str:
    """What a terminal would show: a progress bar overwrites its line."""
    text = line.rstrip("\r").rpartition("\r")[2]
    end = f" ... ({len(text):,} characters)" if len(text) > _MOST_CHARACTERS else ""
    return text[:_MOST_CHARACTERS] + end


def _written_ns(log: Path) -> int:
    status = status_of(log)
    return 0 if status is None or not status.st_size else status.st_mtime_ns
