"""Trainings that are interrupted at a random step, and go on, end as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from chaos import DATA, JOB, PATIENCE_S, Case
from test_jobs import read

from hpc_parallel.slurm.jobs import ENDED

pytestmark = [pytest.mark.slurm, pytest.mark.chaos]


@pytest.mark.chaos_slow
def test_preempted_where_the_site_cancels(case: Case) -> None:
    """A job that Slurm may not requeue: a new one takes its place."""
    job = case.submit(*DATA, "+launcher.extra.no-requeue=true", "launcher.resubmit=true")
    case.reach(5, 50)
    case.preempt(job)
    assert case.state(job) in ENDED
    again = read(case.folder, "owner.json")["job_id"]
    assert again != job
    assert case.ended(again) == "COMPLETED"
    case.assert_completed(restarts=1, lost=0, followed=False)
    assert read(case.folder, "summary.json")["job_ids"] == [job, again]
    case.assert_said(job, rf"preempted by Slurm: saved at step \d+; resubmitted as job {again}")


@pytest.mark.chaos_slow
def test_resumed_on_one_two_and_four_hosts(case: Case) -> None:
    job = case.submit("strategy=single", "nodes=1")
    for low, high, words in (
        (5, 20, ("strategy=pipeline", "nodes=2")),
        (35, 50, ("strategy=fsdp", "nodes=4", "strategy.shard=2", "strategy.tensor=2")),
    ):
        case.reach(low, high)
        case.cancel(job)
        job = case.resume(*words)
    assert case.ended(job) == "COMPLETED"
    case.assert_completed(restarts=2, lost=0)


@pytest.mark.chaos_slow
def test_two_resumes_at_once(case: Case) -> None:
    """One goes on, the other refuses."""
    job = case.submit(*DATA)
    case.reach(5, 50)
    case.cancel(job)
    case.note("two resumes")
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "hpc_parallel.run", f"resume={case.folder}"],
            cwd=case.site.home, env=case.site.environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=PATIENCE_S)[0] for process in started]  # both follow, as the first
    codes = [process.returncode for process in started]
    assert sorted(codes) == [0, 2], said
    assert f"resume = {case.folder} is going on already, as " in said[codes.index(2)]
    found = JOB.search(said[codes.index(0)])
    assert found is not None
    assert case.ended(found[1]) == "COMPLETED"
    case.assert_completed(restarts=1, lost=0, followed=False)


@pytest.mark.full
def test_the_submitting_terminal_is_closed(case: Case) -> None:
    job = case.submit(*DATA)
    case.reach(5, 60)
    os.killpg(case.following.pid, signal.SIGHUP)
    case.following.wait(timeout=PATIENCE_S)
    case.note("SIGHUP to the terminal's processes")
    assert case.ended(job) == "COMPLETED"
    case.assert_completed(restarts=0, lost=0, followed=False)
