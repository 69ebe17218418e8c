"""One case of the chaos suite: a training on the real Slurm that is harmed, and what must hold after it.

Each case is compared with a run of one device that nothing harmed: float64 hides the order of sums.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import psutil
from test_jobs import SMALL, Site, is_over, read, worker_of

from hpc_parallel.record import attempts
from hpc_parallel.record.checkpoint_index import Checkpoint, complete
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.slurm.jobs import ENDED
from tests.parity import largest_difference, tensor_difference
from tests.waiting import PATIENCE_S, wait_for
from tests.workers import Trained, Workers

STEPS = 80
EVERY = 10  # steps from checkpoint to checkpoint
EQUAL = 1e-10  # of losses and of tensors, relative; float64 leaves 1e-12
TRAINING = (
    *SMALL,
    f"training.steps={STEPS}",
    f"training.checkpoint_every={EVERY}",
    "training.validate_every=null",
    "training.measure_steps=0",
    "training.global_batch_size=8",
    "training.precision=float64",
    "launcher.check_imports=false",  # its model imports torch: seconds in each case
)
JOB = re.compile(r"^job +(\d+)\n", re.MULTILINE)
SLOW = ("model._target_=tests.models.Slow", "+model.pause_s=0.06", "strategy.verify=never")
DATA = ("strategy=data", "nodes=2")
OWN_LOOP = Path(__file__).with_name("own_loop.py")


@dataclass
class Row:
    """A line of the table at the end."""

    seed: int
    done: list[str] = field(default_factory=list)
    lost: int | None = None
    restarts: int | None = None
    back_s: float | None = None  # from the last harm to the next step that counts


@dataclass
class Case:
    site: Site
    reference: Trained
    row: Row
    dice: Random
    is_own: bool = False  # whether own_loop.py runs, instead of a model of ours
    kept: int = 0  # step of the newest checkpoint when the harm was done
    harmed: datetime = field(init=False, repr=False)
    following: subprocess.Popen[bytes] = field(init=False, repr=False)
    seen_from: Path = Path("/")  # the root under which the checkpoints are to be seen

    @property
    def folder(self) -> Path:
        return self.site.home / "run"

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Newest first."""
        return complete(self.checkpoint_folder)

    @property
    def checkpoint_folder(self) -> Path:
        return self.seen_from / self.folder.relative_to("/") / "checkpoints"

    # --- what is started

    @property
    def crawl_while(self) -> Path:
        """While this file exists, the steps of a SLOW run and of a script take four times as long."""
        return self.site.home / "crawl"

    @property
    def hold_while(self) -> Path:
        """While this file exists, no start of a SLOW run or of a script comes to its first step."""
        return self.site.home / "hold"

    def submit(self, *words: str, model: tuple[str, ...] = SLOW) -> str:
        """Begin the run, and follow it as a user in a terminal of their own; returns its job."""
        if model[: len(SLOW)] == SLOW:
            model += (f"+model.crawl_while={self.crawl_while}", f"+model.hold_while={self.hold_while}")
        return self._follow(*words, *TRAINING, *model, "launcher=slurm", "run_dir=run")

    def submit_script(self, *words: str) -> str:
        """The same with a training loop of the user's own."""
        self.is_own = True
        shutil.copy(OWN_LOOP, self.site.home)
        line = ("own_loop.py", "{run}/saved", str(self.site.home), str(STEPS), str(EVERY), "0.1")
        resume = "script.resume_arguments=--resume {run}/saved"
        return self._follow(*words, resume, "launcher=slurm", "run_dir=run", "--", *line)

    def resume(self, *words: str) -> str:
        self.row.done.append(f"resumed {' '.join(words)}".strip())
        return self._follow(f"resume={self.folder}", *words)

    def _follow(self, *words: str) -> str:
        with self.told.open("w") as told:
            self.following = subprocess.Popen(
                [sys.executable, "-m", "hpc_parallel.run", "launcher.wait=true", *words],
                cwd=self.site.home, env=self.site.environment,
                stdout=told, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        wait_for(lambda: JOB.search(self.told.read_text()) or self.following.poll() is not None)
        found = JOB.search(self.told.read_text())
        assert found, self.told.read_text()
        return found[1]

    @property
    def told(self) -> Path:
        """What the user has seen since the last submission."""
        return self.site.home / "told"

    # --- where it is

    def reach(self, low: int, high: int) -> int:
        """Wait until the run has done a random step between these; returns the one that it is at then."""
        goal = self.dice.randint(low, high)
        wait_for(lambda: self.step >= goal)
        assert self.step < STEPS, "the harm came too late"
        return self.step

    @property
    def steps(self) -> list[int]:
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line)["step"] for line in lines]

    @property
    def step(self) -> int:
        return max(self.steps, default=0)

    @property
    def saved_step(self) -> int:
        """The step of the newest state that is whole."""
        saved = self.folder / "saved"
        if self.is_own:
            return json.loads(saved.read_text())["step"] if saved.exists() else 0
        return max([found.step for found in self.checkpoints], default=0)

    def half_saved(self, step: int) -> Path:
        """What exists while the state of this step is being written."""
        return (self.folder if self.is_own else self.checkpoint_folder) / f".step-{step}"

    def worker(self, rank: int) -> psutil.Process | None:
        return script_of(self.folder, rank) if self.is_own else worker_of(self.folder, rank)

    def state(self, job: str) -> str:
        return self.site.record(job)["JobState"]

    @property
    def starts(self) -> list[attempts.Start]:
        return attempts.starts(RunFolder(self.folder))

    def until_started(self, times: int) -> None:
        wait_for(lambda: len(self.starts) == times)

    def ended(self, job: str, *, within_s: float = 2 * PATIENCE_S) -> str:
        """Wait for the run's last end; the job's state then."""
        # By both: a job that starts again passes through other states.
        wait_for(lambda: is_over(self.folder) and self.state(job) in ENDED, within_s=within_s)
        return self.state(job)

    def assert_said(self, job: str, line: str, *, times: int = 1) -> None:
        """That a line of the job's log is of this pattern."""
        lines = self.job_log(job)
        assert sum(bool(re.fullmatch(line, found)) for found in lines) == times, lines

    def job_log(self, job: str) -> list[str]:
        logs = sorted((self.folder / "slurm").glob(f"{job}*.out"))
        return [line for log in logs for line in log.read_text(errors="replace").splitlines()]

    # --- harm

    def preempt(self, job: str) -> None:
        """An urgent job takes all hosts until the run waits for them again, or has ended."""
        urgent = self.take_hosts()
        assert self.state(job) in ("PENDING", *ENDED)
        self.site.cluster.run("scancel", urgent)
        self.note("preempted")

    def take_hosts(self) -> str:
        """All of them, for an urgent job, which is returned.

        The training crawls meanwhile: on a busy machine, Slurm takes longer than the steps that are left.
        """
        words = ("--partition=urgent", "--nodes=4", "--exclusive", "--wrap=sleep 600")
        self.crawl_while.touch()
        urgent = self.site.cluster.run("sbatch", "--parsable", "--output=/dev/null", *words)
        wait_for(lambda: self.state(urgent) == "RUNNING")
        self.crawl_while.unlink()
        return urgent

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        worker = self.worker(rank)
        assert worker is not None
        self.note(f"{number.name} to rank {rank}")
        worker.send_signal(number)

    def cancel(self, job: str) -> int:
        """As a user does; the step at which the state was saved."""
        self.note("scancel")
        self.site.cluster.run("scancel", job)
        assert self.ended(job) == "CANCELLED"
        assert read(self.folder, "summary.json")["outcome"] == "cancelled"
        saved = self.checkpoints[0].step
        self.assert_said(
            job, rf"cancelled by SIGTERM: saved at step {saved}; go on with resume={self.folder}"
        )
        self.assert_steps(saved)
        return saved

    def lose(self, host: str) -> None:
        """As by a power cut: nobody on the other side is told."""
        self.note(f"{host} lost")
        self.site.cluster.cut(host)
        self.site.cluster.kill(host)

    def note(self, harm: str) -> None:
        """For the table; and what a new start may go back to at most."""
        self.row.done.append(f"{harm} at {self.step}")
        self.kept = self.saved_step
        self.harmed = datetime.now(UTC)

    # --- what must hold

    def assert_completed(self, *, restarts: int, lost: int | tuple[int, int], followed: bool = True) -> None:
        """As if nothing had happened; `lost`: steps, or the fewest and the most; `followed`: to the end."""
        summary = read(self.folder, "summary.json")
        self.row.restarts, self.row.lost = summary["restarts"], summary["lost_steps"]
        assert summary["outcome"] == "completed"
        assert not (self.folder / "failure.json").exists()
        assert summary["restarts"] == restarts
        fewest, most = (lost, lost) if isinstance(lost, int) else lost
        assert fewest <= summary["lost_steps"] <= most
        assert not restarts or (self.starts[-1].after_step or 0) >= self.kept
        self.assert_steps(STEPS)
        assert self.saved_step == STEPS
        if self.is_own:
            weights = read(self.folder, "saved")["weights"]
            assert largest_difference(weights, of_own_loop(STEPS)[1]) < EQUAL
        else:
            wanted = tensors_of(complete(self.reference.folder / "checkpoints")[0])
            assert tensor_difference(tensors_of(self.checkpoints[0]), wanted) < EQUAL
        self.assert_nothing_is_left()
        if followed:
            assert self.following.wait(timeout=PATIENCE_S) == 0, self.told.read_text()
            of = "" if self.is_own else f" of {STEPS}"
            assert f"completed: step {STEPS}{of}, " in self.told.read_text()

    def assert_continued_in_place(self, job: str, place: str, *, most_lost: int = 2 * EVERY) -> None:
        """That the job itself completed after one restart of its ranks, at this place."""
        assert self.ended(job) == "COMPLETED"
        assert self.site.record(job)["Restarts"] == "0"
        self.assert_completed(restarts=1, lost=(0, most_lost))
        self.assert_said(job, f"the ranks start again in the same job, {place}, 1 of 3")

    def assert_steps(self, last: int) -> None:
        """Each once, with the loss of the undisturbed run."""
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == list(range(1, last + 1))
        losses = [line["loss"] for line in lines]
        wanted = of_own_loop(last)[0] if self.is_own else self.reference.losses[:last]
        assert largest_difference(losses, wanted) < EQUAL

    def assert_nothing_is_left(self) -> None:
        """No process on any host but its slurmd, no file half written, no checkpoint without its marker."""
        wait_for(lambda: not self.running())
        assert not [path for path in self.folder.rglob(".*") if temporary(path)]
        folder = self.checkpoint_folder
        whole = {checkpoint.path for checkpoint in self.checkpoints}
        assert set(folder.iterdir() if folder.exists() else ()) == whole
        assert [checkpoint.damage() for checkpoint in self.checkpoints] == [None] * len(whole)

    def leave(self) -> None:
        """Whatever the case left."""
        if hasattr(self, "following"):
            self.following.kill()
            self.following.wait()
        heal(self.site)

    def running(self) -> dict[str, list[str]]:
        """By host, the processes that are not the host's own."""
        found = {host: guests(self.site.cluster.pids(host)) for host in self.site.cluster.hosts}
        return {host: names for host, names in found.items() if names}


def temporary(path: Path) -> bool:
    """By its name, but for a checkpoint's index, submitit's script and the source that is kept with a run."""
    names = (".metadata", ".submission_file_")
    return not path.name.startswith(names) and not any(part.startswith("code") for part in path.parts)


def script_of(folder: Path, rank: int) -> psutil.Process | None:
    """The process of a rank of own_loop.py."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            mine = words[1:2] == ["-u"] and f"{folder}/saved" in words  # with its parent's options before
            if mine and process.environ().get("RANK") == str(rank):
                return process
    return None


def guests(pids: list[int]) -> list[str]:
    found = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            if process.name() != "slurmd" and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()) or process.name())
        except psutil.Error:
            continue
    return found


def undisturbed(workers: Workers) -> Trained:
    """The same steps on one device."""
    return workers.train("strategy=single", *TRAINING)


def of_own_loop(steps: int) -> tuple[list[float], list[float]]:
    """The losses and the last weights of own_loop.py on one device."""
    import own_loop

    return own_loop.alone(steps)


def tensors_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Weights, buffers and the optimizer's state by full name, whole."""
    import torch
    import torch.distributed.checkpoint as dcp

    metadata = dcp.FileSystemReader(checkpoint.path).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if not name.startswith("random/")
    }
    with warnings.catch_warnings(action="ignore"):  # of there being no process group
        dcp.load(state, storage_reader=dcp.FileSystemReader(checkpoint.path), no_dist=True)
    return state


def heal(site: Site) -> None:
    """Take the run's jobs away and make all hosts idle again, whatever a case left."""
    cluster = site.cluster
    if jobs := cluster.run("squeue", "-h", "-o", "%A").split():
        cluster.run("scancel", "--signal=KILL", *jobs)
        cluster.run("scancel", *jobs)
    for host in cluster.hosts:
        cluster.mend(host)
        if not cluster.pids(host):
            cluster.boot(host)
    idle = {f"{host} idle" for host in cluster.hosts}
    listing = ("sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %T")
    wait_for(lambda: set(cluster.run(*listing).splitlines()) == idle)
