"""Runs in the allocation that the shell is in: the batch script of a job, run by bash in place of sbatch."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from functools import partial

from hpc_parallel.failure.rank_process import die_with_parent
from hpc_parallel.launch.batch_script import hosts_here, render, render_packed
from hpc_parallel.launch.local_launcher import Agent, LocalLauncher
from hpc_parallel.launch.prepare import PreparedRun
from hpc_parallel.record import owner
from hpc_parallel.record.safe_write import write_text
from hpc_parallel.slurm.allocation import required, variables_of_steps
from hpc_parallel.slurm.node_room import RunPlace

_END_S = 60.0  # to save and end
_REPEAT_S = 1.0  # the second SIGTERM ends the ranks at once


class AllocationLauncher(LocalLauncher):
    """Runs each rank by srun on the nodes of the allocation, and ends with the run."""

    def preview(self, run: PreparedRun) -> str:
        return render(run)

    def agent(self, run: PreparedRun, *, place: RunPlace | None = None) -> Agent:
        return AllocationAgent(run, place=place or RunPlace())


def script_of(run: PreparedRun, *, place: RunPlace) -> str:
    """The script of a run that has the first hosts, or its place beside others."""
    if place.need is None:
        return render(run)
    return render_packed(run, place.need, room=place.room, hosts=place.hosts)


def place_of(run: PreparedRun) -> str:
    """Where the run is, in words. Raises ConfigError if the allocation has ended."""
    hosts = required().hosts if run.config.sweep.pack == "auto" else hosts_here(run)
    where = f"runs in {required()} on {','.join(hosts)}"
    return f"{where}; launcher=slurm submits a job of its own instead"


class AllocationAgent(Agent):
    """The batch script of a run in an allocation. It owns the run: SIGTERM lets the ranks save and end."""

    def __init__(self, run: PreparedRun, *, place: RunPlace) -> None:
        """Write the script and start it. Raises ConfigError if the allocation has ended."""
        folder, job = run.folder, required().job
        folder.slurm.mkdir(mode=0o700, exist_ok=True)
        write_text(folder.batch_script, script_of(run, place=place))
        hosts, tasks = place.hosts or hosts_here(run), run.processes_per_node
        variables = variables_of_steps(os.environ, job=job, hosts=hosts, tasks=tasks)
        super().__init__(
            folder,
            command=["bash", str(folder.batch_script)],
            log=folder.slurm / f"{job}.out",
            environment={**place.variables, **variables},
            prepare=partial(die_with_parent, os.getpid(), by=signal.SIGTERM),
        )
        try:
            owner.hand_to_process(folder, self.pid)
        except BaseException:
            self.end(signals=[signal.SIGTERM])
            raise

    def stop(self, signals: list[int]) -> None:
        """Let the script ask the ranks to save, or end them by a second signal. A third one kills it."""
        if len(signals) > 2:
            super().stop(signals)
        else:
            self._process.send_signal(signals[-1])

    def end(self, *, signals: Sequence[int] = ()) -> None:
        """End the script by its own signals: if srun were killed, the ranks would go on without it."""
        deadline = time.monotonic() + _END_S
        while not self.has_ended() and time.monotonic() < deadline:
            self._process.send_signal(signal.SIGTERM)
            time.sleep(_REPEAT_S)
        super().end(signals=signals)
