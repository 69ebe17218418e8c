"""What Slurm's answers mean: recorded outputs of Slurm 20.11 to 25.05, and the right state for each.

The outputs are from the sources of Slurm and from clusters. No process is started: `client.run` is replaced.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_parallel.__main__ import main
from hpc_parallel.failure import end_runs
from hpc_parallel.failure.run_state import states
from hpc_parallel.record import attempts, owner
from hpc_parallel.record.recorded import read_run
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.slurm import client, limits, records, submit
from hpc_parallel.slurm.client import MISSING, UNANSWERED
from hpc_parallel.slurm.jobs import Job, job_fields, job_state, job_states, never_starting
from hpc_parallel.slurm.submit import SiteRefusedError, job_in
from hpc_parallel.slurm.submitit_executor import Executor
from tests.recorded_runs import finished, prepared, started


@dataclass(frozen=True)
class Answer:
    out: str = ""
    err: str = ""
    code: int = 0


Text = str | Answer
NOTHING = Answer()
INVALID = Answer(err="slurm_load_jobs error: Invalid job id specified\n", code=1)
DOWN = Answer(err="slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n", code=1)
NO_ACCOUNTING = Answer(err="Slurm accounting storage is disabled\n", code=1)
NO_DATABASE = Answer(
    err="sacct: error: slurm_persist_conn_open_without_init: failed to open persistent connection to "
    "host:localhost:6819: Connection refused\nsacct: error: Problem talking to the database: Connection "
    "refused\n",
    code=1,
)
HANGS = Answer(err="timed out", code=UNANSWERED)
TOO_LONG = Answer(err="[Errno 7] Argument list too long: 'sacct'", code=MISSING)
ACCESS = "scancel: error: Kill job error on job id 12: Access/permission denied\n"
BANNER = (
    "Welcome to Big.\n  Your job 7 of 9 this week; project 2024 has 81000 h left\n| status | all | up |\n"
)
JSON = Answer('{"meta": {"plugin": {"data_parser": "data_parser/v0.0.42"}}, "jobs": [{"job_id": 12}]}\n')

RUNNING = "12|12|RUNNING|10:00|1:00:00|2026-11-27T11:00:00|None\n"
PENDING = "12|12|PENDING|0:00|1:00:00|N/A|Resources\n"
REVOKED = "12|12|REVOKED|0:00|1:00:00|N/A|None\n"
COMPLETED = "12|12|COMPLETED|00:10:00|01:00:00|2099-11-27T10:00:00\n"
OLD_FAILED = "12|12|FAILED|00:10:00|01:00:00|2019-03-01T10:00:00\n"
SACCT_RUNNING = "12|12|RUNNING|00:10:00|01:00:00|Unknown\n"
NEW, OLD = 60.0, 3600.0  # seconds since the submission
NOT_YET = "unknown (Slurm does not list it yet)"
SIBLING = "unknown (it runs on another cluster of the federation, see squeue --federation --me)"
DENIED = "unknown (accounting has it as running, and the controller does not know it)"
SILENT, GONE = "no answer", "forgotten"
UNANSWERED = "unknown (the queue does not list it, and accounting does not answer)"

# squeue, sacct, age -> the state of job 12
STATES: list[tuple[str, Text, Text, float, str]] = [
    ("listed", RUNNING, NOTHING, OLD, "running"),
    ("listed, and accounting is late", RUNNING, "12|12|PENDING|00:00:00|01:00:00|Unknown\n", OLD, "running"),
    ("waits", PENDING, NOTHING, NEW, "pending (Resources)"),
    ("waits for hosts that boot", "12|12|CONFIGURING|0:01|1:00:00|N/A|None\n", NOTHING, NEW, "configuring"),
    ("new word of 25.05", "12|12|EXPEDITING|0:01|1:00:00|N/A|None\n", NOTHING, NEW, "expediting"),
    ("listed after its end", "12|12|FAILED|0:01|1:00:00|2026-11-27T11:00:00|NonZeroExitCode\n", NOTHING, OLD,
     "failed (NonZeroExitCode)"),
    ("its number was used before", RUNNING, OLD_FAILED, OLD, "running"),
    ("its number was used before, and it is not listed", INVALID, OLD_FAILED, NEW, NOT_YET),
    ("its number was used before, and it has ended", INVALID, OLD_FAILED, OLD, GONE),
    ("completed", INVALID, COMPLETED, OLD, "completed"),
    ("cancelled, 20.11", INVALID, "12|12|CANCELLED by 1000|00:00:09|01:00:00|2099-11-27T10:00:00\n", OLD,
     "cancelled"),
    ("without -P of a wrapper", INVALID, "12|12|CANCELLED+|00:00:09|01:00:00|2099-11-27T10:00:00\n", OLD,
     "cancelled"),
    ("out of memory", NOTHING, "12|12|OUT_OF_MEMORY|00:00:09|01:00:00|2099-11-27T10:00:00\n", OLD,
     "out_of_memory"),
    ("federation: the sibling runs it", REVOKED, NOTHING, OLD, SIBLING),
    ("federation: the sibling runs it, by accounting", INVALID, REVOKED, OLD, SIBLING),
    ("federation: both clusters are listed", REVOKED + RUNNING, NOTHING, OLD, "running"),
    ("federation: both clusters are listed, in the other order", RUNNING + REVOKED, NOTHING, OLD, "running"),
    ("empty accounting, new", INVALID, NOTHING, NEW, NOT_YET),
    ("empty accounting", INVALID, NOTHING, OLD, GONE),
    ("no accounting, new", INVALID, NO_ACCOUNTING, NEW, NOT_YET),
    ("no accounting", INVALID, NO_ACCOUNTING, OLD, GONE),
    ("database down", INVALID, NO_DATABASE, OLD, UNANSWERED),
    ("database down, listed", RUNNING, NO_DATABASE, OLD, "running"),
    ("accounting hangs", INVALID, HANGS, OLD, UNANSWERED),
    ("sacct can't start", INVALID, TOO_LONG, OLD, UNANSWERED),
    ("controller down", DOWN, NOTHING, OLD, SILENT),
    ("controller down, new", DOWN, NOTHING, NEW, SILENT),
    ("controller down, completed", DOWN, COMPLETED, OLD, "completed"),
    ("controller down, running", DOWN, SACCT_RUNNING, OLD, "running"),
    ("controller down, may be requeued", DOWN, COMPLETED.replace("COMPLETED", "NODE_FAIL"), OLD, SILENT),
    ("the controller has lost it", INVALID, SACCT_RUNNING, OLD, DENIED),
    ("banner", BANNER + RUNNING, NOTHING, OLD, "running"),
    ("banner, not listed", BANNER, NOTHING, OLD, SILENT),
    ("banner, completed", BANNER, BANNER + COMPLETED, OLD, "completed"),
    ("JSON", JSON, JSON, OLD, SILENT),
]  # fmt: skip
STATE_CELLS = pytest.mark.parametrize(
    ("squeue", "sacct", "age_s", "state"), [row[1:] for row in STATES], ids=[row[0] for row in STATES]
)


@dataclass
class Slurm:
    """Answers to Slurm's commands. Those of squeue may change after scancel."""

    answers: dict[str, Text]
    calls: list[tuple[str, ...]] = field(default_factory=list)
    clusters: list[str | None] = field(default_factory=list)

    def run(self, *command: str, cluster: str | None = None, **_: Any) -> CompletedProcess[str]:
        self.calls.append(command)
        self.clusters.append(cluster)
        answer = self.answers.get(command[0], NOTHING)
        if command[0] == "squeue" and "%o" in command[command.index("-o") + 1]:
            answer = self.answers.get("scripts", NOTHING)
        if command[0] == "scancel" and "after" in self.answers:
            self.answers["squeue"] = self.answers["after"]
        made = Answer(answer) if isinstance(answer, str) else answer
        return CompletedProcess(command, made.code, made.out, made.err)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    made = Slurm({})
    for module in (client, submit):
        monkeypatch.setattr(module, "run", made.run)
    monkeypatch.delenv("SLURM_CLUSTERS", raising=False)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path))  # answers are kept for a minute, of each Slurm
    monkeypatch.setattr(end_runs, "CANCEL_S", 0.0)
    return made


def job(age_s: float) -> Job:
    return Job("12", submitted_s=time.time() - age_s)


@STATE_CELLS
def test_the_state_of_a_job(slurm: Slurm, squeue: Text, sacct: Text, age_s: float, state: str) -> None:
    slurm.answers = {"squeue": squeue, "sacct": sacct}
    assert str(job_state(job(age_s))) == state


def test_a_task_that_is_cancelled_before_it_begins_is_forgotten_at_once(slurm: Slurm) -> None:
    """As Slurm 22.05 answers after `scancel 12_4`, while 12_3 waits."""
    slurm.answers = {"squeue": "12_3|12|PENDING|0:00|1:00:00|N/A|JobArrayTaskLimit\n", "sacct": NOTHING}
    waiting, cancelled = (replace(job(NEW), id=f"12_{number}") for number in (3, 4))
    states = job_states([waiting, cancelled])
    assert str(states[waiting]) == "pending (JobArrayTaskLimit)"
    assert str(states[cancelled]) == GONE


def test_one_number_may_be_that_of_two_jobs(slurm: Slurm) -> None:
    slurm.answers = {"squeue": INVALID, "sacct": OLD_FAILED}
    before, now = Job("12", submitted_s=datetime(2019, 3, 1).timestamp()), job(NEW)
    assert {job: str(state) for job, state in job_states([before, now]).items()} == {
        before: "failed", now: NOT_YET,
    }  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, RunFolder]:
    """One without a summary and one with it."""
    path = tmp_path_factory.mktemp("runs")
    return started(path / "1"), finished(path / "2")


@STATE_CELLS
def test_only_a_job_that_has_ended_leaves_its_folder_to_another(
    slurm: Slurm, squeue: Text, sacct: Text, age_s: float, state: str, runs: tuple[RunFolder, RunFolder]
) -> None:
    slurm.answers = {"squeue": squeue, "sacct": sacct}
    folder = runs[0]
    owner.hand_to_job(folder, job(age_s))
    word = state.partition(" ")[0]
    if word in ("failed", "forgotten", "completed", "cancelled", "out_of_memory"):
        owner.claim(folder)
        return
    with pytest.raises(owner.OwnedError) as refused:
        owner.claim(folder)
    advice = f". If it has ended: rm {folder.owner}" * (state in (SIBLING, DENIED, UNANSWERED))
    assert str(refused.value) == f"is going on already, as job 12 ({state}){advice}"


@STATE_CELLS
def test_the_state_of_a_run(
    slurm: Slurm, squeue: Text, sacct: Text, age_s: float, state: str, runs: tuple[RunFolder, RunFolder]
) -> None:
    """With a summary it has ended, unless the queue lists its job."""
    slurm.answers = {"squeue": squeue, "sacct": sacct}
    word = state.partition(" ")[0]
    without = {"completed": "broken off", SILENT: "unknown", GONE: "gone"}.get(state, word)
    is_listed = word in ("running", "pending", "configuring", "expediting")
    for folder, expected in zip(runs, (without, word if is_listed else "completed"), strict=True):
        owner.hand_to_job(folder, job(age_s))
        (found,) = states([read_run(folder.path)])
        assert (found.name, found.ended) == (expected, expected in ENDED_RUNS)


def test_a_job_that_failed_without_output_may_not_see_the_folder(slurm: Slurm, tmp_path: Path) -> None:
    """Slurm's own word for it, JobLaunchFailure, is in the queue only for some minutes."""
    slurm.answers = {"squeue": INVALID, "sacct": COMPLETED.replace("COMPLETED", "FAILED")}
    folder = prepared(tmp_path / "1")
    owner.hand_to_job(folder, job(OLD))
    unseen = "failed (its job has no output: do the hosts see the run folder?)"
    assert list(map(str, states([read_run(folder.path)]))) == [unseen]
    folder.slurm.mkdir(exist_ok=True)
    (folder.slurm / "12_submission.sh").touch()
    assert list(map(str, states([read_run(folder.path)]))) == [unseen]
    (folder.slurm / "12_0_log.out").touch()
    assert list(map(str, states([read_run(folder.path)]))) == ["failed"]
    (folder.slurm / "12_0_log.out").unlink()
    owner.queue_in_job(folder, job(OLD))  # a packed job has its output elsewhere
    assert list(map(str, states([read_run(folder.path)]))) == ["failed"]


def test_a_refused_account_is_answered_with_those_of_the_user(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "me")
    slurm.answers = {"sacctmgr": ASSOCIATIONS, "sinfo": NOTHING}
    refused = "sbatch: error: Batch job submission failed: Invalid account or account/partition combination"
    said = f"Slurm refused the job; nothing was submitted.\n  {refused}"
    assert submit.refusal_message(refused) == f"{said}\n  Your accounts: bio, physics."
    slurm.answers = {"sacctmgr": NO_DATABASE, "sinfo": NOTHING}
    assert submit.refusal_message(refused) == said


def test_a_refused_host_is_not_answered_with_partitions(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "partitions", lambda: ["main (4 nodes)"])
    host = "sbatch: error: Batch job submission failed: Invalid node name specified"
    size = "sbatch: error: Batch job submission failed: Requested node configuration is not available"
    said = [submit.refusal_message(text).splitlines()[2:] for text in (host, size)]
    assert said == [[], ["  Partitions here: main (4 nodes)."]]


ENDED_RUNS = ("completed", "failed", "cancelled", "out_of_memory", "gone", "broken off")
COMPLETING = RUNNING.replace("RUNNING", "COMPLETING")
CANCELLED = RUNNING.replace("RUNNING", "CANCELLED")
NO_EFFECT = "scancel has no effect: Slurm still lists its job as running"

# squeue before, scancel, squeue after -> the reason why the run could not be asked
CANCELS: list[tuple[str, Text, Text, Text, str | None]] = [
    ("runs", RUNNING, NOTHING, COMPLETING, None),
    ("waits", PENDING, NOTHING, CANCELLED, None),
    ("waits, and leaves no record", PENDING, NOTHING, INVALID, None),
    ("runs on a sibling", REVOKED, NOTHING, REVOKED, None),
    ("no effect", RUNNING, NOTHING, RUNNING, NO_EFFECT),
    ("refused", RUNNING, Answer(err=ACCESS, code=1), RUNNING, ACCESS.strip()),
    ("can't be asked afterwards", RUNNING, NOTHING, DOWN, None),
    ("can't start", RUNNING, Answer(err="No such file", code=MISSING), RUNNING, "No such file"),
]


@pytest.mark.parametrize(
    ("before", "scancel", "after", "reason"), [row[1:] for row in CANCELS], ids=[row[0] for row in CANCELS]
)
def test_the_end_of_a_job_is_seen(
    slurm: Slurm, before: Text, scancel: Text, after: Text, reason: str | None, tmp_path: Path, capsys: Any
) -> None:
    folder = started(tmp_path / "1")
    owner.hand_to_job(folder, job(NEW))
    scripts = f"12|12|{folder.batch_script}\n"
    slurm.answers = {"squeue": before, "scripts": scripts, "scancel": scancel, "after": after}
    assert main(["cancel", "--yes", "--json", str(folder.path)]) == (0 if reason is None else 3)
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["asked"], row["reason"]) == (reason is None, reason)
    assert ("scancel", "12") in slurm.calls


def test_a_job_that_waits_for_its_next_start_can_be_cancelled(slurm: Slurm, tmp_path: Path) -> None:
    """Its batch script, which would record the end, has ended before."""
    folder = started(tmp_path / "1")
    attempts.end(folder, how="preempted")
    write_json(folder.summary, {"outcome": "preempted"})
    write_json(folder.stopped, {"signal": "SIGTERM", "step": 12, "how": "preempted", "line": "saved"})
    owner.hand_to_job(folder, job(NEW))
    scripts = f"12|12|{folder.batch_script}\n"
    slurm.answers = {"squeue": PENDING, "scripts": scripts, "scancel": NOTHING, "after": CANCELLED}
    assert main(["cancel", "--yes", str(folder.path)]) == 0
    summary, stopped = (json.loads(file.read_text()) for file in (folder.summary, folder.stopped))
    assert (summary["outcome"], summary["steps"], summary["job_ids"]) == ("cancelled", 30, ["12"])
    assert (stopped["how"], stopped["line"]) == ("cancelled", "cancelled before its next start")
    assert [end.how for end in attempts.recent_ends(folder)] == ["preempted"]  # one end for each start


@pytest.mark.parametrize(
    ("output", "cluster"),
    [
        ("12\n", None), ("12;big\n", "big"), ("12\nbye\n", None), ("Submitted batch job 12\n", None),
        (f"{BANNER}12\n", None), (f"{BANNER}Submitted batch job 12 on cluster big\n", "big"),
        ("12\nSubmitted batch job 12 on cluster big\n", "big"),
        ("", "?"), (BANNER, "?"), ("12\n13\n", "?"), ("12;a\n12;b\n", "?"), (JSON.out, "?"),
    ],
)  # fmt: skip
def test_the_job_of_a_submission(slurm: Slurm, output: str, cluster: str | None, tmp_path: Path) -> None:
    """A banner is no job. If the output does not tell, the job of the script is the one."""
    if cluster == "?":
        elsewhere = f"11|11|PENDING|None|{tmp_path / 'other' / 'batch_script.sh'}\n"
        slurm.answers["scripts"] = elsewhere
        with pytest.raises(SiteRefusedError, match="sbatch did not say which job it has submitted"):
            job_in(output, scripts=tmp_path)
        slurm.answers["scripts"] = elsewhere + f"12|12|RUNNING|None|{tmp_path / 'batch_script.sh'}\n"
        cluster = None
    assert job_in(output, scripts=tmp_path) == Job("12", cluster)
    assert (
        Executor(tmp_path, script="", time_minutes=1)._get_job_id_from_submission_command(output.encode())
        == "12"
    )


def test_a_job_that_ends_is_not_its_own_successor(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "resubmit.sh"
    slurm.answers["scripts"] = f"21|21|PENDING|None|{script}\n20|20|COMPLETING|None|{script}\n"
    monkeypatch.setenv("SLURM_JOB_ID", "20")
    assert job_in("", scripts=tmp_path) == Job("21", None)
    monkeypatch.delenv("SLURM_JOB_ID")
    with pytest.raises(SiteRefusedError, match="sbatch did not say which job"):  # one of two
        job_in("", scripts=tmp_path)


@pytest.mark.parametrize(
    ("submission", "most_s"),
    [(partial(submit.resubmit, exclude=""), client.CONTROL_S), (submit.submit_script, 50 + submit.ANSWER_S)],
)
def test_a_submission_asks_a_silent_slurm_for_its_job_only_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, submission: Callable[[Path], Job], most_s: float
) -> None:
    """Slurm leaves a job that ends little time. sbatch answers with a banner after 50 s, squeue never."""
    passed = [0.0]
    clock = SimpleNamespace(
        monotonic=lambda: passed[0], time=lambda: passed[0], sleep=lambda s: passed.append(passed.pop() + s)
    )

    def run(
        *command: str, waits_s: tuple[float, ...], is_worth_waiting: Callable[[], bool] = bool, **_: Any
    ) -> CompletedProcess[str]:
        if command[0] == "sbatch":
            clock.sleep(50)
            return CompletedProcess(command, 0, BANNER, "")
        for wait_s in waits_s:
            clock.sleep(wait_s)
            if not is_worth_waiting():
                break
        return CompletedProcess(command, client.UNANSWERED, "", "timed out")

    for module in (client, submit):
        monkeypatch.setattr(module, "run", run)
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(client, "_ping", lambda within_s: True)
    script = tmp_path / "batch_script.sh"
    script.write_text("#!/bin/sh\n")
    with pytest.raises(SiteRefusedError, match="sbatch did not say which job it has submitted"):
        submission(script)
    assert most_s - 2 <= passed[0] <= most_s


def test_a_job_of_another_cluster_is_asked_for_there(slurm: Slurm, tmp_path: Path) -> None:
    """sbatch of a federation or of a wrapper may choose the cluster; the shell has no SLURM_CLUSTERS."""
    slurm.answers = {"sbatch": "12;big\n", "squeue": RUNNING}
    script = tmp_path / "batch_script.sh"
    script.write_text("#!/bin/sh\n")
    made = submit.submit_script(script)
    slurm.clusters.clear()
    found = {job.id: str(state) for job, state in job_states([made, Job("13")]).items()}
    assert found == {"12": "running", "13": "forgotten"}
    assert slurm.clusters == ["big", None, None]  # squeue, squeue, sacct
    folder = started(tmp_path / "1")
    owner.hand_to_job(folder, made)
    reason = "its job is on another cluster. Try export SLURM_CLUSTERS=big"
    assert owner.living_owner(folder) == f"job 12 ({reason})"


PRIMARY = "Slurmctld(primary) at login1 is {}\n"
BACKUP = "Slurmctld(backup) at login2 is {}\n"
LOUD = "MAINTENANCE OF THE BACKUP TONIGHT, user=me|x\n" + BANNER
VERSIONS = ("slurm 20.11.9", "slurm-wlm 22.05.8", "slurm 23.11.4-2.1", "slurm 25.05.0-0rc1")
ASSOCIATIONS = "me|bio|4|20\nme|physics||\nme|bio||\n"
BIO_AND_PHYSICS = [records.Association("bio", 4, 20), records.Association("physics")]
HOSTS = "host=n1\nhost=n2\nhost=n1\n"
RECORD = "JobId=12 JobName=a b JobState={} Reason=None EndTime=2026-11-27T11:00:00 Comment=x=y\n"
CONFIG = "Configuration data as of 2026\nMaxArraySize            = 1001\nSLURM_VERSION           = 22.05.8\n"
SINFO = "main*|3|256000|1-00:00:00|gpu:4|64|n[1-3]\nbig|1|512000+|infinite|(null)|128+|b1\n"

# What is asked, the command that is started, its answer -> what it means
QUESTIONS: list[tuple[Callable[[], Any], str, Text, Any]] = [
    (lambda: client._ping(within_s=1), "scontrol", PRIMARY.format("UP"), True),
    (lambda: client._ping(within_s=1), "scontrol", PRIMARY.format("DOWN") + BACKUP.format("UP"), True),
    (lambda: client._ping(within_s=1), "scontrol", PRIMARY.format("DOWN"), False),
    (lambda: client._ping(within_s=1), "scontrol", LOUD + PRIMARY.format("DOWN"), False),
    (lambda: client._ping(within_s=1), "scontrol", Answer(PRIMARY.format("DOWN"), code=1), False),
    (lambda: client._ping(within_s=1), "scontrol", Answer(code=1), False),
    (lambda: client._ping(within_s=1), "scontrol", Answer(PRIMARY.format("DOWN"), "slurm.conf", 1), False),
    (lambda: client._ping(within_s=1), "scontrol", Answer(err="no configuration source", code=1), None),
    *((records.release, "sbatch", f"{text}\n", text) for text in VERSIONS),
    *((records.release, "sbatch", f"{LOUD}{text}\n", text) for text in VERSIONS),
    (records.release, "sbatch", Answer(code=MISSING), "slurm"),
    (records.has_accounting, "sacct", NOTHING, True),
    (records.has_accounting, "sacct", LOUD, True),
    (records.has_accounting, "sacct", NO_ACCOUNTING, False),
    (records.has_accounting, "sacct", NO_DATABASE, False),
    (records.has_accounting, "sacct", HANGS, False),
    (lambda: records.associations_of("me"), "sacctmgr", ASSOCIATIONS, BIO_AND_PHYSICS),
    (lambda: records.associations_of("me"), "sacctmgr", LOUD + ASSOCIATIONS, BIO_AND_PHYSICS),
    (lambda: records.associations_of("me"), "sacctmgr", NO_DATABASE, []),
    (lambda: records.associations_of("me"), "sacctmgr", NOTHING, []),
    (records.max_array_size, "scontrol", CONFIG, 1001),
    (records.max_array_size, "scontrol", LOUD + CONFIG, 1001),
    (records.max_array_size, "scontrol", DOWN, None),
    (lambda: limits.hosts_of("main"), "sinfo", HOSTS, {"n1", "n2"}),
    (lambda: limits.hosts_of("main"), "sinfo", LOUD + HOSTS, {"n1", "n2"}),
    (lambda: limits.hosts_of("main"), "sinfo", DOWN, set()),
    (limits.partitions, "sinfo", LOUD + SINFO, ["big (1 node)", "main (3 nodes)"]),
    (limits.partitions, "sinfo", DOWN, []),
    (lambda: job_fields("12")["EndTime"], "scontrol", RECORD.format("RUNNING"), "2026-11-27T11:00:00"),
    (lambda: job_fields("12")["JobState"], "scontrol", LOUD + RECORD.format("RUNNING"), "RUNNING"),
    *((lambda: job_fields("12")["JobState"], "scontrol", "".join(map(RECORD.format, order)), "RUNNING")
      for order in (("REVOKED", "RUNNING"), ("RUNNING", "REVOKED"))),
    (lambda: job_fields("12"), "scontrol", INVALID, None),
    (lambda: job_fields("12"), "scontrol", JSON, None),
    (lambda: job_fields("12"), "scontrol", DOWN, None),
    *((lambda: never_starting([Job("12")], within_s=0), "squeue", PENDING.replace("Resources", reason),
       {Job("12"): reason} if never else {})
      for reason, never in (("PartitionTimeLimit", True), ("BadConstraints", True), ("Priority", False),
                            ("ReqNodeNotAvail, UnavailableNodes:n3", False), ("None", False))),
    (lambda: never_starting([Job("12")], within_s=0), "squeue", DOWN, {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("ask", "command", "answer", "meaning"), QUESTIONS,
    ids=[f"{row[1]} {number}" for number, row in enumerate(QUESTIONS)],
)  # fmt: skip
def test_what_an_answer_means(
    slurm: Slurm, ask: Callable[[], Any], command: str, answer: Text, meaning: Any
) -> None:
    """Lines of the site, errors and a federation change no answer."""
    slurm.answers = {command: answer}
    assert ask() == meaning
    assert slurm.calls[0][0] == command


def test_many_jobs_are_asked_for_in_pieces(slurm: Slurm) -> None:
    """Linux limits an argument to 128 KiB, and an array is one number."""
    listed = "".join(f"{number}|{number}|RUNNING|1:00|1:00:00|N/A|None\n" for number in range(2500))
    slurm.answers = {"squeue": listed + "5000_[0-11999%4]|5000|PENDING|0:00|1:00:00|N/A|Resources\n"}
    jobs = [Job(str(number)) for number in range(2500)] + [Job(f"5000_{task}") for task in range(12000)]
    found = job_states(jobs)
    assert {str(state) for state in found.values()} == {"running", "pending (Resources)"}
    assert len(found) == 14500
    assert max(len(word) for call in slurm.calls for word in call) < 128 * 1024
    assert [call[0] for call in slurm.calls] == ["squeue"] * 3


def test_a_job_that_was_never_seen_keeps_its_folder_while_it_is_new(slurm: Slurm, tmp_path: Path) -> None:
    """Old run folders do not have the time, so the answer of Slurm counts there."""
    slurm.answers = {"squeue": INVALID}
    folder = started(tmp_path / "1")
    write_json(folder.owner, {"job_id": "12"})
    assert owner.living_owner(folder) is None
    owner.hand_to_job(folder, job(NEW))
    assert owner.living_owner(folder) == f"job 12 ({NOT_YET})"


def test_a_summary_frees_the_folder_of_a_job_that_is_not_known_here(slurm: Slurm, tmp_path: Path) -> None:
    slurm.answers = {"squeue": REVOKED}
    folder = finished(tmp_path / "1")
    owner.hand_to_job(folder, job(OLD))
    assert owner.living_owner(folder) is None
    summary = json.loads(folder.summary.read_text())
    write_json(folder.summary, summary | {"outcome": "preempted"})  # and so starts again
    assert owner.living_owner(folder) is not None
