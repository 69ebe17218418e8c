"""A packed job: runs side by side on its nodes, each by its own batch script, as places become free.

`python -m hpc_parallel.job pack FOLDER`. The folder has `queue.json`, and a link to each run folder, named by
its number in the queue. Which runs are left is read from their folders, so a job that starts again goes on.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Annotated

from hpc_parallel.exit_codes import DONE, FAILED
from hpc_parallel.failure import restart
from hpc_parallel.failure.restart import requeue_or_resubmit
from hpc_parallel.record import owner
from hpc_parallel.record.endings import STARTS_AGAIN, Stop, Summary, has_final_summary
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import DamagedError
from hpc_parallel.record.safe_write import open_append
from hpc_parallel.record.trust import UntrustedError, require_private
from hpc_parallel.record.typed import WHOLE, read_if_possible, read_record
from hpc_parallel.slurm.allocation import variables_of_steps
from hpc_parallel.slurm.jobs import Job, job_fields, seconds_since_1970
from hpc_parallel.slurm.node_room import FreePlaces, Need, Room, SharedGpus
from hpc_parallel.slurm.short_forms import expand_hosts

QUEUE = "queue.json"
_PERIOD_S = 0.1
_SIGNAL_EARLY_S = 60.0  # Slurm may send its signal before the time limit so much earlier
_PLACE = "hpc_parallel_place"  # a variable of the run's script
GPU = "hpc_parallel_gpu"  # another one: the position of its GPU among those of the node, from 1
_KEPT = "SLURM_RESTART_COUNT"  # the run starts again with its job


@dataclass(frozen=True)
class QueuedRun:
    """A run in the queue, with the number of its processes on a node."""

    need: Need
    tasks: int


@dataclass(frozen=True)
class Queue:
    """The content of `queue.json`: the room of each node, and the runs in the order of their turns.

    submitter: the process that has claimed the runs, as `Owner.process`.
    runs_per_gpu: runs of one GPU that share it; if it is more than 1, the GPUs of `need` are shares.
    """

    room: Room
    grace_s: int  # before the time limit, in which the runs save
    runs: Annotated[tuple[QueuedRun, ...], WHOLE]
    submitter: str = ""
    runs_per_gpu: int = 1


@dataclass
class _Turn:
    """A run that waits or has its turn."""

    run: QueuedRun
    folder: RunFolder
    place: tuple[int, ...] | None = None
    gpus: list[int] = field(default_factory=list)  # that it shares, on its node
    script: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    ranks: int = -1  # a pipe, whose other end the script closes when its ranks have succeeded


def main(arguments: Sequence[str]) -> int:
    """Run the queue in the folder `arguments[0]` on the nodes of this job. Returns 0 if no run failed."""
    folder = Path(arguments[0])
    # The user may trust those who write above (launcher.shared_folder).
    require_private(folder, parents=False)
    job = _PackedJob(folder, os.environ)
    signal.signal(signal.SIGTERM, job.close)  # Slurm sends it to the ranks too
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    return job.run()


class _PackedJob:
    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._id = environment["SLURM_JOB_ID"]
        self._hosts = expand_hosts(environment["SLURM_JOB_NODELIST"])
        queue = read_record(Queue, folder / QUEUE)
        if queue is None:
            raise FileNotFoundError(folder / QUEUE)
        self._places = FreePlaces(len(self._hosts), queue.room.shared(queue.runs_per_gpu))
        self._shared = SharedGpus(len(self._hosts), queue.room.gpus) if queue.runs_per_gpu > 1 else None
        self._submitter = queue.submitter
        turns = [_Turn(run, _folder(folder / str(number))) for number, run in enumerate(queue.runs)]
        self._waiting = [turn for turn in turns if self._is_left(turn.folder)]
        self._active: list[_Turn] = []
        self._no_start_s = last_start_s(environment, job=self._id, grace_s=queue.grace_s)
        self._is_closed = False
        self._failed = False

    def run(self) -> int:
        print(f"{len(self._waiting)} runs on {','.join(self._hosts)}", file=sys.stderr, flush=True)
        while self._active or (self._waiting and not self._is_closed):
            self._end_finished()
            self._is_closed = self._is_closed or time.time() > self._no_start_s
            if not self._is_closed:
                self._start_waiting()
            time.sleep(_PERIOD_S)
        left = [turn.folder for turn in self._waiting if owner.waits(turn.folder)]
        if left:
            self._go_on(left)
        return FAILED if self._failed or left else DONE

    def close(self, number: int, frame: FrameType | None) -> None:
        """Start no more runs: Slurm ends the job."""
        self._is_closed = True

    def _is_left(self, folder: RunFolder) -> bool:
        """Whether the run is to be started by this job. If so, it waits for its turn."""
        try:
            require_private(folder.path, parents=False)
            before = owner.Owner.read(folder)
        except (UntrustedError, DamagedError, FileNotFoundError) as error:
            print(f"{folder.path} is left out: {error}", file=sys.stderr, flush=True)
            return False
        submits = before is not None and before.process and before.process == self._submitter
        if submits:  # it names the job next
            owner.queue_in_job(folder, Job(self._id, submitted_s=time.time()))
            return True
        if before is None or before.job_id != self._id or before.over:
            return False
        if has_final_summary(folder) and not before.waits:  # the end of the job came before its record
            owner.end_turn(folder)
            return False
        owner.wait_again(folder)
        return True

    def _start_waiting(self) -> None:
        for turn in list(self._waiting):
            if (place := self._places.take(turn.run.need)) is None:
                continue
            self._waiting.remove(turn)
            if not owner.take_turn(turn.folder):  # it was cancelled
                self._places.give_back(place, turn.run.need)
                continue
            turn.place = place
            if self._shared is not None:
                turn.gpus = self._shared.take(turn.run.need.room.gpus, node=place[0])
            turn.script = self._start(turn, hosts=tuple(self._hosts[index] for index in place))
            self._active.append(turn)

    def _start(self, turn: _Turn, *, hosts: tuple[str, ...]) -> subprocess.Popen[bytes]:
        variables = variables_of_steps(self._environment, job=self._id, hosts=hosts, tasks=turn.run.tasks) | {
            _KEPT: self._environment.get(_KEPT, "0")
        }
        turn.ranks, writer = os.pipe()
        variables[_PLACE] = str(writer)
        if turn.gpus:
            variables[GPU] = str(turn.gpus[0] + 1)
            variables.setdefault("OMP_NUM_THREADS", str(turn.run.need.room.cpus))
        with os.fdopen(open_append(turn.folder.slurm / f"{self._id}.out"), "ab") as log:
            script = subprocess.Popen(
                ["bash", str(turn.folder.batch_script)], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=variables, pass_fds=[writer],
            )  # fmt: skip
        os.close(writer)
        return script

    def _give_back(self, turn: _Turn) -> None:
        if turn.place is not None:
            self._places.give_back(turn.place, turn.run.need)
            if self._shared is not None:
                self._shared.give_back(turn.gpus, node=turn.place[0])
            turn.place = None
            os.close(turn.ranks)

    def _end_finished(self) -> None:
        for turn in list(self._active):
            assert turn.script is not None
            if turn.place is not None and _is_closed(turn.ranks):
                self._give_back(turn)  # the script only concludes the run
            if turn.script.poll() is None:
                continue
            self._active.remove(turn)
            self._give_back(turn)
            summary = read_if_possible(Summary, turn.folder.summary) or Summary()
            outcome = summary.outcome
            if outcome == STARTS_AGAIN:
                owner.wait_again(turn.folder)
                self._waiting.append(turn)
                self._is_closed = self._is_closed or _ends_with_job(turn.folder)
            else:
                owner.end_turn(turn.folder)
                self._failed = self._failed or not summary.ended_well
            print(f"{turn.folder.path.name} {outcome}", file=sys.stderr, flush=True)

    def _go_on(self, left: list[RunFolder]) -> None:
        """Let the job start again for the runs that are left, unless it is cancelled."""
        if restart.ending(self._environment) == restart.CANCELLED:
            return
        launcher = left[0].read_config()["launcher"]
        # After this job: by then all runs that are left wait for the new one.
        line = requeue_or_resubmit(left[0], launcher=launcher, environment=self._environment, after=self._id)
        print(f"{len(left)} runs are left: {line}", file=sys.stderr, flush=True)
        new = owner.Owner.read(left[0])
        if new is not None and new.job is not None and new.job_id != self._id:  # another job
            for folder in left:
                owner.queue_in_job(folder, new.job)


def last_start_s(environment: Mapping[str, str], *, job: str, grace_s: int) -> float:
    """The time after which no run of a job or allocation starts. A short job keeps half of its time."""
    text = environment.get("SLURM_JOB_END_TIME", "")
    fields = {} if text.isdecimal() else job_fields(job) or {}
    end_s = float(text) if text.isdecimal() else seconds_since_1970(fields.get("EndTime"))
    if end_s is None:  # no limit
        return float("inf")
    return end_s - min(grace_s + _SIGNAL_EARLY_S, (end_s - time.time()) / 2)


def is_left_by_all(folder: Path) -> bool:
    """Whether all runs of the queue in a folder have ended, or go on elsewhere."""
    if (queue := read_if_possible(Queue, folder / QUEUE)) is None:
        return False
    folders = [_folder(folder / str(number)) for number in range(len(queue.runs))]
    owners = [read_if_possible(owner.Owner, run_folder.owner) for run_folder in folders]
    return all(holder is not None and (holder.over or not holder.is_packed) for holder in owners)


def _is_closed(pipe: int) -> bool:
    """Whether the other end of a pipe, which nobody writes to, is closed."""
    poll = select.poll()  # select() knows 1024 files only
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(0))


def _folder(link: Path) -> RunFolder:
    return RunFolder(Path(os.path.realpath(link)))


def _ends_with_job(folder: RunFolder) -> bool:
    """Whether the run stopped because its job ends."""
    stopped = Stop.read(folder)
    return stopped is not None and stopped.how in (restart.TIME_LIMIT, restart.PREEMPTED)
