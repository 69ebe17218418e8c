"""Whether a run starts again, counted over all its starts."""

from __future__ import annotations

from pathlib import Path
from subprocess import CompletedProcess

import pytest

from hpc_parallel.failure import failure, restart
from hpc_parallel.record import attempts, owner
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.slurm import submit
from hpc_parallel.slurm.jobs import Job

DISABLED = "Requested operation is presently disabled"  # as scontrol of 22.05 says it
LAUNCHER = {"max_requeues": 2, "max_restarts": 1, "exclude": None, "resubmit": False, "partition": None}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder


def allowed(folder: RunFolder, how: str, *, recoverable: bool = True) -> bool:
    """As at the end of a start that ended so."""
    attempts.end(folder, how=how, host="n2")
    return restart.allowed(folder, how=how, recoverable=recoverable, launcher=LAUNCHER)


def test_restarts_are_limited_and_counted_from_the_last_resume(folder: RunFolder) -> None:
    assert [allowed(folder, "time_limit") for _ in range(3)] == [True, True, False]
    assert [allowed(folder, "preempted") for _ in range(4)] == [True] * 4
    assert [allowed(folder, "killed") for _ in range(2)] == [True, False]
    assert not allowed(folder, "error", recoverable=False)
    attempts.resumed_by_hand(folder)
    assert [allowed(folder, "time_limit") for _ in range(3)] == [True, True, False]
    assert allowed(folder, "hang")


def test_values_that_are_not_finite_roll_back_once(folder: RunFolder) -> None:
    assert [allowed(folder, "nonfinite") for _ in range(2)] == [True, False]


def test_a_host_that_failed_twice_is_left_out(folder: RunFolder) -> None:
    for how, host in (("killed", "n2"), ("hang", "n3"), ("time_limit", "n3"), ("node_lost", "n2"),
                      ("killed", None), ("killed", None)):  # fmt: skip
        attempts.end(folder, how=how, host=host)
    assert restart.hosts_to_exclude(folder) == ["n2"]


@pytest.mark.parametrize(
    ("exclude", "listed", "end"),
    [
        (None, "n1 n2 n3 n4", None),
        ("n[3-4]", "n1 n2 n3 n4", "has 1 host, and the job needs 2"),
        (None, "n1 n2", "has 1 host, and the job needs 2"),
        ("hosts/slow.txt", "n1 n2 n3", None),
        (None, "n1 n5", None),  # sinfo does not show all
        (None, "", None),
    ],
)
def test_a_job_for_which_too_few_hosts_are_left_is_not_requeued(
    folder: RunFolder, exclude: str | None, listed: str, end: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts.end(folder, how=failure.PREFLIGHT, host="n2", exclude=["n2"])
    requeued = []
    monkeypatch.setattr(restart, "hosts_of", {"main": set(listed.split())}.__getitem__)
    monkeypatch.setattr(restart, "requeue", lambda job, *, exclude: requeued.append((job, exclude)))
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_PARTITION": "main", "SLURM_JOB_NODELIST": "n[1-2]"}
    launcher = LAUNCHER | {"exclude": exclude}
    line = restart.requeue_or_resubmit(folder, launcher=launcher, environment=environment)
    if end is None:
        assert (line, requeued) == (
            "requeued as job 7, without n2",
            [("7", f"{exclude},n2" if exclude else "n2")],
        )
    else:
        advice = "Start it again with fewer nodes, or when these hosts are repaired"
        assert (line, requeued) == (f"not requeued: without n2 partition main {end}. {advice}", [])


def test_a_new_job_stays_on_the_cluster_and_is_what_its_script_says(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside the job, whose environment has the variables of the shell but not SLURM_CLUSTERS."""
    environments = []

    def run(*command: str, environment: dict[str, str], **_: object) -> CompletedProcess[str]:
        environments.append(environment)
        return CompletedProcess(command, 0, "13\n", "")

    monkeypatch.setattr(submit, "run", run)
    monkeypatch.setattr(restart, "requeue", lambda *_, **__: f"{DISABLED} for job 12")
    monkeypatch.setattr(restart, "job_fields", lambda job: {"JobState": "RUNNING"})
    monkeypatch.setenv("SBATCH_TIMELIMIT", "5")
    owner.hand_to_job(folder, Job("12", "big"))
    folder.resubmission.parent.mkdir(exist_ok=True)
    folder.resubmission.write_text("#!/bin/sh\n#SBATCH --time=60\n")
    line = restart.requeue_or_resubmit(
        folder, launcher=LAUNCHER | {"resubmit": True}, environment={"SLURM_JOB_ID": "12"}
    )
    new = owner.Owner.read(folder)
    assert (line, new.job_id, new.clusters) == ("resubmitted as job 13", "13", "big")
    assert [environment for environment in environments if "SBATCH_TIMELIMIT" in environment] == []


def test_a_signal_without_a_job_is_a_cancellation(folder: RunFolder) -> None:
    meaning = {name: restart.why_stopped(name, environment={}) for name in ("SIGUSR2", "SIGTERM", "SIGINT")}
    assert meaning == {"SIGUSR2": "time_limit", "SIGTERM": "cancelled", "SIGINT": "cancelled"}


@pytest.mark.parametrize("state", ["COMPLETING", "PENDING"])
def test_a_job_that_slurm_has_requeued_is_not_submitted_again(
    folder: RunFolder, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two jobs would train in one folder."""
    fields = {"JobState": state, "PreemptTime": "None", "Restarts": "1"}
    monkeypatch.setattr(restart, "job_fields", lambda job: fields)
    monkeypatch.setattr(restart, "requeue", lambda job, *, exclude: f"Job is pending execution for job {job}")
    monkeypatch.setattr(restart, "resubmit", lambda script, *, exclude: "8")
    environment, launcher = {"SLURM_JOB_ID": "7"}, LAUNCHER | {"resubmit": True}
    line = restart.requeue_or_resubmit(folder, launcher=launcher, environment=environment)
    assert line == "requeued by Slurm itself as job 7"


@pytest.mark.parametrize(
    ("fields", "count", "reason"),
    [
        ({"JobState": "RUNNING", "PreemptTime": "2026-01-01T00:00:00", "Restarts": "0"}, None, "preempted"),
        ({"JobState": "COMPLETING", "PreemptTime": "None", "Restarts": "1"}, None, "preempted"),
        ({"JobState": "PENDING", "PreemptTime": "None", "Restarts": "2"}, "1", "preempted"),
        ({"JobState": "COMPLETING", "PreemptTime": "None", "Restarts": "1"}, "1", "cancelled"),
        ({"JobState": "CANCELLED", "PreemptTime": "None", "Restarts": "1"}, None, "cancelled"),
        ({"JobState": "TIMEOUT", "PreemptTime": "None", "Restarts": "0"}, None, "time_limit"),
        ({}, None, "cancelled"),
        ({}, "1", "cancelled"),
    ],
)
def test_slurms_record_tells_a_preemption_also_after_the_grace_time(
    fields: dict[str, str], count: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart, "job_fields", lambda job: fields)
    environment = {"SLURM_JOB_ID": "7"} | ({} if count is None else {"SLURM_RESTART_COUNT": count})
    assert restart.why_stopped("SIGTERM", environment=environment) == reason


def test_a_line_torn_by_a_crash_takes_no_other_along(folder: RunFolder) -> None:
    folder.metrics.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    attempts.begin(folder, step=2, environment={})
    attempts.append_line(folder.metrics, {"step": 3})
    assert folder.metrics.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'
