"""Redirects a rank's output to `logs/rank-<r>.out` and `.err`."""

from __future__ import annotations

import faulthandler
import os
import sys

from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import open_append


def redirect(folder: RunFolder, *, rank: int) -> None:
    """Redirect this process's stdout and stderr, including output of C code, to the rank's files.

    Appends, so that a requeued run keeps its earlier output. A crash in C code writes its stack to the
    `.err` file.
    """
    for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
        stream.flush()
        target = open_append(folder.log(rank, name))
        os.dup2(target, 1 if name == "out" else 2)
        os.close(target)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    faulthandler.enable(sys.stderr)
