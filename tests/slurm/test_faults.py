"""Each fault of the table, in a run that goes on as if nothing had happened, or that a user has cancelled.

make chaos SEED=1        each fault once, on a run that the seed draws
make chaos FULL=1        each fault on every run
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise

import pytest
from chaos import EVERY, Case, heal
from cluster import Cluster
from faults import (
    BOOT,
    CUT,
    END_OF_START,
    FAULTS,
    GIVE_HOSTS,
    KILL,
    LIMIT,
    POWER_OFF,
    QUEUE,
    RESTART,
    SAVE,
    SCANCEL,
    STOP,
    TAKE_HOSTS,
    Fault,
    Harm,
    Who,
    drawn,
    rows,
)
from test_jobs import read

from hpc_parallel.failure.failure import HANG, KILLED, NODE_LOST
from hpc_parallel.failure.restart import END, FEWER, IN_PLACE, REQUEUE, SPARE
from hpc_parallel.record import attempts
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.slurm.jobs import ENDED
from tests.waiting import PATIENCE_S, wait_for

SIGNALS = {KILL: signal.SIGKILL, STOP: signal.SIGSTOP}
OF_HOSTS = {
    CUT: (Cluster.cut,),
    POWER_OFF: (Cluster.cut, Cluster.kill),
    BOOT: (Cluster.mend, Cluster.boot),
}
SAID = {IN_PLACE: "on the same hosts", SPARE: "on the spare", FEWER: " nodes (failed: "}
LINES = {
    KILLED: r"rank \d on {} failed first: killed by SIGKILL(; \d followers?)?",
    HANG: r"rank \d on {} failed first: stopped by a signal \(state T\).*",
    NODE_LOST: r"node {} was lost(; \d followers?)?",
}
AGAIN = "the ranks start again in the same job"


@pytest.mark.slurm
@pytest.mark.chaos
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("fault", "who"), rows())
def test_fault(case: Case, fault: Fault, who: Who | None) -> None:
    gate = fault.who[0] if not os.environ.get("CHAOS_SEED") else drawn(fault, seed=case.row.seed)
    struck = Struck(case, fault, who or gate)
    for harm, following in pairwise((*fault.harms, None)):
        assert harm is not None
        struck.wait_for_moment(harm)
        struck.strike(harm, holds_next=following is not None and following.when == RESTART)
    if fault.is_cancelled:
        struck.assert_cancelled()
        heal(case.site)
        struck.job = case.resume()
    assert case.ended(struck.job, within_s=4 * PATIENCE_S) == "COMPLETED"
    struck.assert_completed()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_three_seeds_draw_three_runs(fault: Fault) -> None:
    assert len({drawn(fault, seed=seed).name for seed in (1, 2, 3)}) == 3


@dataclass
class Struck:
    """A run while the harms of a row come to it."""

    case: Case
    fault: Fault
    who: Who
    job: str = field(init=False)
    urgent: str = ""
    ended: int | None = None  # how many starts had ended when the last harm came
    restarts: int = 0  # lines in the job's log then

    def __post_init__(self) -> None:
        self.case.row.done.append(self.who.name)
        submit = self.case.submit if self.who.model else self.case.submit_script
        model = {"model": self.who.model} if self.who.model else {}
        self.job = submit(*self.who.words, *self.fault.words, **model)

    # --- when

    def wait_for_moment(self, harm: Harm) -> None:
        case = self.case
        if harm.when == QUEUE:
            wait_for(lambda: case.state(self.job) == "PENDING", within_s=2 * PATIENCE_S)
        elif harm.when == RESTART:
            wait_for(lambda: len(self.lines_again) > self.restarts)
            time.sleep(case.dice.uniform(0, 6))  # the ranks import, connect or wait for their model then
        elif harm.when == END_OF_START:
            assert len(self.ends) == self.ended
        elif self.ended is not None:
            wait_for(lambda: len(self.ends) > self.ended)
            goal = case.dice.randint(2, EVERY + 2)
            wait_for(lambda: len(self.lines_since(self.ends[-1].ended)) >= goal)
        else:
            case.reach(EVERY + 1, 40)
            wait_for(lambda: case.saved_step >= EVERY)  # a save goes on beside the steps
        if harm.when == SAVE:
            half = case.half_saved((case.step // EVERY + 1) * EVERY)
            deadline = time.monotonic() + PATIENCE_S
            while not half.exists():  # it exists for moments only
                assert time.monotonic() < deadline

    @property
    def lines_again(self) -> list[str]:
        return [line for line in self.case.job_log(self.job) if line.startswith(AGAIN)]

    @property
    def ends(self) -> list[attempts.End]:
        return attempts.ends(RunFolder(self.case.folder))

    def lines_since(self, ended: str) -> list[datetime]:
        """When each step was logged after a start has ended."""
        path = self.case.folder / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        times = [datetime.fromisoformat(json.loads(line)["time"]) for line in lines]
        return [when for when in times if when > datetime.fromisoformat(ended)]

    # --- what

    def strike(self, harm: Harm, *, holds_next: bool) -> None:
        """holds_next: whether the next harm comes to a start before its first step."""
        self.ended, self.restarts = len(self.ends), len(self.lines_again)
        if holds_next:
            self.case.hold_while.touch()
        if harm.what in SIGNALS:
            rank = harm.on * self.who.ranks_per_node
            wait_for(lambda: self.case.worker(rank))
            self.case.signal_rank(rank, SIGNALS[harm.what])
        else:
            self.case.note(" ".join([harm.what, *harm.hosts]))
        for change in OF_HOSTS.get(harm.what, ()):
            for host in harm.hosts:
                change(self.case.site.cluster, host)
        self.strike_job(harm)
        if not holds_next and harm.what != SCANCEL:
            self.case.hold_while.unlink(missing_ok=True)

    def strike_job(self, harm: Harm) -> None:
        case, cluster = self.case, self.case.site.cluster
        if harm.what == TAKE_HOSTS:
            self.urgent = case.take_hosts()
        elif harm.what == GIVE_HOSTS:
            cluster.run("scancel", self.urgent)
        elif harm.what == SCANCEL:
            cluster.run("scancel", self.job)
        elif harm.what == LIMIT:
            cluster.run("scontrol", "update", f"JobId={self.job}", "TimeLimit=1")
            wait_for(lambda: case.state(self.job) == "PENDING", within_s=2 * PATIENCE_S)
            cluster.run("scontrol", "update", f"JobId={self.job}", "TimeLimit=60")

    # --- what must hold

    def assert_ends(self) -> None:
        """Each start ended for the right reason, and was followed as it should be."""
        found = [(end.how, end.host) for end in self.ends]
        lines = [end.line for end in self.ends]
        assert found == [(end.how, end.host) for end in self.fault.ends], lines
        for end, line in zip(self.fault.ends, lines, strict=True):
            if end.how in LINES:
                assert re.fullmatch(LINES[end.how].format(end.host), line or ""), line

    def assert_followed(self, job: str) -> None:
        in_job = [SAID[end.then] for end in self.fault.ends if end.then in SAID]
        lines = [line for line in self.case.job_log(job) if line.startswith(AGAIN)]
        assert len(lines) == len(in_job), lines
        assert all(said in line for said, line in zip(in_job, lines, strict=True)), lines
        requeues = sum(end.then == REQUEUE for end in self.fault.ends)
        ended = sum("nothing is left to do in this start" in line for line in self.case.job_log(job))
        assert int(self.case.site.record(job)["Restarts"]) == requeues + ended

    def assert_cancelled(self) -> None:
        case, job = self.case, self.job
        wait_for(lambda: case.state(job) in ENDED)
        assert case.state(job) == "CANCELLED"
        if self.urgent:
            case.site.cluster.run("scancel", self.urgent)  # the next start needs the hosts
        wait_for(lambda: not case.running())
        case.hold_while.unlink(missing_ok=True)
        shown = case.site.command("status", str(case.folder), "--json")
        (status,) = json.loads(shown.stdout)
        assert (status["state"], status["job_id"]) == ("cancelled", job), status
        if self.fault.ends[-1].then == END:
            assert read(case.folder, "summary.json")["outcome"] == "cancelled"
            assert not (case.folder / "failure.json").exists()
        self.assert_ends()
        self.assert_followed(job)

    def assert_completed(self) -> None:
        fault, case = self.fault, self.case
        self.assert_ends()
        if not fault.is_cancelled:
            self.assert_followed(self.job)
        more = fault.is_cancelled and fault.ends[-1].then != END  # a start that was cancelled in the queue
        after = self.lines_since(self.ends[-1].ended)
        if not fault.is_cancelled:
            case.row.back_s = (after[0] - case.harmed).total_seconds()
        assert len(after) >= 1
        for host in {host for harm in fault.harms if harm.what == CUT for host in harm.hosts}:
            case.site.cluster.mend(host)  # only then can Slurm end the rank on it
        unsaved = sum(end.how in LINES for end in fault.ends)
        case.assert_completed(restarts=len(fault.ends), lost=(0, 2 * EVERY * unsaved))
        assert not more or read(case.folder, "summary.json")["job_ids"] != [self.job]
