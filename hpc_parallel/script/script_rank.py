"""Prepares one rank of `task=script`: its command, the variables that torchrun would set, and its start."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from hpc_parallel import job_context
from hpc_parallel.config.script import PLACEHOLDERS, arguments_of, fill, kind_of, name_of, resume_words
from hpc_parallel.failure import flight_recorder
from hpc_parallel.failure.process_tree import catches, receivers
from hpc_parallel.failure.summary import computed_as
from hpc_parallel.machine import fabric, fabric_kind
from hpc_parallel.machine.world import World
from hpc_parallel.record import attempts
from hpc_parallel.record.endings import Stop
from hpc_parallel.record.metrics_file import last_line
from hpc_parallel.record.owner import hold_by_job
from hpc_parallel.record.provenance import installed_packages
from hpc_parallel.record.run_folder import RunFolder, note_phase
from hpc_parallel.record.safe_read import DamagedError, read_json
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.slurm.allocation import own_step
from hpc_parallel.slurm.jobs import job_of
from hpc_parallel.slurm.short_forms import expand_hosts

SHARED = 20_000  # if the site names no port, the job id selects a port from here on
STRIDE = 4_999  # between the ports of two starts, because jobs that run beside each other have near ids
# Between those of two steps of a job, which may be two runs; none meets the ports of 8 starts.
STEP_STRIDE = 713
_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd")  # of NVIDIA and AMD


def command_of(
    folder: RunFolder, config: Mapping[str, Any], *, rank: int, variables: Mapping[str, str]
) -> tuple[list[str], Path, Path | None]:
    """The program with its arguments, its working directory, and what `script.resume_arguments` lack.

    variables: those of `set_variables`.
    """
    script, nodes, devices = config["script"], config["nodes"], config["gpus_per_node"]
    place = (variables["MASTER_ADDR"], variables["MASTER_PORT"])
    filled = (folder.path, rank, config["seed"], nodes, devices, nodes * devices, *place)
    values = dict(zip(PLACEHOLDERS, map(str, filled), strict=True))
    working = Path(fill(script["working_directory"], values))
    arguments, missing = arguments_of(script, values=values), None
    if restarts(folder):
        more, missing = resume_words(script, values=values, folder=working)
        arguments += more
    if script["file"]:  # a path in the kept source is relative to the run folder
        program = [sys.executable, "-u", str(folder.path / script["file"])]
    elif script["module"]:  # -P: import from the kept source, not from the working directory
        program = [sys.executable, "-u", "-P", "-m", script["module"]]
    else:
        command = script["command"]
        program = [str(folder.path / command) if os.sep in command else command]
    return [*program, *arguments], working, missing


def restarts(folder: RunFolder) -> int:
    """How many starts came before this one: as the folder records them, or as Slurm counts them."""
    return max(int(os.environ.get("SLURM_RESTART_COUNT", "0")), attempts.earlier_starts(folder))


def set_variables(
    folder: RunFolder, config: Mapping[str, Any], *, world: World, environment: MutableMapping[str, str]
) -> None:
    """Set the variables of a rank: those of torchrun, the network's, and the number of threads.

    Only the variables of torchrun replace what the user or the site has set. Raises DeviceError.
    """
    cluster = config["cluster"]
    fabric.use_scratch(cluster["scratch"], environment, host=world.host)
    flight_recorder.set_variables(folder, environment)
    per_node = config["gpus_per_node"]
    share = per_node * world.nodes // world.world_size  # ranks that the script starts, per rank of ours
    threads = max(1, fabric.cpu_threads(world, environment) // share)
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    environment.setdefault("PYTHONFAULTHANDLER", "1")  # a crash in C code writes its stack to the log
    nccl = config["device"] != "cpu" and any(map(os.path.exists, _GPU_DRIVERS))
    devices = fabric_kind.fabric_devices()
    fabric_kind.set_fabric(cluster["fabric"], devices, environment, nccl=nccl, one_machine=world.one_machine)
    fabric.set_interfaces(environment, world=world, hosts=world.hosts, suffix=cluster["master_suffix"])
    fabric.require_interfaces(environment, host=world.host, nccl=nccl)
    environment.pop("PYTHONSAFEPATH", None)  # only for our modules: a script imports what lies beside it
    if world.one_machine and config["nodes"] > 1:  # simulated nodes: each has its own GPUs, or none has
        visible, last = (
            visible_devices(environment, node=node, per_node=per_node)
            for node in (world.node, world.nodes - 1)
        )
        if visible is not None and last is not None:
            environment["CUDA_VISIBLE_DEVICES"] = visible
        elif nccl:
            fabric.share_gpu(environment, rank=world.rank)
    environment.update(torchrun_variables(folder, config, world=world, environment=environment))


def torchrun_variables(
    folder: RunFolder, config: Mapping[str, Any], *, world: World, environment: Mapping[str, str]
) -> dict[str, str]:
    """The variables that torchrun sets for a rank. Simulated nodes count their own ranks, as hosts do."""
    local_world_size, local_rank = world.local_world_size, world.local_rank
    if world.one_machine:
        local_world_size = world.world_size // world.nodes
        local_rank = world.rank % local_world_size
    start = restarts(folder)
    # torchrun's ranks meet under its own count. Other scripts resume if the count is above 0.
    by_torchrun = config["script"]["start"] == "torchrun"
    count = environment.get("TORCHELASTIC_RESTART_COUNT", "0") if by_torchrun else start
    address, port = rendezvous(config, world=world, environment=environment, start=start)
    values: dict[str, object] = {
        "RANK": world.rank, "WORLD_SIZE": world.world_size,
        "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_world_size,
        "GROUP_RANK": world.node, "GROUP_WORLD_SIZE": world.nodes,
        "ROLE_RANK": world.rank, "ROLE_WORLD_SIZE": world.world_size, "ROLE_NAME": "default",
        "MASTER_ADDR": address, "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": environment.get("TORCHELASTIC_RUN_ID", world.attempt),
        "TORCHELASTIC_RESTART_COUNT": count,
        "TORCHELASTIC_MAX_RESTARTS": environment.get("TORCHELASTIC_MAX_RESTARTS", "0"),
        "TORCHELASTIC_ERROR_FILE": error_file(folder, rank=world.rank),
        job_context.RUN: folder.path, job_context.RESTARTS: start,
        job_context.STOP: stop_prefix(folder, world=world),
    }  # fmt: skip
    return {name: str(value) for name, value in values.items()}


def rendezvous(
    config: Mapping[str, Any], *, world: World, environment: Mapping[str, str], start: int
) -> tuple[str, str]:
    """The address and the port at which rank 0 listens. torchrun and the local agent have chosen both.

    start: the number of earlier starts. No start uses the port of the one before, to which a rank that has
    not ended could still be connected.
    """
    cluster = config["cluster"]
    hosts = world.hosts or expand_hosts(environment.get("SLURM_JOB_NODELIST", ""))
    if world.launcher == "torchrun" and {"MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        address = environment["MASTER_ADDR"]
        is_name = (first := address.partition(".")[0]) in hosts  # torchrun writes the full name of the host
        address = first + cluster["master_suffix"] if is_name and cluster["master_suffix"] else address
        return address, environment["MASTER_PORT"]
    address = "127.0.0.1" if world.one_machine or not hosts else hosts[0] + cluster["master_suffix"]
    job = environment.get("SLURM_JOB_ID", "0")
    number = (int(job) if job.isdecimal() else 0) + STRIDE * start
    step = own_step(config["launcher"]["kind"], start=cluster["start"], environment=environment) or ""
    number += STEP_STRIDE * int(step) if step.isdecimal() else 0
    return address, str(cluster["port"] or SHARED + number % SHARED)


def visible_devices(environment: Mapping[str, str], *, node: int, per_node: int) -> str | None:
    """The GPUs of a simulated node among those of this machine; None if there are not enough for it."""
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        names = [str(index) for index, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
    else:
        names = [name for name in listed.split(",") if name]
    chosen = names[node * per_node : (node + 1) * per_node]
    return ",".join(chosen) if len(chosen) == per_node else None


def stop_prefix(folder: RunFolder, *, world: World) -> str:
    """The prefix of the files by which the ranks of this start agree on a step at which they stop.

    Some MPIs give every attempt the same name, so the prefix contains the number of earlier starts.
    """
    return str(folder.rendezvous / f"{world.attempt}-{restarts(folder)}.stop")


def error_file(folder: RunFolder, *, rank: int) -> Path:
    """Where `torch.distributed.elastic.multiprocessing.errors.record` writes an exception."""
    return folder.logs / f"rank-{rank}.error.json"


def begin(
    folder: RunFolder, config: Mapping[str, Any], *, world: World, environment: Mapping[str, str]
) -> None:
    """Record the start, on rank 0: which job runs here, on which hosts, with which packages.

    environment: the variables of the script.
    """
    if (job := job_of(os.environ)) is not None:
        kind, start = config["launcher"]["kind"], config["cluster"]["start"]
        hold_by_job(folder, job, step=own_step(kind, start=start, environment=os.environ))
    for rank in folder.logs.glob("rank-*.device.json"):  # an earlier start may have had more ranks
        rank.unlink(missing_ok=True)
    last = None
    with suppress(FileNotFoundError, DamagedError):
        last = last_line(folder.metrics)
    step, layout = (last or {}).get("step", 0), computed_as(config, {})
    attempts.begin(folder, step=step, environment=os.environ, layout=layout)
    submitted: dict[str, Any] = {}
    with suppress(DamagedError):
        submitted = read_json(folder.environment) or {}
    started = {
        "python": sys.version.split()[0],
        "ranks": [{"host": world.where(rank)} for rank in range(world.world_size)],
        "fabric": fabric.recorded(environment, also=config["cluster"]["environment"]),
        "packages": installed_packages(),
    }
    write_json(folder.environment, submitted | started)
    kind = "-m " if kind_of(config["script"]) == "module" else ""
    note_phase(folder, f"running {kind}{name_of(config['script'])}")


class Relay:
    """Passes signals on to the script, and remembers the one that asked it to stop.

    Slurm sends SIGUSR2 before the time limit and SIGTERM at a preemption. It sends both to the script too,
    unless mpirun has started the script.
    """

    def __init__(
        self, stop_signal: str, *, in_job: bool, reaches_all: bool, stop_prefix: str, patience_s: float = 0.0
    ) -> None:
        """in_job: Slurm sends the signals, not a local agent; reaches_all: the script receives them too.

        patience_s: how long the warning before the time limit waits for a script that has no handler yet.
        """
        self.stopped_by: str | None = None
        self._stop_prefix = stop_prefix
        self._stop = None if stop_signal == "none" else signal.Signals[stop_signal]
        self._in_job, self._reaches_all = in_job, reaches_all
        self._child: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []  # received before the script started
        self._has_asked = False  # a second stop signal could end the script while it saves
        self._patience_s, self._until_s = patience_s, math.inf  # until when the warning waits
        self._asking = threading.Lock()  # a signal may come while the watching thread asks

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._child is None:
            self._early.append(number)
            return
        if number in (signal.SIGUSR2, signal.SIGTERM):
            self.stopped_by = self.stopped_by or signal.Signals(number).name
            job_context.request_stop(self._stop_prefix)
        if number in (signal.SIGUSR2, signal.SIGTERM) and self._stop is not None:
            if number == self._stop and self._reaches_all:
                self._has_asked = True
            else:
                waits_s = self._patience_s if number == signal.SIGUSR2 else 0.0
                self._until_s = min(self._until_s, time.monotonic() + waits_s)
                self.ask()
        elif not self._reaches_all and number != signal.SIGUSR2:
            self._child.send_signal(number)

    def ask(self, is_last: bool = False) -> None:
        """Send the stop signal if it is due, and the script handles it or the patience ends."""
        if self._child is None or self._until_s == math.inf or not self._asking.acquire(blocking=False):
            return
        try:
            self._ask(self._child)
        finally:
            self._asking.release()

    def _ask(self, child: subprocess.Popen[bytes]) -> None:
        if self._stop is None or self._has_asked or child.returncode is not None:
            return
        processes = receivers(child.pid, self._stop)
        is_ready = all(catches(process, self._stop) for process in processes)
        for process in processes if is_ready or time.monotonic() >= self._until_s else ():
            with suppress(ProcessLookupError):
                self._has_asked = True
                os.kill(process, self._stop)

    def connect(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child
        reaches_all, self._reaches_all = self._reaches_all, False  # these signals came before the script
        for number in self._early:
            self(number, None)
        self._reaches_all = reaches_all

    def stop_of(self, returncode: int, *, requeue_codes: Sequence[int]) -> Stop | None:
        """The content of `stopped.json` if the script ended because it was asked to, or asks for a new start.

        returncode: as in subprocess, negative for a signal.
        """
        if returncode == -signal.SIGUSR2 and self._stop == signal.SIGUSR2:
            self.stopped_by = self.stopped_by or "SIGUSR2"  # Slurm signals one process after the other
        if returncode in requeue_codes:
            return Stop(signal=self.stopped_by, code=returncode)
        ends = {0}
        for number in (signal.SIGTERM, self._stop or signal.SIGTERM):
            ends |= {-int(number), 128 + int(number)}
        has_asked = self._stop is not None or job_context.has_agreed(self._stop_prefix)
        on_request = self.stopped_by is not None and has_asked and self._in_job and returncode in ends
        return Stop(signal=self.stopped_by, code=returncode) if on_request else None
