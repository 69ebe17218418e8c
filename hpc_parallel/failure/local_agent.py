"""The agent of a local run: it forks all ranks on this machine from one process that has imported torch.

It starts each rank of a user's script as a separate program.

`python -m hpc_parallel.job agent RUN_FOLDER`. The nodes are simulated: each rank sees the variables that
torchrun sets.
"""

from __future__ import annotations

import argparse
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from hpc_parallel.config.script import TORCHRUN, is_script
from hpc_parallel.failure import failure, normal_end
from hpc_parallel.failure.conclude_run import after_failure, conclude, tell_end
from hpc_parallel.failure.process_tree import adopt_orphans, end_descendants
from hpc_parallel.failure.rank_process import die_with_parent
from hpc_parallel.failure.restart import END, IN_PLACE, Decision
from hpc_parallel.failure.root_cause import ATTEMPT
from hpc_parallel.failure.supervisor import Supervisor
from hpc_parallel.layout.layout import processes_per_node, recorded_strategy
from hpc_parallel.machine.fabric import site_variables
from hpc_parallel.machine.world import World
from hpc_parallel.record import attempts, host_memory, owner
from hpc_parallel.record.endings import STARTS_AGAIN, Failure, Summary
from hpc_parallel.record.run_folder import RunFolder, note_phase
from hpc_parallel.record.safe_read import DamagedError, read_tail, size_of

Entry = Callable[[str], int]
Processes = tuple[dict[int, int], object]  # rank -> process; the object that owns and reaps them


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PERIOD_S = 0.02
_GRACE_S = 2.0  # after the first failure, so that other ranks can write their records
_PATIENCE_S = 1.5  # from SIGTERM to SIGKILL
_SAVE_S = 60.0  # the same, if the ranks were asked to save their state
# About as fast as endless spins on an idle host; OMP_WAIT_POLICY=PASSIVE took 1.5 times as long.
_SPINS = "1000"
_SPIN_VARIABLES = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}  # how long OpenMP's threads spin
_GIVE_UP_S = 10.0  # after SIGKILL: a process may hang in the kernel, on a GPU or a file server


def run(run_folder: str, *, load_entry: Callable[[], Entry]) -> int:
    """Run every rank to its end. After a recoverable failure, restart up to `launcher.max_restarts` times.

    load_entry: imports torch and returns the function that each rank runs.

    Returns 0 if all ranks succeeded, else 1 after the failure was concluded.
    """
    folder = RunFolder(Path(run_folder).absolute())
    config = folder.read_config()
    strategy = recorded_strategy(config)
    per_node = processes_per_node(strategy, gpus_per_node=config["gpus_per_node"])

    copies = host_memory.name_of(folder, os.environ)  # now: later the run folder may be gone

    def leave(number: int, frame: FrameType | None) -> None:
        asked_by = failure.signal_name(number)
        host_memory.remove(copies)
        line = conclude(folder, returncode=-number, cancelled=True, asked_by=asked_by, environment={})
        tell_end(folder, line=line or "", decision=Decision(END))
        os._exit(1)

    # Both calls come before the import of torch: OpenMP reads its variables when it is loaded.
    site_variables(config["cluster"]["environment"], os.environ)
    share_cores(
        os.environ, ranks=config["nodes"] * (config["gpus_per_node"] if is_script(config) else per_node)
    )
    try:
        while True:
            for number in STOP_SIGNALS:  # no rank has started yet
                signal.signal(number, leave)
            code, line = _attempt(folder, config=config, per_node=per_node, load_entry=load_entry)
            summary = Summary.read(folder)
            # A script asks for it by its exit code.
            asks_to_restart = summary is not None and summary.outcome == STARTS_AGAIN
            decision = Decision(IN_PLACE) if asks_to_restart else after_failure(folder, start=0)
            why = decision.why if decision.why not in (line or "") else ""
            tell_end(folder, line="; ".join(filter(None, (line, why))), decision=decision)
            if not decision.starts_again:
                return code
            reason = None if asks_to_restart else Failure.read(folder)  # the next start removes the file
            print(f"{reason.line}; restarting" if reason else "restarting", flush=True)
    finally:
        host_memory.remove(copies)


def _attempt(
    folder: RunFolder, *, config: dict[str, Any], per_node: int, load_entry: Callable[[], Entry]
) -> tuple[int, str | None]:
    """Run every rank once; returns the exit code, and the line that `conclude` returned."""
    environments = rank_environments(nodes=config["nodes"], per_node=per_node)
    is_rank = not starts_torchrun(config)
    if not is_rank:
        environments = {rank: environments[rank] for rank in range(0, len(environments), per_node)}
    attempts.note(folder, "launched")
    folder.begin_anew()
    failure.forget_all(folder)
    print(f"{ATTEMPT}on this machine", file=sys.stderr, flush=True)
    note_phase(folder, "starting the script" if is_script(config) else "importing torch")
    owner.take(folder)  # if the launcher is killed, the ranks still save their state before they end
    try:
        start: Callable[..., Processes]
        if is_script(config):
            start = partial(_start_script, config=config)
        else:
            start = partial(_fork, entry=load_entry())
        watch = _start(
            folder,
            environments=environments,
            start=start,
            hang_timeout_s=None if is_script(config) else config["cluster"]["hang_timeout_s"],
            is_rank=is_rank,
        )
    except Exception:
        text = traceback.format_exc()
        sys.stderr.write(text)
        return 1, conclude(folder, returncode=1, text=text, cancelled=False, environment={})
    cancelled = watch.wait()
    if is_script(config):
        end_descendants()
    conclusion: dict[str, Any] = {"returncode": 0}  # a single rank does not know whether all succeeded
    failed = any(watch.returncodes.values()) or len(watch.returncodes) < len(environments)
    if failed or cancelled:
        asked_by = failure.signal_name(watch.signals[0]) if cancelled else None
        code, log = next(filter(None, watch.returncodes.values()), 1), ""
        if not is_rank:  # the output of torchrun itself
            with suppress(OSError, DamagedError):
                log = read_tail(folder.logs / "agent.err").decode(errors="replace")
        conclusion = {"returncode": code, "text": log, "cancelled": cancelled, "asked_by": asked_by}
    line = conclude(folder, **conclusion, environment={})
    summary = Summary.read(folder)
    return int(summary is None or not summary.ended_well), line


def rank_environments(*, nodes: int, per_node: int) -> dict[int, dict[str, str]]:
    """The variables that torchrun would set. The local rank is the rank: one machine has all devices."""
    ranks = nodes * per_node
    shared = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_WORLD_SIZE": str(nodes),
        "TORCHELASTIC_RUN_ID": secrets.token_hex(8),
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    return {
        rank: {
            **shared,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": str(rank // per_node),
        }
        for rank in range(ranks)
    }


class Watch:
    """The rank processes of one run: which are alive, and how the others ended."""

    def __init__(
        self,
        folder: RunFolder,
        *,
        worlds: dict[int, World],
        log_starts: dict[int, int],
        processes: Processes,
        hang_timeout_s: float | None,
        is_rank: bool,
    ) -> None:
        """log_starts: the sizes of the error logs before the ranks started.

        is_rank: each process is a rank; else it is torchrun, whose ranks record how they ended.
        """
        self.folder, self._is_rank = folder, is_rank
        self.worlds, self._log_starts = worlds, log_starts
        self.alive, self._owner = processes
        self.returncodes: dict[int, int] = {}  # as in subprocess: negative for a signal
        self.supervisors = {
            rank: Supervisor(folder, world=worlds[rank], process=process, timeout_s=hang_timeout_s)
            for rank, process in self.alive.items()
            if hang_timeout_s is not None
        }
        self.signals: list[int] = []  # received signals that asked the run to end

    def wait(self) -> bool:
        """Wait for all ranks. After a failure or a signal, end the remaining ranks.

        Returns whether a signal ended the run before any failure.
        """
        cancelled = False
        terminate_at = kill_at = math.inf
        patience_s = _PATIENCE_S
        while self.alive:
            now = time.monotonic()
            if self.signals:  # checked before deaths, which the same signal may have caused
                cancelled = cancelled or terminate_at == math.inf
                terminate_at = min(terminate_at, now)
                patience_s = _SAVE_S if cancelled else _PATIENCE_S
            for rank, returncode in self._newly_ended():
                if returncode == 0 and self._is_rank:
                    normal_end.record(self.folder, world=self.worlds[rank])
                if returncode == 0 or cancelled:
                    continue
                if self._is_rank:
                    stopped = kill_at < math.inf and -returncode in (signal.SIGTERM, signal.SIGKILL)
                    failure.record_death(
                        self.folder, world=self.worlds[rank], returncode=returncode,
                        log_start=self._log_starts[rank], stopped=stopped,
                    )  # fmt: skip
                terminate_at = min(terminate_at, now + _GRACE_S)
            if not self.signals:
                for rank in self.alive.keys() & self.supervisors.keys():
                    self.supervisors[rank].check()
            if now >= terminate_at and kill_at == math.inf:
                self._send(signal.SIGTERM)
                kill_at = now + patience_s
            if now >= kill_at:
                self._send(signal.SIGKILL)
            if now >= kill_at + _GIVE_UP_S:
                break
            time.sleep(_PERIOD_S)
        return cancelled

    def _newly_ended(self) -> list[tuple[int, int]]:
        ended = []
        for rank, process in self.alive.items():
            # WNOWAIT: torch's context owns the processes and reaps them.
            status = os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is not None:
                by_signal = status.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
                ended.append((rank, -status.si_status if by_signal else status.si_status))
        for rank, returncode in ended:
            del self.alive[rank]
            self.returncodes[rank] = returncode
        return ended

    def _send(self, number: int) -> None:
        for process in self.alive.values():
            os.kill(process, number)  # not reaped, so the pid can't belong to another process


def _start(
    folder: RunFolder,
    *,
    environments: dict[int, dict[str, str]],
    start: Callable[..., Processes],
    hang_timeout_s: float | None,
    is_rank: bool,
) -> Watch:
    worlds = {rank: World.discover({**os.environ, **variables}) for rank, variables in environments.items()}
    log_starts = {rank: size_of(folder.log(rank, "err")) for rank in worlds}
    # Block signals until our handlers are set: torch's handlers raise.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    processes = start(folder, environments, worlds)
    # Watch does not use context.wait(). At the first failure context.wait() ends the other ranks at once,
    # before they can write their records, and then waits 30 s for those that do not react.
    watch = Watch(
        folder, worlds=worlds, log_starts=log_starts, processes=processes, hang_timeout_s=hang_timeout_s,
        is_rank=is_rank,
    )  # fmt: skip
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, frame: watch.signals.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    return watch


def _fork(
    folder: RunFolder, environments: dict[int, dict[str, str]], worlds: dict[int, World], *, entry: Entry
) -> Processes:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

    context = start_processes(
        name="hpc_parallel",
        entrypoint=_be_rank,
        args={rank: (str(folder.path), worlds[rank], os.getpid(), entry) for rank in environments},
        envs=environments,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # each rank opens its own files
        start_method="fork",
    )
    return dict(context.pids()), context


def starts_torchrun(config: Mapping[str, Any]) -> bool:
    """Whether torchrun starts the ranks of a simulated node."""
    return is_script(config) and config["script"].get("start") == TORCHRUN


def _start_script(
    folder: RunFolder,
    environments: dict[int, dict[str, str]],
    worlds: dict[int, World],
    *,
    config: dict[str, Any],
) -> Processes:
    """Start the parents of a script's ranks, as srun does on a cluster: without torch in this process."""
    adopt_orphans()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
    part = ["-m", "hpc_parallel.job", "rank", str(folder.path), "local"]
    command = [sys.executable, *part]
    if starts_torchrun(config):  # as sbatch_templates/torchrun.sh.j2
        command = [
            *command[:3], "torchrun", str(folder.path), f"--nnodes={config['nodes']}",
            f"--nproc-per-node={config['gpus_per_node']}", "--rdzv-backend=c10d",
            f"--rdzv-id={environments[0]['TORCHELASTIC_RUN_ID']}",
            f"--rdzv-endpoint=127.0.0.1:{port['MASTER_PORT']}", "--local-addr=127.0.0.1",
            *config["script"]["torchrun"], "--module", *part[1:],
        ]  # fmt: skip
    processes = {
        rank: subprocess.Popen(
            command, env={**os.environ, **variables, **port}, stdin=subprocess.DEVNULL,
            preexec_fn=partial(_prepare_parent, os.getpid()),
        )
        for rank, variables in environments.items()
    }  # fmt: skip
    return {rank: process.pid for rank, process in processes.items()}, processes


def _prepare_parent(agent: int) -> None:
    """Run in the parent of a rank before its program. If the agent ends, this parent ends its script."""
    die_with_parent(agent, by=signal.SIGTERM)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _be_rank(run_folder: str, world: World, agent: int, entry: Entry) -> None:
    """Run the entry in a forked process, then exit, whatever threads the user's code has left."""
    die_with_parent(agent)
    # torch's handlers raise an exception, which does not interrupt C code.
    for number in (*STOP_SIGNALS, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        code = entry(run_folder)
    except Exception as error:
        failure.record_exception(RunFolder(Path(run_folder)), world=world, error=error)
        traceback.print_exc()
        code = 1
    with suppress(OSError):  # on a full disk
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # torch would keep a rank that succeeds alive until all ranks have ended


def share_cores(environment: MutableMapping[str, str], *, ranks: int) -> None:
    """Set OpenMP's share of the cores, as torchrun does, unless the site has set it.

    Waiting threads go to sleep early. Other programs use the cores of this machine too, and a spinning thread
    can take the core from the thread for which it waits. At load 25, a step of two threads that spin took 75
    times as long.
    """
    environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    if not environment.keys() & _SPIN_VARIABLES:
        environment["GOMP_SPINCOUNT"] = _SPINS


def main(arguments: Sequence[str], *, load_entry: Callable[[], Entry]) -> None:
    parser = argparse.ArgumentParser(prog="python -m hpc_parallel.job agent", description=__doc__)
    parser.add_argument("run_folder")
    parser.add_argument("--parent", type=int, help="end when this process ends")
    options = parser.parse_args(arguments)
    if options.parent:
        die_with_parent(options.parent, by=signal.SIGTERM)  # SIGTERM lets the ranks save and end
    code = 1
    try:
        code = run(options.run_folder, load_entry=load_entry)
    except Exception:
        with suppress(OSError):  # on a full disk, which may be why it failed
            traceback.print_exc()
    if os.getpgrp() == os.getpid():  # the ranks may have left processes in our group
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # without torch's clean-up, which could hang
