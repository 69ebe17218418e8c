"""The parent process of one rank under Slurm: it starts the worker and records how the worker ended.

A process killed by a signal can't record that itself, but its parent can. `run` is also the payload that
submitit pickles.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from hpc_parallel.config.script import is_script
from hpc_parallel.failure import failure, normal_end, oom
from hpc_parallel.failure.standby import ready_worker
from hpc_parallel.failure.supervisor import Supervisor, watching
from hpc_parallel.machine.fabric import site_variables
from hpc_parallel.machine.world import World
from hpc_parallel.record.run_folder import RunFolder, note_phase
from hpc_parallel.record.safe_read import size_of
from hpc_parallel.record.values import table

SCRIPT = "hpc_parallel.script.script_process:run_script"  # what runs in place of a worker
WORKER = (sys.executable, "-u", "-m", "hpc_parallel.worker.main")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Slurm sends these signals to every process of a step, so the worker receives them too. Ignoring them also
# replaces submitit's handlers, which would requeue the job or raise during the wait.
STEP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# The rank itself says when the recorded steps begin and end (cudaProfilerStart and Stop). Nsight Systems ends
# its record there and lets the rank run on.
PROFILERS: Mapping[str, Sequence[str]] = {
    "nsys": (
        "profile", "--trace=cuda,nvtx,osrt,cudnn,cublas", "--sample=none", "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop", "--kill=none", "--force-overwrite=true",
    ),
    "ncu": ("--profile-from-start=off", "--nvtx", "--target-processes=all", "--force-overwrite"),
}  # fmt: skip
PROFILER_OUTPUT = {"nsys": "--output", "ncu": "--export"}


class ProfilerError(RuntimeError):
    """The profiler is not on this host."""


def run(run_folder: str, *, worker: tuple[str, ...] = WORKER, is_local: bool = False) -> None:
    """Run this rank's worker, or the user's script in its place, to its end.

    is_local: whether the local agent started this process, on a simulated node.

    Raises SystemExit with the worker's exit code, or 128 + n after signal n. Unlike other exceptions it
    passes through submitit without a traceback, and srun receives the code.
    """
    folder = RunFolder(Path(run_folder))
    world, prepare = World.discover(os.environ), partial(prepare_child, os.getpid())
    ready = ready_worker(folder, [*worker, run_folder], prepare=prepare)
    failure.forget(folder, rank=world.rank)
    log_start = size_of(folder.log(world.rank, "err"))
    config, kills = folder.read_config(), oom.cgroup_kills()
    site_variables(config["cluster"]["environment"], os.environ)  # before torch loads OpenMP
    if is_script(config):
        if is_local:  # torchrun of a simulated node knows its own ranks only
            os.environ.pop("SLURM_RESTART_COUNT", None)  # set by an allocation around this run
            world = replace(world, local_rank=world.rank, local_world_size=world.world_size)
        resolve_name(SCRIPT)(folder, config, world=world, in_job=not is_local, kills=kills)
        return
    if world.rank == 0:
        note_phase(folder, "importing torch")
    for number in STEP_SIGNALS:
        # Continue to wait for the worker. Not SIG_IGN, which the worker would inherit.
        signal.signal(number, lambda number, frame: None)
    try:
        profiler = profiler_words(config, folder=folder, rank=world.rank, host=world.host)
    except ProfilerError as error:
        failure.record_exception(folder, world=world, error=error)
        sys.exit(str(error))
    child = ready or subprocess.Popen([*profiler, *worker, run_folder], preexec_fn=prepare)
    checks = []
    if (timeout_s := config["cluster"].get("hang_timeout_s")) is not None:
        checks.append(Supervisor(folder, world=world, process=child.pid, timeout_s=timeout_s))
    with watching(checks):
        returncode = child.wait()
        outlive_signals()
    if returncode != 0:
        cgroup = oom.killing_cgroup(kills)
        failure.record_death(folder, world=world, returncode=returncode, log_start=log_start, cgroup=cgroup)
        sys.exit(exit_code(returncode))
    normal_end.record(folder, world=world)


def profiler_words(config: Mapping[str, Any], *, folder: RunFolder, rank: int, host: str) -> list[str]:
    """The words before the rank's command; empty for a rank that is not recorded.

    `config`: the run's configuration as plain values. Raises ProfilerError.
    """
    profile = table(config.get("profile"))
    kind = str(profile.get("kind"))
    if kind not in PROFILERS or rank not in profile["ranks"]:
        return []
    if shutil.which(kind) is None:
        raise ProfilerError(f"profile={kind}: there is no {kind} on {host}. Try launcher.modules=[MODULE].")
    folder.profile.mkdir(mode=0o700, exist_ok=True)
    output = f"{PROFILER_OUTPUT[kind]}={folder.profile}/rank-{rank}"
    return [kind, *PROFILERS[kind], output, *map(str, profile["arguments"])]


def exit_code(returncode: int) -> int:
    return returncode if returncode > 0 else 128 - returncode


def prepare_child(parent: int, *, handles: str = "none") -> None:
    """Run in the worker before its program: Slurm's SIGUSR2 must not end the worker while it loads.

    handles: the signal at which a script saves. SIGUSR2 is not ignored if the script handles it, because
    Lightning sets no handler for an ignored signal. Then SIGUSR2 may end the script before it has a handler,
    and the script starts again.
    """
    die_with_parent(parent)
    if handles != "SIGUSR2":
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def die_with_parent(parent: int, *, by: signal.Signals = signal.SIGKILL) -> None:
    """Ask Linux to send the signal `by` to this process when its `parent` has ended (prctl(2))."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(by), 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


def outlive_signals() -> None:
    """Ignore signals until this process has ended.

    Python removes its handlers before it exits, so that a signal could end it then. Slurm would record the
    job as FAILED, even if the run has completed.
    """
    for number in STEP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def signal_ranks(arguments: Sequence[str]) -> None:
    """Send a signal to the ranks of a run on this host: not every mpirun passes signals on.

    arguments: the run folder and the name of the signal, such as USR2.
    """
    folder, name = arguments
    pids = ranks_here(folder)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.Signals[f"SIG{name}"])
    if pids:
        print(f"sent SIG{name} to {len(pids)} processes on {platform.node()}")


def ranks_here(folder: str) -> list[int]:
    """Process ids of this user's ranks of the run on this host."""
    import psutil

    worker = [*WORKER[-2:], folder]  # -m hpc_parallel.worker.main
    parent = ["-m", "hpc_parallel.job", "rank", folder]  # a script's parent passes the signal on
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "uids"])
        if (command := process.info["cmdline"] or [])[-3:] == worker or command[1:] == parent
        if process.info["uids"].real == os.geteuid()
    ]
