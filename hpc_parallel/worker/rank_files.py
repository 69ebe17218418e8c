"""The files of a rank's process: how many it may have open, and where its output goes."""

from __future__ import annotations

import faulthandler
import os
import resource
import sys

from hpc_parallel.machine.world import World
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import open_append

RESERVE = 512  # libraries, logs, data, devices
MOST = 2**20  # if the system has no limit


def raise_limit() -> int:
    """Raise this process's limit of open files to what the system allows. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MOST if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


def needed(world: World) -> int:
    """The number of open files that this rank may need.

    A rank may send to every other rank. Rank 0 also has the store, with up to two connections of each rank,
    and receives the plan of a checkpoint from each rank. docs/performance.md has the counts.
    """
    return RESERVE + world.world_size * (4 if world.rank == 0 else 1)


def shortage(limit: int, world: World) -> str | None:
    """Why `limit` is too low for this start, with what to do; None if it is not."""
    if (files := needed(world)) <= limit:
        return None
    return (
        f"rank {world.rank} on {world.host} may have {limit:,} files open, and {world.world_size:,} ranks "
        f'may need {files:,} there: a connection can fail with "Too many open files". The system sets this '
        f"limit. Ask the administrators for LimitNOFILE={files} or more for slurmd (`ulimit -Hn` shows it)."
    )


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
