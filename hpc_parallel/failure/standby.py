"""A rank that waits beside a training for the next start on the same hosts, and has imported torch.

The batch script starts these ranks in a step of their own, with VARIABLE set, and says START on their
standard input when they shall begin. Any other word dismisses them (sbatch_templates/standby.sh.j2).
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from hpc_parallel.machine.fabric import site_variables
from hpc_parallel.record.attempts import is_starting
from hpc_parallel.record.run_folder import RunFolder

VARIABLE, START = "HPC_PARALLEL_STANDBY", "start\n"
_LOOK_EVERY_S = 5.0


def ready_worker(
    folder: RunFolder, command: Sequence[str], *, prepare: Callable[[], None]
) -> subprocess.Popen[str] | None:
    """Return a worker that begins now and has waited; None if this rank needs a new one.

    prepare: run in the worker before its program. Raises SystemExit if no start needs this rank.
    """
    if VARIABLE not in os.environ:
        return None
    site_variables(folder.read_config()["cluster"]["environment"], os.environ)
    # In place of submitit's handlers, which would requeue the job, and outlive it.
    signal.signal(signal.SIGUSR2, lambda number, frame: None)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Imports would slow the start of the ranks beside this one.
    while not select.select([sys.stdin], [], [], _LOOK_EVERY_S)[0] and is_starting(folder):
        pass
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, preexec_fn=prepare)
    del os.environ[VARIABLE]
    if sys.stdin.readline() != START:
        sys.exit()
    assert worker.stdin is not None
    with suppress(BrokenPipeError), worker.stdin:
        worker.stdin.write(START)
    return worker if worker.poll() is None else None  # memory may have run out while it waited


def await_start() -> None:
    """In the worker, after its imports: wait for its parent's word, or end."""
    if os.environ.pop(VARIABLE, None) is not None and sys.stdin.readline() != START:
        os._exit(0)
