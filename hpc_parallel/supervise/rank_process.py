"""One rank under Slurm: starts the worker, outlives it and says how it ended.

A process killed by a signal can't record that itself; its supervisor can. `run` is also the payload
that submitit pickles.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import FrameType

from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.supervise import failure
from hpc_parallel.supervise.fabric import site_variables
from hpc_parallel.supervise.supervisor import overseen
from hpc_parallel.supervise.world import World

WORKER = (sys.executable, "-u", "-m", "hpc_parallel.worker.main")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Slurm sends these to every process of a step, so the worker gets its own; submitit's handlers, which
# would requeue or raise in the midst of the wait, go too.
_SURVIVED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def run(run_folder: str, *, worker: tuple[str, ...] = WORKER) -> None:
    """Run this rank's worker to its end.

    Raises SystemExit with the worker's exit code, 128 + n after signal n: unlike an exception it
    passes through submitit without a traceback, and srun sees the code.
    """
    folder = RunFolder(Path(run_folder))
    world = World.discover(os.environ)
    failure.forget(folder, rank=world.rank)
    config = folder.read_config()
    site_variables(config["cluster"]["environment"], os.environ)  # OpenMP reads its own when torch loads it
    for number in _SURVIVED:
        signal.signal(number, _survive)  # not SIG_IGN, which the worker would inherit
    child = subprocess.Popen([*worker, run_folder], preexec_fn=partial(_prepare, os.getpid()))
    with overseen(folder, world=world, process=child.pid, timeout_s=config["cluster"].get("hang_timeout_s")):
        returncode = child.wait()
    if returncode != 0:
        failure.record_death(folder, world=world, returncode=returncode)
        sys.exit(returncode if returncode > 0 else 128 - returncode)


def _prepare(parent: int) -> None:
    """In the worker, before its program: a signal of Slurm's must not end it while it loads."""
    die_with_parent(parent)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def die_with_parent(parent: int, *, by: signal.Signals = signal.SIGKILL) -> None:
    """Ask Linux to send `by` to this process when `parent`, which started it, is gone (prctl(2))."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(by), 0, 0, 0)
    if os.getppid() != parent:  # gone before we could ask
        os._exit(1)


def _survive(number: int, frame: FrameType | None) -> None:
    """Go on waiting for the worker."""
