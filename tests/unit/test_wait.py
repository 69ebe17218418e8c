"""Who follows a job speaks for a run only while it is that job's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_parallel.launch import follow
from hpc_parallel.launch.prepare import PreparedRun
from hpc_parallel.launch.run_files import write
from hpc_parallel.record import attempts
from hpc_parallel.record.names import command_on
from hpc_parallel.record.owner import hand_to_job
from hpc_parallel.record.safe_read import read_json
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.slurm.jobs import FORGOTTEN, Job, JobState
from tests.composed import prepared


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PreparedRun:
    """Of a job 34 that Slurm says has failed, without a word from any rank."""
    made = prepared(f"run_dir={tmp_path / 'run'}", "launcher.snapshot=false")
    write(made)
    made.folder.slurm.mkdir()
    monkeypatch.setattr(follow, "job_state", lambda job: JobState("FAILED", "NonZeroExitCode"))
    monkeypatch.setattr(follow, "SUMMARY_S", 0.0)
    return made


def test_a_job_that_ends_without_output_is_concluded(run: PreparedRun) -> None:
    hand_to_job(run.folder, Job("34"))
    assert follow.wait_for_job(run, Job("34")) == 1
    failure = json.loads(run.folder.failure.read_text())
    said = "Slurm says of job 34: failed (NonZeroExitCode)"
    unseen = "its job has no output: do the hosts see the run folder?"
    assert (failure["kind"], failure["message"]) == ("start", f"exit code 1: {said}; {unseen}")
    assert json.loads(run.folder.summary.read_text())["outcome"] == "failed"


def test_the_output_of_a_job_is_found(run: PreparedRun) -> None:
    (run.folder.slurm / "34_0_log.out").write_text("module: command not found\n")
    hand_to_job(run.folder, Job("34"))
    assert follow.wait_for_job(run, Job("34")) == 1
    assert "its job has no output" not in run.folder.failure.read_text()


def test_a_job_that_completed_without_a_summary_is_concluded(
    run: PreparedRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `exec` in a setup line, which replaces the shell that would conclude."""
    monkeypatch.setattr(follow, "job_state", lambda job: JobState("COMPLETED", ""))
    monkeypatch.setattr(follow, "COMPLETED_SUMMARY_S", 0.0)
    hand_to_job(run.folder, Job("34"))
    assert follow.wait_for_job(run, Job("34")) == 1
    said = "Slurm says of job 34: completed"
    line = f"the job failed before any rank started: exit code 0, but rank 0 did not complete: {said}"
    assert capsys.readouterr().out.splitlines()[-1] == line
    assert json.loads(run.folder.summary.read_text())["outcome"] == "failed"


@pytest.mark.parametrize(
    ("file", "event", "outcome"),
    [
        (None, "submitted", "cancelled"),
        ("slurm/34_log.out", "submitted", "failed"),
        ("logs/rank-0.out", "launched", "failed"),
        ("logs/rank-0.out", "resumed", "cancelled"),  # the log is of an earlier job
    ],
)
def test_a_job_that_slurm_has_forgotten_was_cancelled_if_it_never_began(
    file: str | None, event: str, outcome: str, run: PreparedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm forgets at once a task of an array that is cancelled before it has begun."""
    monkeypatch.setattr(follow, "job_state", lambda job: JobState(FORGOTTEN))
    if file:
        (run.folder.path / file).touch()
    attempts.note(run.folder, event)
    hand_to_job(run.folder, Job("34"))
    assert follow.wait_for_job(run, Job("34")) == 1
    assert json.loads(run.folder.summary.read_text())["outcome"] == outcome


@pytest.mark.parametrize("state", [JobState("FAILED", "NonZeroExitCode"), JobState("COMPLETED", "")])
def test_a_run_that_was_resumed_since_is_left_alone(
    state: JobState, run: PreparedRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The follower of job 34 is late: the run goes on as job 36, and has neither failed nor completed.

    A job that saved before its time limit and then was replaced has ended with code 0.
    """
    monkeypatch.setattr(follow, "job_state", lambda job: state)
    hand_to_job(run.folder, Job("36"))
    assert follow.wait_for_job(run, Job("34")) == 1
    assert f"job 34 {state}; the run has been resumed since" in capsys.readouterr().out
    assert read_json(run.folder.failure) is None
    assert read_json(run.folder.summary) is None
    assert attempts.ends(run.folder) == []


def test_ending_the_follower_leaves_the_job_running(
    run: PreparedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sweeper would submit its next run if it were told of a failure."""

    def interrupted(job: Job) -> JobState:
        raise KeyboardInterrupt

    monkeypatch.setattr(follow, "job_state", interrupted)
    hand_to_job(run.folder, Job("34"))
    with pytest.raises(KeyboardInterrupt):
        follow.wait_for_job(run, Job("34"))
    assert f"job 34 continues ({command_on(run.folder.path, 'cancel')} ends it)" in capsys.readouterr().err
    assert read_json(run.folder.summary) is None


@pytest.mark.parametrize(
    ("state", "outcome", "ended"),
    [
        ("NO ANSWER", "completed", True),
        ("NO ANSWER", "failed", False),  # it may be in the queue again
        ("UNKNOWN", "failed", True),
        ("UNKNOWN", "preempted", False),
        ("RUNNING", "completed", False),
        ("FAILED", "preempted", True),
    ],
)
def test_what_ends_a_followed_job(run: PreparedRun, state: str, outcome: str, ended: bool) -> None:
    write_json(run.folder.summary, {"outcome": outcome})
    assert follow.has_ended(run.folder, JobState(state)) is ended
