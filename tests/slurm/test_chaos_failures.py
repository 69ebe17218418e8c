"""A rank is killed, stopped, poisoned, out of memory: it is named, and the run ends as if nothing was."""

from __future__ import annotations

import re

import pytest
from chaos import DATA, EVERY, PATIENCE_S, STEPS, Case
from test_jobs import read

pytestmark = [pytest.mark.slurm, pytest.mark.chaos]


def harmed(case: Case, harm: str) -> tuple[str, ...]:
    """A model that harms itself in one rank, so late that a start from the checkpoint before gets past it."""
    at = case.dice.randint(STEPS // 2 + 2, STEPS - 5)
    case.row.done.append(f"{harm} on rank 1 at {at}")
    case.kept = (at - 1) // EVERY * EVERY - EVERY  # the newest may still be being written
    model = ("model._target_=tests.models.Harmed", f"+model.harm={harm}", f"+model.at={at}")
    return (*model, "+model.victim=1", "strategy.verify=never")


def assert_in_place(case: Case, job: str) -> None:
    """The ranks started again on their hosts: Slurm does not know of it."""
    case.assert_said(job, r"the ranks start again in the same job, on the same hosts, .*")
    assert case.site.record(job)["Restarts"] == "0"


@pytest.mark.chaos_slow
def test_a_rank_is_poisoned(case: Case) -> None:
    job = case.submit(*DATA, "training.on_nonfinite=rollback", model=harmed(case, "poison"))
    assert case.ended(job) == "COMPLETED"
    case.assert_completed(restarts=1, lost=(0, 2 * EVERY))
    case.assert_said(job, r"rank 1 on n2 failed first: the loss of step \d+ is nan; .*; 1 follower")
    assert_in_place(case, job)


@pytest.mark.chaos_slow
def test_a_rank_runs_out_of_memory(case: Case) -> None:
    """The same would happen again, so it does not start again by itself."""
    job = case.submit(*DATA, "launcher.max_restarts=1", model=harmed(case, "memory"))
    assert case.ended(job) == "FAILED"
    summary, failure = read(case.folder, "summary.json"), read(case.folder, "failure.json")
    assert (summary["outcome"], summary["restarts"]) == ("failed", 0)
    assert failure["kind"] == "out_of_memory"
    line = (
        r"rank 1 on n2 failed first: out of memory in block 2 \(asked 4096\.0 TiB, free [^)]*\); 1 follower"
    )
    case.assert_said(job, line)
    assert case.following.wait(timeout=PATIENCE_S) == 1
    assert re.fullmatch(line, case.told.read_text().splitlines()[-1])
    assert case.ended(case.resume()) == "COMPLETED"
    case.assert_completed(restarts=1, lost=(0, 2 * EVERY))
