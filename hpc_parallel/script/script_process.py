"""The parent process of one rank of `task=script`: it starts the script and records how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from hpc_parallel.config.script import name_of
from hpc_parallel.failure import failure, flight_recorder, hang_report, normal_end, oom
from hpc_parallel.failure.process_tree import adopt_orphans, end_descendants
from hpc_parallel.failure.rank_process import STEP_SIGNALS, exit_code, outlive_signals, prepare_child
from hpc_parallel.failure.supervisor import watching
from hpc_parallel.machine.fabric import DeviceError
from hpc_parallel.machine.world import World
from hpc_parallel.record.run_folder import RunFolder, note_phase
from hpc_parallel.record.safe_read import size_of
from hpc_parallel.record.safe_write import open_append
from hpc_parallel.script import script_failure, script_rank
from hpc_parallel.script.script_metrics import DeviceWatch, MetricsWriter


def run_script(
    folder: RunFolder, config: dict[str, Any], *, world: World, in_job: bool, kills: Mapping[str, int]
) -> None:
    """Like `rank_process.run`, but for a user's script. Processes that the script leaves behind are ended."""
    adopt_orphans()
    script_rank.error_file(folder, rank=world.rank).unlink(missing_ok=True)  # of an earlier start
    script = config["script"]
    launcher = config["launcher"]
    relay = script_rank.Relay(
        script["stop_signal"], in_job=in_job,
        reaches_all=in_job and world.launcher in ("slurm", "torchrun"),
        stop_prefix=script_rank.stop_prefix(folder, world=world),
        patience_s=min(launcher["grace_s"], 30 * launcher["time_minutes"]) / 2,
    )  # fmt: skip
    for number in STEP_SIGNALS:
        signal.signal(number, relay)
    log_start = size_of(folder.log(world.rank, "err"))
    checks: list[Callable[[bool], None]] = [relay.ask]
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
        command, working, missing = script_rank.command_of(
            folder, config, rank=world.rank, variables=variables
        )
        if world.rank == 0 and missing is not None:
            note_phase(folder, f"running {name_of(script)} from its beginning: there is no {missing}")
        logs = [open_append(folder.log(world.rank, stream)) for stream in ("out", "err")]
        with os.fdopen(logs[0], "ab") as out, os.fdopen(logs[1], "ab") as err:
            child = subprocess.Popen(
                command, cwd=working, env=variables,
                preexec_fn=partial(prepare_child, os.getpid(), handles=script["stop_signal"]),
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
        outlive_signals()
        end_descendants()
    stop = relay.stop_of(returncode, requeue_codes=script["requeue_codes"])
    # After another rank's failure srun ends this rank. This does not count as a stop.
    if stop is not None and not failure.records(folder):
        stop.write(folder)
        return  # with 0, so that srun lets the other ranks save
    has_reason = returncode == -signal.SIGABRT and script_failure.was_aborted_at_exit(
        folder, rank=world.rank, log_start=log_start
    )
    cgroup = oom.killing_cgroup(kills)
    if returncode > 0 or has_reason:
        script_failure.record(folder, world=world, returncode=returncode, log_start=log_start, cgroup=cgroup)
    elif returncode < 0:
        failure.record_death(folder, world=world, returncode=returncode, log_start=log_start, cgroup=cgroup)
    if returncode != 0:
        sys.exit(exit_code(returncode))
    normal_end.record(folder, world=world)
