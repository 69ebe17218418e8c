"""Reads the figures that a script prints, by a pattern of the user's, into `metrics.jsonl`."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

from hpc_parallel.record.attempts import keep_metrics
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import DamagedError, open_regular
from hpc_parallel.record.safe_write import append_line
from hpc_parallel.record.values import finite

_PERIOD_S = 1.0
_MOST_BYTES = 2**20  # in one read; a longer line is cut


@contextmanager
def reading(folder: RunFolder, *, pattern: str | None, start_bytes: int) -> Iterator[None]:
    """While the block runs, read the lines that rank 0 prints, from byte `start_bytes` of its log."""
    if pattern is None:
        yield
        return
    ended = threading.Event()
    arguments = (folder, re.compile(pattern), start_bytes, ended)
    thread = threading.Thread(target=_read, args=arguments, name="metrics")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _read(folder: RunFolder, pattern: re.Pattern[str], offset: int, ended: threading.Event) -> None:
    is_last, is_first = False, True
    while not is_last:
        is_last = ended.wait(_PERIOD_S)
        with suppress(OSError, DamagedError), open_regular(folder.log(0, "out")) as file:
            file.seek(offset)
            while added := file.read(_MOST_BYTES):
                cut = added.rfind(b"\n") + 1 or (len(added) if is_last or len(added) == _MOST_BYTES else 0)
                for line in added[:cut].decode(errors="replace").splitlines():
                    if (figures := figures_of(line, pattern)) is not None:
                        if is_first:  # a restart repeats steps
                            keep_metrics(folder, until=figures["step"] - 1)
                        is_first = False
                        append_line(folder.metrics, figures)
                offset += cut
                file.seek(offset)
                if not cut:
                    break


def figures_of(line: str, pattern: re.Pattern[str]) -> dict[str, Any] | None:
    """The figures in one line of output; None if it has no step. A figure that is not finite is null."""
    if (match := pattern.search(line)) is None:
        return None
    try:
        values = {key: finite(float(text)) for key, text in match.groupdict().items() if text is not None}
        step = values.pop("step", None)
    except ValueError:  # the group took something that is no number
        return None
    return None if step is None else {"step": int(step), **values, "time": datetime.now(UTC).isoformat()}
