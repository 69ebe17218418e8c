"""What `status` knows, and how soon, where Slurm's commands hang, answer late or know a job by its script."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hpc_parallel.__main__ import main
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.slurm.jobs import FORGOTTEN, NO_ACCOUNTING, UNKNOWN, Job, JobState, job_state
from tests.recorded_runs import finished, prepared, started
from tests.unit.test_status import rows

STUB = """#!/bin/sh
case "${0##*/} $1" in
  "scontrol ping") sleep ${PING_S:-0}; echo "Slurmctld(primary) at here is ${PING:-UP}" ;;
  sacct*) sleep ${WAIT_SACCT:-0}; printf "$SACCT" ;;
  squeue*) sleep ${WAIT_SQUEUE:-0}; case "$*" in *%o*) printf "$SCRIPTS" ;; *) printf "$SQUEUE" ;; esac ;;
esac
"""


@pytest.fixture(autouse=True)
def _slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for Slurm's commands; how long each takes and what it says is told by variables."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name in ("scontrol", "sacct", "squeue"):
        (bin_ / name).write_text(STUB)
        (bin_ / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_}:{os.environ['PATH']}")
    for name in ("SACCT", "SQUEUE", "SCRIPTS"):
        monkeypatch.setenv(name, "")
    monkeypatch.chdir(tmp_path)


@pytest.mark.timing
@pytest.mark.parametrize(("ping_s", "ping"), [("60", "UP"), ("0", "DOWN")])
def test_commands_that_hang_cost_seconds_once(
    ping_s: str,
    ping: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where slurm.conf is away: each of Slurm's commands looks for it for a minute."""
    for name, value in {"WAIT_SACCT": "60", "WAIT_SQUEUE": "60", "PING_S": ping_s, "PING": ping}.items():
        monkeypatch.setenv(name, value)
    for number in range(3):
        write_json(started(tmp_path / f"runs/a/{number}").owner, {"job_id": str(number + 1)})
    write_json(finished(tmp_path / "runs/a/9").owner, {"job_id": "9"})
    prepared(tmp_path / "runs/a/8").batch_script.touch()  # perhaps given to sbatch by hand
    began_s = time.monotonic()
    assert main(["status"]) == 0
    assert time.monotonic() - began_s < 5
    *lines, note = capsys.readouterr().out.splitlines()
    counts = [sorted(line.strip().split(", ")) for line in lines]
    assert ["1 completed", "1 not started", "3 unknown"] in counts
    assert note.startswith("Slurm does not answer: how its jobs stand is not known now.")


@pytest.mark.timing
def test_nothing_is_asked_to_end_of_a_slurm_that_does_not_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WAIT_SACCT": "60", "WAIT_SQUEUE": "60", "PING_S": "60"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "bin" / "scancel").write_text("#!/bin/sh\nsleep 60\n")
    (tmp_path / "bin" / "scancel").chmod(0o755)
    write_json(started(tmp_path / "runs/a/1").owner, {"job_id": "1"})
    began_s = time.monotonic()
    assert main(["cancel", "--yes", "runs/a/1"]) == 3
    assert time.monotonic() - began_s < 10
    assert capsys.readouterr().err.endswith("unknown (Slurm does not answer)): Slurm does not answer\n")


def test_a_refusal_shows_slurms_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQUEUE", "1|1|RUNNING\\n")
    (tmp_path / "bin" / "scancel").write_text("#!/bin/sh\necho job 1: access denied >&2; exit 1\n")
    (tmp_path / "bin" / "scancel").chmod(0o755)
    folder = started(tmp_path / "runs/a/1")
    write_json(folder.owner, {"job_id": "1"})
    monkeypatch.setenv("SCRIPTS", f"1|1|{folder.batch_script}\\n")
    assert main(["cancel", "--yes", "runs/a/1"]) == 3
    assert capsys.readouterr().err.endswith("(job 1, running): job 1: access denied\n")


def test_a_job_that_completed_without_a_summary_is_not_a_completed_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a trap of a setup line replaced the lines that conclude a run."""
    monkeypatch.setenv("SACCT", "1|1|COMPLETED\\n")
    write_json(started(tmp_path / "runs/a/1").owner, {"job_id": "1"})
    (row,) = rows(capsys)
    assert (row["state"], row["reason"]) == ("broken off", "its job ended without a summary")


def test_the_time_until_the_end_of_a_job_is_slurms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script has no number of steps, so nothing else is known."""
    monkeypatch.setenv("SQUEUE", "1|1|RUNNING|00:10:00|01:00:00\\n")
    folder = started(tmp_path / "runs/a/1", "task=script", "script.file=train.py")
    write_json(folder.owner, {"job_id": "1"})
    (row,) = rows(capsys)
    assert (row["state"], row["job_left_s"], row["time_left_s"]) == ("running", 3000, None)
    assert main(["status"]) == 0
    assert "< 50 min 0 s" in capsys.readouterr().out


def test_one_that_answers_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAIT_SACCT", "1.5")
    monkeypatch.setenv("SACCT", "7|7|TIMEOUT\n")
    assert job_state(Job("7")).state == "TIMEOUT"


@pytest.mark.full
def test_a_late_answer_of_accounting_gives_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue answers, and has forgotten the job: it is gone only where accounting says so, too."""
    assert job_state(Job("7")).state == FORGOTTEN
    monkeypatch.setattr("hpc_parallel.slurm.client._PATIENCE_S", 0.2)
    monkeypatch.setenv("WAIT_SACCT", "60")
    assert job_state(Job("7")) == JobState(UNKNOWN, NO_ACCOUNTING)


def test_a_job_submitted_by_hand_is_identified_by_its_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [prepared(tmp_path / f"runs/by hand/{number}") for number in range(3)]
    for folder in folders:
        folder.batch_script.touch()
    lines = [
        f"{9 + at}|{9 + at}|PENDING|JobHeldUser|{folder.batch_script}"
        for at, folder in enumerate(folders[:2])
    ]
    monkeypatch.setenv("SCRIPTS", "\\n".join([*lines, "4|4|RUNNING|None|/home/me/x|y.sh"]) + "\\n")
    found = {row["run"]: (row["state"], row["reason"], row["job_id"], row["ended"]) for row in rows(capsys)}
    assert found == {
        "by hand/0": ("pending", "JobHeldUser", "9", False),
        "by hand/1": ("pending", "JobHeldUser", "10", False),
        "by hand/2": ("not started", "", None, True),
    }
    monkeypatch.setenv("SCRIPTS", lines[0].replace("PENDING|JobHeldUser", "RUNNING|None") + "\\n")
    (row,) = rows(capsys, "by hand/0")
    assert (row["state"], row["reason"], row["job_id"]) == ("running", "", "9")
