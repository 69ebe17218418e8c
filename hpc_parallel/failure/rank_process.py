"""The parent process of one rank under Slurm: it starts the worker and records how the worker ended.

A process killed by a signal can't record that itself, but its parent can. `run` is also the payload that
submitit pickles.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from hpc_parallel.failure import (
    failure,
    flight_recorder,
    hang_report,
    normal_end,
    oom,
    script_failure,
    script_rank,
)
from hpc_parallel.failure.nvidia_profiler import ProfilerError, profiler_words
from hpc_parallel.failure.process_tree import adopt_orphans, end_descendants
from hpc_parallel.failure.script_metrics import DeviceWatch, MetricsWriter
from hpc_parallel.failure.supervisor import Supervisor, watching
from hpc_parallel.machine.fabric import DeviceError, site_variables
from hpc_parallel.machine.world import World
from hpc_parallel.record.phase import note_phase
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import size_of
from hpc_parallel.record.safe_write import open_append

WORKER = (sys.executable, "-u", "-m", "hpc_parallel.worker.main")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Slurm sends these signals to every process of a step, so the worker receives them too. Ignoring them also
# replaces submitit's handlers, which would requeue the job or raise during the wait.
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def run(run_folder: str, *, worker: tuple[str, ...] = WORKER, is_local: bool = False) -> None:
    """Run this rank's worker, or the user's script in its place, to its end.

    is_local: whether the local agent started this process, on a simulated node.

    Raises SystemExit with the worker's exit code, or 128 + n after signal n. Unlike other exceptions it
    passes through submitit without a traceback, and srun receives the code.
    """
    folder = RunFolder(Path(run_folder))
    world = World.discover(os.environ)
    failure.forget(folder, rank=world.rank)
    config, kills = folder.read_config(), oom.cgroup_kills()
    site_variables(config["cluster"]["environment"], os.environ)  # before torch loads OpenMP
    if script_rank.is_script(config):
        if is_local:  # torchrun of a simulated node knows its own ranks only
            os.environ.pop("SLURM_RESTART_COUNT", None)  # set by an allocation around this run
            world = replace(world, local_rank=world.rank, local_world_size=world.world_size)
        _run_script(folder, config, world=world, in_job=not is_local, kills=kills)
        return
    if world.rank == 0:
        note_phase(folder, "importing torch")
    for number in _IGNORED:
        signal.signal(number, _ignore)  # not SIG_IGN, which the worker would inherit
    try:
        profiler = profiler_words(config, folder=folder, rank=world.rank, host=world.host)
    except ProfilerError as error:
        failure.record_exception(folder, world=world, error=error)
        sys.exit(str(error))
    child = subprocess.Popen([*profiler, *worker, run_folder], preexec_fn=partial(_prepare, os.getpid()))
    checks = []
    if (timeout_s := config["cluster"].get("hang_timeout_s")) is not None:
        checks.append(Supervisor(folder, world=world, process=child.pid, timeout_s=timeout_s))
    with watching(checks):
        returncode = child.wait()
        _outlive_signals()
    if returncode != 0:
        cgroup = oom.killing_cgroup(kills)
        failure.record_death(folder, world=world, returncode=returncode, cgroup=cgroup)
        sys.exit(_exit_code(returncode))
    normal_end.record(folder, world=world)


def _run_script(
    folder: RunFolder, config: dict[str, Any], *, world: World, in_job: bool, kills: Mapping[str, int]
) -> None:
    """Like `run`, but for a user's script. Processes that the script leaves behind are ended."""
    adopt_orphans()
    script_rank.error_file(folder, rank=world.rank).unlink(missing_ok=True)  # of an earlier start
    script = config["script"]
    relay = script_rank.Relay(
        script["stop_signal"], in_job=in_job,
        reaches_all=in_job and world.launcher in ("slurm", "torchrun"),
        stop_prefix=script_rank.stop_prefix(folder, world=world),
    )  # fmt: skip
    for number in _IGNORED:
        signal.signal(number, relay)
    log_start = size_of(folder.log(world.rank, "err"))
    checks: list[Callable[[bool], None]] = []
    if world.rank == 0:
        checks.append(MetricsWriter(folder, pattern=script["metrics"]))
    hang_report.forget(folder, world=world)
    variables = dict(os.environ)
    timeout_s = config["cluster"]["hang_timeout_s"]
    pipes = ExitStack()
    try:
        script_rank.set_variables(folder, config, world=world, environment=variables)
        # Otherwise a script has ranks of its own, or a command enters a container that lacks the folder.
        if timeout_s is not None and script["start"] == "ranks" and not script["command"]:
            with suppress(OSError):  # a full disk, or one without pipes: NCCL is not asked then
                place = tempfile.TemporaryDirectory(prefix="hpc_parallel-", ignore_cleanup_errors=True)
                flight_recorder.add_pipe(variables, folder=pipes.enter_context(place), rank=world.rank)
        if world.rank == 0:
            script_rank.begin(folder, config, world=world, environment=variables)
        command, working = script_rank.command_of(folder, config, rank=world.rank, variables=variables)
        logs = [open_append(folder.log(world.rank, stream)) for stream in ("out", "err")]
        with os.fdopen(logs[0], "ab") as out, os.fdopen(logs[1], "ab") as err:
            child = subprocess.Popen(
                command, cwd=working, env=variables,
                preexec_fn=partial(_prepare, os.getpid(), handles=script["stop_signal"]),
                close_fds=False,  # PMI_FD of MPI; our own files close themselves
                stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            )  # fmt: skip
    except (DeviceError, OSError) as error:  # no such program on this host, for example
        failure.record_exception(folder, world=world, error=error)
        sys.exit(str(error))
    relay.connect(child)
    checks.append(DeviceWatch(folder, world=world, process=child.pid, environment=variables))
    if timeout_s is not None:
        supervisor = script_failure.ScriptSupervisor(
            folder, world=world, process=child.pid, timeout_s=timeout_s, environment=variables
        )
        checks.append(supervisor)
    with pipes, watching(checks):
        returncode = child.wait()
        _outlive_signals()
        end_descendants()
    stop = relay.stop_of(returncode, requeue_codes=script["requeue_codes"])
    # After another rank's failure srun ends this rank. This does not count as a stop.
    if stop is not None and not failure.records(folder):
        stop.write(folder)
        return  # with 0, so that srun lets the other ranks save
    has_reason = returncode == -signal.SIGABRT and script_failure.was_aborted_at_exit(
        folder, rank=world.rank, log_start=log_start
    )
    if returncode > 0 or has_reason:
        script_failure.record(folder, world=world, returncode=returncode, log_start=log_start)
    elif returncode < 0:
        cgroup = oom.killing_cgroup(kills)
        failure.record_death(folder, world=world, returncode=returncode, cgroup=cgroup)
    if returncode != 0:
        sys.exit(_exit_code(returncode))
    normal_end.record(folder, world=world)


def _exit_code(returncode: int) -> int:
    return returncode if returncode > 0 else 128 - returncode


def _prepare(parent: int, *, handles: str = "none") -> None:
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


def _outlive_signals() -> None:
    """Ignore signals until this process has ended.

    Python removes its handlers before it exits, so that a signal could end it then. Slurm would record the
    job as FAILED, even if the run has completed.
    """
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Continue to wait for the worker."""
