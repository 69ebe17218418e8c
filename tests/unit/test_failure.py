"""Which rank is named as the cause, and what is written down about it."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hpc_parallel.config.schema import AdamWConfig, TrainingConfig
from hpc_parallel.failure import failure, flight_recorder, normal_end, restart, root_cause
from hpc_parallel.failure.conclude_run import after_failure, conclude, find_root_cause
from hpc_parallel.failure.desync import compare
from hpc_parallel.failure.error_place import located, mark, mark_step
from hpc_parallel.failure.failure import Record
from hpc_parallel.failure.flight_recorder import Call, Entered
from hpc_parallel.failure.summary import OPTIMIZER_SPEEDLESS, SPEEDLESS, computed_as
from hpc_parallel.layout.layout import Layout
from hpc_parallel.machine.world import World
from hpc_parallel.problems import ConfigError
from hpc_parallel.record import attempts, owner
from hpc_parallel.record.checkpoint_index import MARKER
from hpc_parallel.record.metrics_file import size
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import read_json
from hpc_parallel.record.safe_write import write_json, write_text
from hpc_parallel.slurm import submit
from hpc_parallel.slurm.jobs import Job
from hpc_parallel.training.observers import Progress
from hpc_parallel.user_code import causes_of, hint
from hpc_parallel.worker import stop

SUMMARY_KEYS = {
    "weights",
    "comparison",
    "slow_ranks", "shares", "statistics_samples", "in_bfloat16", "rank_memory_bytes", "rank_state_bytes",
    "ended_early", "left_out",
    "outcome", "strategy", "layout", "nodes", "spares", "gpus_per_node", "world_size", "steps", "samples",
    "final_loss", "validation_loss", "samples_per_s", "step_time_s", "latency_s", "peak_memory_bytes",
    "exposed_communication_share", "bubble_share", "step_parts_s", "traffic_bytes",
    "busiest_rank_traffic_bytes", "traffic", "unknown_collectives", "ring_all_reduce", "predicted",
    "restarts", "lost_steps", "layout_after_step", "skipped_steps", "started", "ended", "job_ids",
    "time_use_s", "useful_share", "energy",
}  # fmt: skip
MS = 1_000_000


def world(rank: int, *, attempt: str = "a") -> World:
    return replace(
        World.discover({}), rank=rank, world_size=8, node=rank // 2, host=f"n{rank // 2}", attempt=attempt
    )


def record(rank: int, kind: str, *, time_ns: int, signal: str | None = None) -> Record:
    return Record(
        rank=rank, host=f"n{rank}", node=rank, attempt="a", kind=kind, message=kind, signal=signal,
        time="", time_ns=time_ns, traceback=[],
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.create()
    strategy = {
        "name": "hybrid",
        "execution": "spmd",
        **Layout().degrees,
        "pipeline": 2,
        "replicate": -1,
        "tensor": 2,
    }
    made.config.write_text(
        yaml.safe_dump(
            {
                "nodes": 4,
                "gpus_per_node": 2,
                "strategy": strategy,
                "task": {"name": "train"},
                "training": {"steps": 20, "on_nonfinite": "stop"},
                "launcher": {"time_minutes": 60, "max_requeues": 20, "max_restarts": 0},
            }
        )
    )
    return made


class StartError(RuntimeError):
    pass


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("[pair.cc:538] Connection closed by peer [10.77.0.2]:4212"), "lost_peer"),
        (RuntimeError("Read error [10.77.0.2]:4212: Connection reset by peer"), "lost_peer"),
        (RuntimeError("writev [10.77.0.2]:4212: Broken pipe"), "lost_peer"),
        (RuntimeError("Timed out waiting 600000ms for recv operation to complete"), "collective_timeout"),
        (RuntimeError("Application timeout caused pair closure"), "collective_timeout"),
        (RuntimeError("[enforce fail at pair.cc] op.preamble.length <= op.nbytes. 8 vs 4"), "desync"),
        (RuntimeError("Failed to recv, got 0 bytes. Connection was likely closed."), "lost_peer"),
        (RuntimeError("ncclRemoteError: A call failed possibly due to a network error"), "lost_peer"),
        (ConnectionResetError("Connection reset by peer"), "error"),  # the user's own socket
        (StartError("ranks 2, 3 on n1 never arrived"), "start"),
        (MemoryError(), "out_of_memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), "out_of_memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out_of_memory"),
        (ValueError("a bad label"), "error"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk"),
        (OSError(errno.EIO, "Input/output error"), "disk"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "disk"),
        (OSError(errno.EROFS, "Read-only file system"), "disk"),
        (OSError(errno.EFBIG, "File too large"), "disk"),
        (FileNotFoundError(errno.ENOENT, "No such file"), "error"),
        (RuntimeError("PytorchStreamWriter failed: No space left on device"), "disk"),
        (RuntimeError("the checkpoint could not be written: OSError: [Errno 27] File too large"), "disk"),
        (ConfigError(["strategy.cuts = [7] is past the last block"]), "configuration"),
    ],
)
def test_kind_of_an_exception(error: Exception, kind: str) -> None:
    assert failure.kind_and_source(error)[0] == kind


def test_kind_of_a_wrapped_exception() -> None:
    wrapper = RuntimeError("[Stage 1] failed to run forward")
    wrapper.__cause__ = RuntimeError("Connection closed by peer")
    assert failure.kind_and_source(wrapper)[0] == "lost_peer"
    wrapper.__cause__ = ValueError("a bad label")
    assert failure.kind_and_source(wrapper)[0] == "error"


_LOG = """Traceback (most recent call last):
  File "a.py", line 3, in read
    open(path)
    ^^^^
OSError: handled

Traceback (most recent call last):
  File "a.py", line 7, in write
    open(path)
{}
in step 30
"""


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        (
            "a.b.DamagedError: x can't be read: Too many open files",
            "error",
            "a.b.DamagedError: x can't be read: Too many open files. The limit of open files is too low",
        ),
        ("OSError: [Errno 28] No space left on device: 'x'", "disk", "OSError: [Errno 28] No space left"),
        ("MemoryError", "out_of_memory", "MemoryError"),
    ],
)
def test_a_rank_that_could_not_write_its_record(
    folder: RunFolder, raised: str, kind: str, message: str
) -> None:
    folder.log(5, "err").write_text(_LOG.format(raised))
    for rank, code in ((5, 1), (6, 1)):
        failure.record_death(folder, world=world(rank), returncode=code)
    of_5, of_6 = (json.loads((folder.logs / f"rank-{rank}.failure.json").read_text()) for rank in (5, 6))
    assert of_5["kind"] == kind
    assert of_5["message"].startswith(f"ended with exit code 1; the last exception of its log: {message}")
    assert of_6["message"] == "ended with exit code 1 and wrote no reason"


def test_an_abort_without_open_files_has_its_advice(folder: RunFolder) -> None:
    why = "[enforce fail at listener.cc:63] false. accept: Too many open files"
    folder.log(5, "err").write_text(f"  what():  {why}\nFatal Python error: Aborted\n")
    failure.record_death(folder, world=world(5), returncode=-signal.SIGABRT)
    message = json.loads((folder.logs / "rank-5.failure.json").read_text())["message"]
    assert message.startswith(f"killed by SIGABRT: {why}")
    assert "ulimit -n" in message


def test_the_record_of_a_rank_is_kept(folder: RunFolder) -> None:
    try:
        raise ValueError("line one\nline two")
    except ValueError as error:
        line = error.__traceback__.tb_lineno if error.__traceback__ else None
        failure.record_exception(folder, world=world(5), error=error)
    failure.record_death(folder, world=world(5), returncode=1)
    values = json.loads((folder.logs / "rank-5.failure.json").read_text())
    assert (values["rank"], values["host"], values["node"], values["kind"]) == (5, "n2", 2, "error")
    assert values["message"] == f"ValueError: line one line two (test_failure.py:{line})"
    assert values["signal"] is None
    assert values["traceback"][0] == "Traceback (most recent call last):"
    assert values["time"].endswith("+00:00")


def test_a_new_attempt_replaces_the_record_of_the_last(folder: RunFolder) -> None:
    failure.record_death(folder, world=world(5, attempt="1"), returncode=-9)
    failure.record_death(folder, world=world(6, attempt="1"), returncode=-9)
    failure.record_death(folder, world=world(5, attempt="2"), returncode=-11)
    assert [(found.rank, found.signal) for found in failure.records(folder)] == [(5, "SIGSEGV")]


def test_half_written_files_are_removed(folder: RunFolder) -> None:
    """A rank's own at its next start, all at the end of the job."""
    names = [".rank-1.failure.json.x", ".rank-1.hang.json.y", ".rank-11.failure.json.z", "rank-1.out"]
    for name in names:
        (folder.logs / name).write_text("{")
    failure.forget(folder, rank=1)
    assert sorted(path.name for path in folder.logs.iterdir()) == names[2:]
    conclude(folder, returncode=1)
    assert [path.name for path in folder.logs.iterdir()] == ["rank-1.out"]


def test_the_line(folder: RunFolder) -> None:
    failure.record_death(folder, world=world(5), returncode=-9)
    for rank in (0, 1, 2):
        lost = RuntimeError("Connection closed by peer")
        failure.record_exception(folder, world=world(rank), error=lost)
    line = "rank 5 on n2 failed first: killed by SIGKILL; 3 followers"
    assert conclude(folder, returncode=137) == line
    values = read_json(folder.failure)
    assert (values["rank"], values["host"], values["signal"], values["line"]) == (5, "n2", "SIGKILL", line)
    assert values["followers"] == [
        {"rank": 0, "host": "n0", "kind": "lost_peer"},
        {"rank": 1, "host": "n0", "kind": "lost_peer"},
        {"rank": 2, "host": "n1", "kind": "lost_peer"},
    ]


@pytest.mark.parametrize("shift_ms", [-5000, -3, 0, 3, 5000])
def test_a_hosts_clock_does_not_make_a_follower_the_cause(shift_ms: int) -> None:
    """The dead rank's host may be ahead or behind: who lost a peer still comes after."""
    found = [
        record(0, "lost_peer", time_ns=10_000 * MS),
        record(1, "killed", time_ns=(10_000 + shift_ms) * MS, signal="SIGKILL"),
        record(2, "stopped", time_ns=1 * MS, signal="SIGTERM"),
        record(3, "killed", time_ns=2 * MS, signal="SIGTERM"),  # srun's clean-up, by a slow clock
    ]
    cause = find_root_cause(found)
    assert cause.rank == 1


def test_the_earlier_of_two_causes_is_first() -> None:
    found = [record(0, "error", time_ns=7), record(1, "out_of_memory", time_ns=5)]
    assert find_root_cause(found) == found[1]


@given(
    st.lists(
        st.tuples(st.sampled_from(["killed", "error", "start", "lost_peer", "stopped"]), st.integers(0, 9)),
        min_size=1,
    )
)
def test_a_follower_is_the_cause_only_alone(ends: Sequence[tuple[str, int]]) -> None:
    found = [record(rank, kind, time_ns=at * MS) for rank, (kind, at) in enumerate(ends)]
    cause = find_root_cause(found)
    own = [other for other in found if other.kind not in ("lost_peer", "stopped")]
    if own:
        assert cause.time_ns == min(other.time_ns for other in own)
        assert cause in own
    else:
        assert cause.kind == "lost_peer" or all(other.kind == "stopped" for other in found)


def test_a_cancelled_job(folder: RunFolder) -> None:
    """scancel: every task gets SIGTERM; some die of it, some of a peer that did."""
    lost = RuntimeError("Connection closed by peer")
    failure.record_exception(folder, world=world(1), error=lost)  # noticed before the death is recorded
    failure.record_death(folder, world=world(0), returncode=-15)
    assert conclude(folder, returncode=143) == "cancelled by SIGTERM, first rank 0 on n0"
    assert not folder.failure.exists()
    summary = read_json(folder.summary)
    assert summary["outcome"] == "cancelled"


@pytest.mark.parametrize("has_record", [False, True])
@pytest.mark.parametrize("preempted", ["None", "2026-01-01T00:00:00"])
def test_ranks_that_a_preemption_ended_before_a_save_are_not_cancelled(
    folder: RunFolder, has_record: bool, preempted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script without a handler, or a run that SIGTERM ended while it started. Slurm answers only once."""
    answers = iter([{"JobState": "COMPLETING", "PreemptTime": preempted}])
    monkeypatch.setattr(restart, "job_fields", lambda job: next(answers, None))
    monkeypatch.setattr(restart, "requeue", lambda job, exclude: None)
    if has_record:
        failure.record_death(folder, world=world(0), returncode=-15)
    folder.config.write_text(
        folder.config.read_text().replace("time_minutes: 60", "time_minutes: 60\n  exclude: null")
    )
    line = conclude(folder, returncode=143, environment={"SLURM_JOB_ID": "7"})
    first = ", first rank 0 on n0" if has_record else ""
    cancelled = f"cancelled by SIGTERM{first}" if has_record else "cancelled"
    requeued = "preempted by Slurm: earlier checkpoints are kept; requeued as job 7"
    assert line == (cancelled if preempted == "None" else requeued)
    summary = read_json(folder.summary)
    assert summary["outcome"] == ("cancelled" if preempted == "None" else "preempted")


@pytest.mark.parametrize(("reason", "outcome"), [("None", "cancelled"), ("TimeLimit", "preempted")])
def test_ranks_that_saved_only_at_sigterm_of_the_time_limit_are_requeued(
    folder: RunFolder, reason: str, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They missed the warning before it, for example while they started."""
    monkeypatch.setattr(restart, "job_fields", lambda job: {"JobState": "COMPLETING", "Reason": reason})
    monkeypatch.setattr(restart, "requeue", lambda job, exclude: None)
    config = folder.read_config()
    config["launcher"] |= {"exclude": None, "resubmit": False, "max_requeues": 2}
    folder.config.write_text(json.dumps(config))
    write_json(folder.stopped, {"signal": "SIGTERM", "step": 30})
    line = conclude(folder, returncode=143, environment={"SLURM_JOB_ID": "7"})
    assert line is not None
    assert line.endswith("saved at step 30; requeued as job 7") == (outcome == "preempted")
    assert read_json(folder.summary)["outcome"] == outcome
    assert attempts.recent_ends(folder)[-1].how == ("time_limit" if outcome == "preempted" else "cancelled")


@pytest.mark.parametrize(
    ("returncode", "text", "reason", "began", "outcome"),
    [
        (140, "", "None", False, "preempted"),  # SIGUSR2, before the rank handles it
        (
            1,
            "slurmstepd: error: *** STEP 7.1 ON n1 CANCELLED AT 1 DUE TO TIME LIMIT ***",
            "None",
            False,
            "preempted",
        ),
        (143, "", "TimeLimit", False, "preempted"),
        (1, "", "TimeLimit", False, "preempted"),  # Slurm made no step
        (143, "", "None", False, "cancelled"),
        (1, "", "None", False, "failed"),
        (143, "", "TimeLimit", True, "failed"),
    ],
)
def test_a_packed_run_that_the_time_limit_ended_while_it_started_has_another_turn(
    folder: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    *,
    returncode: int,
    text: str,
    reason: str,
    began: bool,
    outcome: str,
) -> None:
    monkeypatch.setattr(restart, "job_fields", lambda job: {"JobState": "COMPLETING", "Reason": reason})
    owner.queue_in_job(folder, Job("7"))
    attempts.note(folder, "launched")
    if began:
        attempts.begin(folder, step=0, environment={})
    line = conclude(folder, returncode=returncode, text=text, environment={"SLURM_JOB_ID": "7"})
    assert read_json(folder.summary)["outcome"] == outcome
    assert (line or "").endswith("in this job or in the next one") == (outcome == "preempted")


def test_ranks_that_the_time_limit_ended_before_a_save_have_failed(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no line of Slurm in the log says so."""
    fields = {"JobState": "COMPLETING", "Reason": "TimeLimit"}
    monkeypatch.setattr(restart, "job_fields", lambda job: fields)
    failure.record_death(folder, world=world(0), returncode=-15)
    conclude(folder, returncode=143, environment={"SLURM_JOB_ID": "7"})
    assert read_json(folder.summary)["outcome"] == "failed"
    assert read_json(folder.failure)["kind"] == "time_limit"


@pytest.mark.parametrize(
    ("name", "words"),
    [("SIGINT", "Ctrl-C"), ("SIGHUP", "the end of its terminal (SIGHUP)"), ("SIGTERM", "SIGTERM")],
)
def test_a_cancellation_is_named_as_the_user_caused_it(folder: RunFolder, name: str, words: str) -> None:
    """The ranks of a local run get SIGTERM, whatever the user sent. The saved step counts."""
    line_of_20 = {"step": 20, "samples": 360, "loss": 1.5, "step_time_s": 0.5, "samples_per_s": 36.0}
    folder.metrics.write_text(json.dumps(line_of_20) + "\n")
    write_json(folder.stopped, {"signal": "SIGTERM", "step": 30})
    line = conclude(folder, returncode=1, cancelled=True, asked_by=name, environment={})
    assert line == f"cancelled by {words}: saved at step 30; go on with resume={folder.path}"
    summary = read_json(folder.summary)
    assert (summary["steps"], summary["samples"], summary["final_loss"]) == (30, 540, 1.5)


@pytest.mark.parametrize(
    ("name", "reason", "advice", "outcome"),
    [("SIGINT", "cancelled by Ctrl-C", "", "cancelled"),
     ("SIGUSR2", "the time limit of 60 min was near",
      "; a new start would reach it again: try a longer launcher.time_minutes, a smaller task.seconds, or "
      "script.resume_arguments", "failed")],
)  # fmt: skip
def test_a_task_that_can_not_continue_keeps_its_rows_and_is_not_requeued(
    folder: RunFolder, name: str, reason: str, advice: str, outcome: str
) -> None:
    write_json(folder.stopped, {"signal": name, "kept": "37 of 183 rows"})
    line = conclude(folder, returncode=1, environment={})
    assert line == f"{reason}: 37 of 183 rows are kept{advice}"
    summary = read_json(folder.summary)
    assert summary["outcome"] == outcome


def test_the_last_time_limit_says_what_to_type(folder: RunFolder) -> None:
    """In failure.json too, whose line `status` shows."""
    config = folder.read_config()
    config["launcher"] |= {"max_requeues": 0}
    folder.config.write_text(json.dumps(config))
    write_json(folder.stopped, {"signal": "SIGUSR2", "step": 30})
    line = conclude(folder, returncode=1, environment={})
    why = "the time limit of 60 min was near: saved at step 30; launcher.max_requeues=0 is used up"
    assert line == f"{why}; go on with resume={folder.path}"
    assert read_json(folder.failure)["line"] == line


def test_the_advice_for_a_packed_run_is_the_limit_of_its_job(folder: RunFolder) -> None:
    owner.queue_in_job(folder, Job("7"))
    attempts.begin(folder, step=0, environment={})
    write_json(folder.stopped, {"signal": "SIGUSR2", "kept": "37 of 183 rows"})
    line = conclude(folder, returncode=1, environment={})
    assert str(line).endswith(
        "; a new start would reach it again: try a longer sweep.pack_minutes, a smaller task.seconds, or "
        "script.resume_arguments"
    )


@pytest.mark.parametrize(
    ("job", "refusal"),
    [("7", "Requested operation is presently disabled for job 7"),  # JobRequeue=0
     ("2_0", "2_0: Requested operation is presently disabled"),
     ("7", "Access/permission denied for job 7")],
)  # fmt: skip
@pytest.mark.parametrize(
    ("name", "how", "kind"),
    [
        ("SIGUSR2", "the time limit of 60 min was near", "time_limit"),
        ("SIGTERM", "preempted by Slurm", "killed"),
    ],
)
def test_a_run_that_is_not_started_again_has_failed_and_says_what_to_type(
    folder: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    *,
    name: str,
    how: str,
    kind: str,
    job: str,
    refusal: str,
) -> None:
    """With what scontrol of 22.05 prints where a site requeues no jobs."""
    answer = CompletedProcess(["scontrol"], 1, "", f"{refusal}\n")
    monkeypatch.setattr(submit, "run", lambda *_, **__: answer)
    monkeypatch.setattr(restart, "job_fields", lambda job: {"JobState": "RUNNING", "PreemptTime": "now"})
    config = folder.read_config()
    config["launcher"] |= {"exclude": None, "resubmit": False, "max_requeues": 2}
    folder.config.write_text(json.dumps(config))
    write_json(folder.stopped, {"signal": name, "step": 30})
    array, _, task = job.partition("_")
    environment = {"SLURM_JOB_ID": array}
    environment |= {"SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": task} if task else {}
    line = conclude(folder, returncode=1, environment=environment)
    refused = f"not requeued ({refusal}); launcher.resubmit=true submits a new job then"
    assert line == f"{how}: saved at step 30; {refused}; go on with resume={folder.path}"
    written = read_json(folder.failure)
    assert (written["line"], written["kind"]) == (line, kind)
    assert read_json(folder.summary)["outcome"] == "failed"


def test_a_clean_up_after_a_lost_peer_is_not_a_cancellation() -> None:
    """A network that broke: what Slurm ended half a second later is no cause."""
    found = [record(0, "lost_peer", time_ns=0), record(1, "killed", time_ns=500 * MS, signal="SIGTERM")]
    assert find_root_cause(found) == found[0]


def test_summary_of_a_failed_run(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    line = {"step": 10, "samples": 160, "loss": 3.5, "samples_per_s": 32.0, "step_time_s": 0.5}
    line |= {"peak_memory_bytes": 7}
    folder.metrics.write_text(json.dumps(line) + '\n{"step": 20, "sam')
    failure.record_death(folder, world=world(0), returncode=-9)
    conclude(folder, returncode=137)
    summary = read_json(folder.summary)
    assert set(summary) == SUMMARY_KEYS
    assert (summary["outcome"], summary["strategy"], summary["job_ids"]) == ("failed", "hybrid", ["77"])
    assert (summary["steps"], summary["samples"], summary["final_loss"]) == (10, 160, 3.5)
    assert summary["layout"] == {
        "pipeline": 2, "replicate": 2, "shard": 1, "expert": 1, "context": 1, "tensor": 2, "tile": 1,
    }  # fmt: skip


def test_the_speed_in_a_summary_is_that_of_its_layout(folder: RunFolder) -> None:
    """Starts without torch.compile followed, and then one on other nodes that was lost before it trained."""
    config = folder.read_config()
    config["training"]["compile"] = False
    layout = computed_as(config, {"device": "A100"})
    before = computed_as({**config, "training": {"compile": True}}, {})
    attempts.begin(folder, step=0, environment={}, layout=before)
    lines = [{"step": step, "samples_per_s": 100.0, "step_time_s": 4.0, "peak_memory_bytes": 9}
             for step in range(10, 70, 10)]  # fmt: skip
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in (60, 80, 50):
        attempts.begin(folder, step=step, environment={}, layout=layout)
        with folder.metrics.open("a") as file:
            for logged in (step + 10, step + 20):
                line = {"samples_per_s": 400.0, "step_time_s": 1.0, "peak_memory_bytes": 3}
                file.write(json.dumps({"step": logged, **line}) + "\n")
    failure.record_death(folder, world=world(0), returncode=-9)
    keys = ("steps", "layout_after_step", "samples_per_s", "step_time_s", "peak_memory_bytes")
    expected = {1: (70, 50, 400, 1, 3), 3: (70, 70, None, None, None)}
    for nodes, figures in expected.items():
        write_text(folder.config, yaml.safe_dump({**config, "nodes": nodes * config["nodes"]}))
        folder.begin_anew()
        conclude(folder, returncode=137)
        summary = read_json(folder.summary)
        assert tuple(summary[key] for key in keys) == figures


# Keys of a section that a resumed run may change without another speed of its steps.
SAME_SPEED = {"training": SPEEDLESS, "optimizer": OPTIMIZER_SPEEDLESS}


@pytest.mark.parametrize(
    ("section", "key"),
    [(name, field.name) for name, schema in (("training", TrainingConfig), ("optimizer", AdamWConfig))
     for field in fields(schema)],
)  # fmt: skip
def test_a_key_changes_the_speed_unless_it_is_listed(folder: RunFolder, section: str, key: str) -> None:
    """A key that is new counts as one that changes the speed, until somebody lists it."""
    _begin_twice(folder, {section: {key: 1}}, {section: {key: 2}})
    assert attempts.history(folder).layout_after_step == (0 if key in SAME_SPEED[section] else 10)


@pytest.mark.parametrize(
    ("before", "after", "step"),
    [
        ("A100", "H100", 10),
        ("A100", "A100", 0),
        (None, "H100", 0),  # a version that did not record it
    ],
)
def test_another_device_has_another_speed(
    folder: RunFolder, before: str | None, after: str | None, step: int
) -> None:
    _begin_twice(folder, {"device": before}, {"device": after})
    assert attempts.history(folder).layout_after_step == step


def test_the_spares_of_a_job_change_no_speed(folder: RunFolder) -> None:
    _begin_twice(folder, {"launcher": {"spares": 0}}, {"launcher": {"spares": 2}})
    assert attempts.history(folder).layout_after_step == 0


def _begin_twice(folder: RunFolder, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Record two starts, the second after step 10, with these parts of the configuration, and the device."""
    for step, values in ((0, before), (10, after)):
        layout = computed_as(folder.read_config() | values, {"device": values.get("device")})
        attempts.begin(folder, step=step, environment={}, layout=layout)


@pytest.mark.parametrize(("signal_name", "outcome"), [(None, "failed"), ("SIGINT", "cancelled")])
def test_slow_ranks_are_in_the_summary_of_each_outcome(
    signal_name: str | None, outcome: str, folder: RunFolder
) -> None:
    slow = {"rank": 1, "host": "n1", "cause": "data", "line": "slow", "first_step": 60, "last_step": 80}
    times = {"factor": 2.0, "own_s": 0.2, "median_s": 0.1}
    write_json(folder.rank_times, {"slow": [], "accused": [slow | times, 3]})
    if signal_name is None:
        failure.record_death(folder, world=world(3), returncode=-9)
    else:
        write_json(folder.stopped, {"signal": signal_name, "step": 90})
    conclude(folder, returncode=1)
    summary = read_json(folder.summary)
    assert summary["outcome"] == outcome
    assert summary["slow_ranks"] == [slow | times]


def test_a_completed_run_stays_so(folder: RunFolder) -> None:
    write_json(folder.summary, {"outcome": "completed"})
    failure.record_death(folder, world=world(3), returncode=-9)
    assert conclude(folder, returncode=1) is None
    assert not folder.failure.exists()
    assert read_json(folder.summary) == {"outcome": "completed"}


@pytest.mark.parametrize("task", ["script", "train"])
@pytest.mark.parametrize("rank", [None, 0, 1])
def test_an_exit_code_0_completes_a_script_only_if_its_rank_0_ran(
    folder: RunFolder, task: str, rank: int | None
) -> None:
    """`mpirun --version` ends with code 0 too. Other tasks write their summary themselves."""
    config = folder.read_config()
    folder.config.write_text(yaml.safe_dump(config | {"task": {"name": task}}))
    for earlier in range(8):  # of the start before this one
        normal_end.record(folder, world=world(earlier, attempt="earlier"))
    failure.forget_all(folder)
    if rank is not None:
        normal_end.record(folder, world=world(rank))
    text = "hpc_parallel attempt 0 of job 7 on n0\nold\nhpc_parallel attempt 1 of job 7 on n0\nmpirun 4.1\n"
    line = conclude(folder, returncode=0, text=text, environment={})
    completes = task == "script" and rank == 0
    assert read_json(folder.summary)["outcome"] == ("completed" if completes else "failed")
    cause = "exit code 0, but rank 0 did not complete: mpirun 4.1"
    assert line == (None if completes else f"the job failed before any rank started: {cause}")


@pytest.mark.parametrize(
    ("message", "kind"),
    [("[pair.cc:538] Connection closed by peer [10.77.0.2]:4212", "lost_peer"),
     ("Timed out waiting 600000ms for recv operation to complete", "collective_timeout")],
)  # fmt: skip
@pytest.mark.parametrize(
    ("ended", "clause"),
    [({}, ""), ({1: "a"}, "; rank 1 on n0 had ended with exit code 0"), ({1: "earlier"}, ""),
     ({1: "a", 3: "a"}, "; ranks 1, 3 had ended with exit code 0")],
)  # fmt: skip
@pytest.mark.parametrize("task", ["script", "train"])
def test_a_rank_that_ended_early_is_named_where_others_lost_a_peer(
    folder: RunFolder, message: str, kind: str, ended: dict[int, str], clause: str, task: str
) -> None:
    """That of a script may be right; a training's ranks end when it is complete."""
    folder.config.write_text(yaml.safe_dump(folder.read_config() | {"task": {"name": task}}))
    for rank, attempt in ended.items():
        normal_end.record(folder, world=world(rank, attempt=attempt))
    failure.record_exception(folder, world=world(0), error=RuntimeError(message))
    line = conclude(folder, returncode=1)
    if task == "train" and clause:
        why = f"ended with exit code 0 while others waited for it: RuntimeError: {message}"
        assert line == f"rank 1 on n0 failed first: {why}; 1 follower"
        kind = "error"
    else:
        assert line == f"rank 0 on n0 failed first: RuntimeError: {message}{clause}"
    assert read_json(folder.failure)["kind"] == kind


def test_a_rank_that_failed_by_itself_needs_no_other_reason(folder: RunFolder) -> None:
    normal_end.record(folder, world=world(1))
    failure.record_death(folder, world=world(0), returncode=-9)
    assert conclude(folder, returncode=1) == "rank 0 on n0 failed first: killed by SIGKILL"


@pytest.mark.parametrize(
    ("returncode", "outcome", "kind"),
    [(-9, "failed", "killed"), (-15, "cancelled", None), (143, "cancelled", None)],
)
def test_ranks_that_end_with_their_parent_were_not_cancelled(
    folder: RunFolder, returncode: int, outcome: str, kind: str | None
) -> None:
    """They get SIGTERM when the process that starts them is killed."""
    folder.log(0, "out").touch()
    for rank in (0, 1):
        failure.record_death(folder, world=world(rank), returncode=-signal.SIGTERM)
    line = conclude(folder, returncode=returncode)
    assert read_json(folder.summary)["outcome"] == outcome
    assert (read_json(folder.failure)["kind"] if kind else None) == kind
    assert folder.failure.exists() == bool(kind)
    if kind:
        assert line == (
            "the job failed and no rank said why: the process that starts the ranks was killed by SIGKILL"
        )


@pytest.mark.parametrize(
    ("returncode", "signal", "line"),
    [
        (1, None, "exit code 1: module: command not found"),
        (137, "SIGKILL", "killed by SIGKILL: module: command not found"),
        (
            -9,
            "SIGKILL",
            "the process that starts the ranks was killed by SIGKILL: module: command not found",
        ),
    ],
)
def test_the_command_without_any_record(
    folder: RunFolder, returncode: int, signal: str | None, line: str
) -> None:
    log = folder.path / "slurm.out"
    log.write_text("loading\nmodule: command not found\n\n")
    code = (
        "import runpy, sys; sys.argv[0] = 'job';"
        "runpy.run_module('hpc_parallel.job', run_name='__main__');"
        "assert not {'torch', 'hydra', 'omegaconf', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "conclude", str(folder.path), str(returncode), "--log", str(log)],
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stderr == f"the job failed before any rank started: {line}\n"
    values = read_json(folder.failure)
    assert (values["rank"], values["signal"]) == (None, signal)
    assert values["traceback"] == ["loading", "module: command not found"]


def test_a_time_limit_is_named_and_no_cancellation(folder: RunFolder) -> None:
    """Slurm's SIGTERM looks like a person's; its own words in the job's log tell them apart."""
    failure.record_death(folder, world=world(1), returncode=-15)
    text = "slurmstepd: error: *** STEP 3.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***"
    line = conclude(folder, returncode=143, text=f"loading\n{text}\n")
    assert line == (
        "the time limit of 60 min was reached after step 0: raise launcher.time_minutes, or train less"
    )
    assert read_json(folder.failure)["kind"] == "time_limit"
    assert read_json(folder.summary)["outcome"] == "failed"


@pytest.mark.parametrize(
    ("task", "max_restarts", "script", "start", "has_checkpoint", "starts_again"),
    [
        ("train", 3, {}, 0, False, False),
        ("train", 3, {}, 1, False, True),  # it had the rest of the job's time
        ("train", 0, {}, 0, True, True),
        ("script", 0, {}, 0, False, False),
        ("script", 3, {}, 0, False, True),
        ("script", 0, {"resume_arguments": "--resume"}, 0, False, True),
        ("script", 0, {"stop_signal": "SIGTERM"}, 0, False, True),
        ("script", 0, {"requeue_codes": [75]}, 0, False, True),
    ],
)  # fmt: skip
def test_a_run_that_would_begin_anew_is_not_requeued_after_a_time_limit(
    folder: RunFolder, *, task: str, max_restarts: int, script: dict[str, Any], start: int,
    has_checkpoint: bool, starts_again: bool,
) -> None:  # fmt: skip
    """It would only reach the limit again, `launcher.max_requeues` times."""
    config = folder.read_config()
    config["task"] = {"name": task}
    config["script"] = script
    config["launcher"] |= {"max_restarts": max_restarts}
    write_json(folder.config, config)
    if has_checkpoint:
        (folder.checkpoints / "step-3").mkdir(parents=True)
        write_json(folder.checkpoints / "step-3" / MARKER, {})
    conclude(folder, returncode=143, text="error: *** STEP 3.0 ON n1 CANCELLED AT 1 DUE TO TIME LIMIT ***")
    decision = after_failure(folder, start=start)
    assert decision.starts_again == starts_again
    anew = "a new start would reach it again: try a longer launcher.time_minutes"
    assert decision.why == (
        "" if starts_again else f"{anew}, a smaller task.seconds, or script.resume_arguments"
    )


@pytest.mark.parametrize(
    ("slurm", "lost_peer", "outcome"),
    [
        ("JOB 3 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***", False, "cancelled"),
        ("JOB 3 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***", True, "cancelled"),
        ("JOB 3 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO PREEMPTION ***", True, "preempted"),
        ("JOB 3 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO NODE FAILURE, SEE LOG ***", True, "failed"),
        ("STEP 3.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***", True, "failed"),  # srun's own
        ("[2026-11-30T10:07:00.835] error: *** JOB 2 ON n1 CANCELLED AT 2026-11-30T10:07:00 DUE to SIGNAL "
         "Terminated ***", True, "cancelled"),  # Slurm 26.05
    ],
)  # fmt: skip
def test_an_end_of_mpirun_that_slurm_explains(
    folder: RunFolder, slurm: str, lost_peer: bool, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mpirun ends with code 1 while it starts the ranks; later the ranks lose each other."""
    monkeypatch.setattr(restart, "job_fields", lambda job: {
        "JobState": "COMPLETING", "PreemptTime": "now" if "PREEMPTION" in slurm else "None"
    })  # fmt: skip
    monkeypatch.setattr(restart, "requeue", lambda job, *, exclude: None)
    if lost_peer:
        failure.record_exception(folder, world=world(1), error=RuntimeError("Connection closed by peer"))
    start = "hpc_parallel attempt 0 of job 3 on n[1-2]\n"
    text = start + ("" if slurm.startswith("[") else "slurmstepd-n1: error: *** ") + f"{slurm}\n"
    conclude(folder, returncode=1, text=text, environment={"SLURM_JOB_ID": "3"})
    assert read_json(folder.summary)["outcome"] == outcome
    folder.begin_anew()
    again = f"{text}{start}"  # Slurm's words of an earlier start
    conclude(folder, returncode=1, text=again, environment={"SLURM_JOB_ID": "3"})
    assert read_json(folder.summary)["outcome"] == "failed"


def test_a_new_start_keeps_the_metrics_up_to_its_checkpoint(folder: RunFolder) -> None:
    """What lies beyond is trained again; a line torn by a crash is no line."""
    attempts.begin(folder, step=0, environment={"SLURM_JOB_ID": "7"})
    lines = [f'{{"step": {step}}}\n' for step in (10, 20, 30)]
    folder.metrics.write_text("".join(lines) + '{"step": 4')
    write_json(folder.summary, {"outcome": "failed"})
    folder.begin_anew()
    attempts.begin(folder, step=20, environment={"SLURM_JOB_ID": "7"})
    assert folder.metrics.read_text() == "".join(lines[:2])
    assert not folder.summary.exists()
    known = attempts.history(folder, environment={"SLURM_JOB_ID": "9"})
    assert (known.restarts, known.lost_steps, known.job_ids) == (1, 10, ("7", "9"))


def test_starts_that_ended_before_their_model_was_made_count(folder: RunFolder) -> None:
    for start in range(3):
        attempts.note(folder, "launched")
        if start != 1:
            attempts.begin(folder, step=0, environment={})
        assert attempts.history(folder).restarts == start


@pytest.mark.parametrize("peer", ["lost_peer", "killed"])
def test_a_rank_killed_with_its_supervisor_is_named_from_srun(folder: RunFolder, peer: str) -> None:
    """The out-of-memory killer may take both; srun alone has seen it, and the others' ends are followers."""
    if peer == "lost_peer":
        failure.record_exception(folder, world=world(0), error=RuntimeError("Connection closed by peer"))
    else:
        failure.record_death(folder, world=world(0), returncode=-15)
    log = """srun: error: n9: task 3: Killed
hpc_parallel attempt 1 of job 27 on n[1-2]
srun: error: n2: task 1: Killed
srun: launch/slurm: _step_signal: Terminating StepId=27.0
srun: error: n1: task 0: Killed
"""
    line = conclude(folder, returncode=137, text=log)
    assert line == "rank 1 on n2 failed first: killed by SIGKILL; 1 follower"
    assert read_json(folder.failure)["signal"] == "SIGKILL"
    assert read_json(folder.summary)["outcome"] == "failed"


@pytest.mark.parametrize("tasks", ["0-99999999999", "0-9,0-99999999999", "-,", "5-"])
def test_a_line_that_lists_no_tasks_names_no_rank(folder: RunFolder, tasks: str) -> None:
    """A program may print what looks like srun's line, also to fill the memory."""
    log = f"srun: error: n1: tasks {tasks}: Killed\nsrun: error: n2: task 1: Killed\n"
    line = conclude(folder, returncode=137, text=log)
    assert line == "rank 1 on n2 failed first: killed by SIGKILL"


def test_a_list_of_many_tasks_makes_a_bounded_number_of_records(folder: RunFolder) -> None:
    log = "srun: error: n1: tasks 0-999999: Killed\n" * 3
    killed = root_cause.killed_tasks(folder, text=log, recorded={0})
    assert len(killed) == 2**16
    assert killed[0].rank == 1


def test_a_record_of_a_rank_takes_precedence_over_srun(folder: RunFolder) -> None:
    failure.record_exception(folder, world=world(1), error=ValueError("a bad label"))
    line = conclude(folder, returncode=1, text="srun: error: n1: task 1: Killed\n")
    assert line == "rank 1 on n0 failed first: ValueError: a bad label"


CUDA = (
    "CUDA out of memory. Tried to allocate 2.10 GiB. GPU 0 has a total capacity of 79.15 GiB of which "
    "300.00 MiB is free. Including non-PyTorch memory, this process has 78.85 GiB memory in use."
)


def test_the_line_of_a_gpu_out_of_memory(folder: RunFolder) -> None:
    """The very line that the README promises."""

    class OutOfMemoryError(RuntimeError):
        pass

    for rank in (0, 1, 2, 3, 4, 6, 7):
        lost = RuntimeError("Connection closed by peer")
        failure.record_exception(folder, world=world(rank), error=lost)
    wrapped = RuntimeError("[Stage 1] failed to run forward")
    try:
        with located("block 7"):
            raise OutOfMemoryError(CUDA)
    except OutOfMemoryError as error:
        mark_step(error, 3)
        wrapped.__cause__ = error
    failure.record_exception(folder, world=world(5), error=wrapped)
    assert conclude(folder, returncode=1) == (
        "rank 5 on n2 failed first: out of memory in block 7 (asked 2.1 GiB, free 0.3 GiB); 7 followers"
    )
    assert read_json(folder.failure)["details"] == {
        "where": "block 7", "asked_bytes": round(2.1 * 2**30), "free_bytes": 300 * 2**20,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("phase", "details"),
    [
        ("start", {}),
        ("data", {"where": "loading the data of step 7", "step": 7}),
        ("step", {"step": 7}),
        ("log", {"where": "the metrics of step 7", "step": 7}),
        ("validate", {"where": "the validation after step 7", "step": 7}),
        ("save", {"where": "the checkpoint of step 7", "step": 7}),
        ("done", {"step": 7}),
    ],
)
def test_an_exception_is_recorded_with_the_phase_in_which_it_was_raised(
    folder: RunFolder, phase: str, details: dict[str, Any]
) -> None:
    progress, replicas = Progress(), type("ReplicaError", (RuntimeError,), {"details": {"step": 6}})
    if phase != "start":
        progress.mark(phase, 7)
    inner = ValueError("planted")
    mark(inner, "block 2")
    expected = [(ValueError("planted"), details), (inner, details | {"where": "block 2"})]
    expected += [(replicas("planted"), {"step": 6})]  # names its weight: no code is to blame
    for rank, (error, wanted) in enumerate(expected):
        progress.locate(error)
        failure.record_exception(folder, world=world(rank), error=error)
        assert json.loads((folder.logs / f"rank-{rank}.failure.json").read_text())["details"] == wanted


def test_the_place_of_an_exception_that_torch_wraps_is_that_of_its_cause(folder: RunFolder) -> None:
    with pytest.raises(ValueError, match="a bad label") as raised:
        raise ValueError("a bad label")
    wrapped = RuntimeError("[Stage 1] failed to run forward")  # raised in torch: no line of the user's
    wrapped.__cause__ = raised.value
    failure.record_exception(folder, world=world(5), error=wrapped)
    line = raised.tb.tb_lineno
    assert conclude(folder, returncode=1) == (
        "rank 5 on n2 failed first: RuntimeError: [Stage 1] failed to run forward, caused by ValueError: "
        f"a bad label (test_failure.py:{line})"
    )


def test_the_causes_of_a_chained_exception_are_in_the_line(folder: RunFolder) -> None:
    def read() -> None:
        try:
            raise KeyError("row")
        except KeyError as error:
            raise OSError("a bad file b.parquet") from error

    def generate() -> None:
        try:
            read()
        except OSError:
            raise RuntimeError("An error occurred") from None

    chains: dict[int, Callable[[], None]] = {0: read, 1: generate}
    wanted = {
        0: "OSError: a bad file b.parquet, caused by KeyError: 'row'",
        1: "RuntimeError: An error occurred",  # whose author says that nothing led to it
    }
    for rank, chain in chains.items():
        with pytest.raises((OSError, RuntimeError)) as raised:
            chain()
        failure.record_exception(folder, world=world(rank), error=raised.value)
        message = json.loads((folder.logs / f"rank-{rank}.failure.json").read_text())["message"]
        assert re.sub(r" \(test_failure.py:\d+\)", "", message) == wanted[rank]
    outer, middle, inner = RuntimeError("outer"), ValueError("middle"), KeyError("inner")
    outer.__cause__, middle.__context__, inner.__cause__ = middle, inner, outer  # and a circle
    assert causes_of(outer) == ", caused by ValueError: middle, after KeyError: 'inner'"
    repeated = RuntimeError("wrapped: middle")
    repeated.__cause__ = middle
    assert causes_of(repeated) == ", after KeyError: 'inner', caused by RuntimeError: outer"


@pytest.mark.parametrize(
    ("layer", "dtype", "remedy"),
    [
        (torch.nn.Conv2d(1, 1, 3), torch.uint8, "has uint8: try x.float() / 255 for images"),
        (torch.nn.Linear(4, 4), torch.uint8, "has uint8: try x.float() / 255 for images"),
        (torch.nn.BatchNorm2d(1), torch.uint8, "has uint8: try x.float() / 255 for images"),
        (torch.nn.BatchNorm2d(1, device="meta"), torch.uint8, "has uint8: try x.float() / 255 for images"),
        (torch.nn.Embedding(4, 2), torch.uint8, "and x.long() for token ids"),
        (torch.nn.Conv2d(1, 1, 3), torch.int64, "whole numbers: try x.float() in the data or the stem"),
        (torch.nn.Linear(4, 4), torch.int64, "whole numbers: try x.float() in the data or the stem"),
        (torch.nn.Linear(4, 4), torch.int32, "whole numbers: try x.float() in the data or the stem"),
    ],
)
def test_numbers_of_a_type_that_a_layer_does_not_take_have_a_remedy(
    folder: RunFolder, layer: torch.nn.Module, dtype: torch.dtype, remedy: str
) -> None:
    with pytest.raises(RuntimeError) as raised:
        layer(torch.zeros(2, 1, 4, 4, dtype=dtype, device=next(layer.parameters()).device))
    failure.record_exception(folder, world=world(1), error=raised.value)
    message = json.loads((folder.logs / "rank-1.failure.json").read_text())["message"]
    assert message.startswith(f"{type(raised.value).__name__}: ")
    assert remedy in message, message


@pytest.mark.parametrize("handler", [signal.SIG_IGN, print])
def test_a_process_of_the_users_keeps_the_users_handler(handler: Any) -> None:
    """That a process without one ends at SIGTERM is shown in test_failures."""
    if (child := os.fork()) == 0:
        stop.show_place_at_sigterm()
        signal.signal(signal.SIGTERM, handler)
        stop.forget_handlers()
        os._exit(0 if signal.getsignal(signal.SIGTERM) == handler else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_weight_that_the_loss_uses_has_a_remedy() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Linear(2, 2)
        model.factor = torch.nn.Parameter(torch.ones(()))
        replica = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        loss = replica(torch.ones(1, 2)).sum() * model.factor
        with pytest.raises(RuntimeError) as raised:
            loss.backward()
    finally:
        torch.distributed.destroy_process_group()
    assert "If the loss uses weights, let forward use them" in hint(str(raised.value))


def test_a_process_that_may_open_no_more_files_says_what_to_do(folder: RunFolder) -> None:
    """A rank that fails, and a run of which no rank could say why."""
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/dev/null")
    failure.record_exception(folder, world=world(1), error=error)
    assert "try `ulimit -n 4096`" in json.loads((folder.logs / "rank-1.failure.json").read_text())["message"]
    failure.forget_all(folder)
    conclude(folder, returncode=1, text=f"Traceback\nOSError: {error}\n", environment={})
    assert "try `ulimit -n 4096`" in json.loads(folder.failure.read_text())["message"]


def test_a_message_with_the_word_byte_has_no_remedy() -> None:
    assert hint("Byte 17 of the header is wrong") == hint("the file has one Byte too many") == ""


def test_the_innermost_place_stands() -> None:
    with (
        pytest.raises(ValueError, match="a bad label") as raised,
        located("the optimizer"),
        located("block 7"),
    ):
        raise ValueError("a bad label")
    assert raised.value.__notes__ == ["in block 7"]


@pytest.mark.parametrize(
    ("count", "words"),
    [(512, "512 bytes"), (3 * 2**20, "3.0 MiB"), (300 * 2**20, "0.3 GiB"), (2**52, "4096.0 TiB")],
)
def test_sizes(count: int, words: str) -> None:
    assert size(count) == words


def test_a_full_disk(folder: RunFolder) -> None:
    """A writer that meets it, as a checkpoint's would; torch's wrapper says it in words only."""

    class CheckpointException(BaseException):  # torch.distributed.checkpoint's
        pass

    full = OSError(errno.ENOSPC, "No space left on device", "/data/step-5")
    failure.record_exception(folder, world=world(2), error=full)
    failure.record_exception(folder, world=world(3), error=RuntimeError("Connection closed by peer"))
    assert conclude(folder, returncode=1) == (
        "rank 2 on n1 failed first: OSError: [Errno 28] No space left on device: '/data/step-5'; 1 follower"
    )
    assert read_json(folder.failure)["kind"] == "disk"
    assert (
        failure.kind_and_source(CheckpointException("ranks:dict_keys([1]) ... No space left on device"))[0]
        == "disk"
    )


UNREACHED = "Communication connection failure"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("srun: error: Node failure on n2", "node n2 was lost; 1 follower"),
        ("slurmstepd: error: *** STEP 3.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO NODE n2 FAILURE ***",
         "node n2 was lost; 1 follower"),
        ("*** JOB 5 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO NODE FAILURE, SEE SLURMCTLD LOG ***",
         "a node was lost; 1 follower"),
        ("Slurm says of job 5: node_fail (NodeDown)", "a node was lost; 1 follower"),
        (f"srun: error: Task launch for StepId=2.0 failed on node n2: {UNREACHED}\nsrun: Job step aborted",
         f"node n2 could not start its ranks: {UNREACHED}; 1 follower"),
        ("ORTE has lost communication with a remote daemon.", "a node was lost; 1 follower"),
        ("srun: error: Node failure on n2\nhpc_parallel attempt 2 of job 5 on n[1,3]",
         "rank 1 on n0 failed first: RuntimeError: Connection closed by peer"),
    ],
)  # fmt: skip
def test_a_lost_node_is_named_from_slurms_output(folder: RunFolder, text: str, line: str) -> None:
    lost = RuntimeError("Connection closed by peer")
    failure.record_exception(folder, world=world(1), error=lost)
    assert conclude(folder, returncode=143, text=text) == line
    failed = read_json(folder.failure)
    assert (failed["kind"] == "node_lost") == ("follower" in line)
    lost = next((word for word in ("n2", "a node") if word in line), "n0")
    assert failed["host"] == (None if lost == "a node" else lost)
    (end,) = attempts.ends(folder)
    assert end.exclude == (("n2",) if "could not start" in line else ())  # Slurm knows of the others


def test_a_rank_that_failed_before_its_node_was_lost_is_named(folder: RunFolder) -> None:
    failure.record_exception(folder, world=world(1), error=ValueError("a bad label"))
    line = conclude(folder, returncode=1, text="srun: error: Node failure on n2")
    assert line == "rank 1 on n0 failed first: ValueError: a bad label"


def test_slurm_ends_a_rank_for_its_memory(folder: RunFolder) -> None:
    line = conclude(folder, returncode=137, text="srun: error: n2: task 4: Out Of Memory\n")
    assert line == (
        "rank 4 on n2 failed first: out of the job's memory: ended by Slurm (raise launcher.memory_gb)"
    )
    assert read_json(folder.failure)["kind"] == "out_of_memory"


def calls(*names: str, first: int = 1, group: str = "0", ranks: Sequence[int] = (0, 1, 2, 3)) -> Entered:
    made = [Call(n, name, "4", 10 * n + int(group), None) for n, name in enumerate(names, first)]
    return Entered(group, list(ranks), made)


def test_a_rank_missing_from_a_collective_is_named() -> None:
    behind = {rank: [calls("all_reduce", "all_gather")] for rank in (0, 1, 3)} | {2: [calls("all_reduce")]}
    finding = compare(behind, world_size=4)
    assert (finding.ranks, finding.waiting, finding.collective, finding.number) == (
        (2,), (0, 1, 3), "all_gather", 2,
    )  # fmt: skip
    silent = {rank: [calls("all_reduce")] for rank in (0, 1, 3)}
    finding = compare(silent, world_size=4)
    assert finding.ranks == (2,)
    assert compare({rank: [calls("all_reduce")] for rank in range(4)}, world_size=4) is None
    # Ended while it waited, it left no word: the one that is known to be behind is to blame.
    finding = compare({0: [calls("a", "b")], 1: [calls("a", "b")], 3: [calls("a")]}, world_size=4)
    assert finding.ranks == (3,)


def test_a_collective_that_a_record_no_longer_has_is_not_missing() -> None:
    """torch keeps the newest collectives: ranks 0 and 1 have entered too many since the one of all ranks."""
    late = [Call(n, "all_gather", "4", 1000 + n, None) for n in range(200, 204)]
    of_all, of_0, of_2 = calls("all_reduce"), Entered("1", [0, 1], late), Entered("2", [2, 3], late)
    records = {0: [of_0], 1: [of_0], 2: [of_all, of_2], 3: [of_all, of_2]}
    assert compare(records, world_size=4) is None
    records[3] = [of_all, Entered("2", [2, 3], late[:-1])]
    assert compare(records, world_size=4).ranks == (3,)


def test_a_rank_in_another_collective_is_named() -> None:
    right = {rank: [calls("all_reduce", "all_gather", "barrier", first=5)] for rank in (0, 1, 2)}
    finding = compare(right | {3: [calls("all_reduce", "barrier", "all_reduce", first=5)]}, world_size=4)
    assert finding.message == "entered barrier where ranks 0, 1, 2 entered all_gather (collective 6)"
    assert finding.ranks == (3,)


def test_of_two_in_different_collectives_the_one_that_left_its_habit_is_named() -> None:
    """Each step is a sum and a gather; rank 1 leaves out a sum, and goes on until it waits."""
    words = "step 1: 0-sum 0-gather; step 2: 0-sum 0-gather; step 3: "
    right, wrong = in_phases(f"{words}0-sum 0-gather"), in_phases(f"{words}0-gather; step 4: 0-sum")
    for named, ranks in ((1, {0: right, 1: wrong}), (0, {0: wrong, 1: right})):
        finding = compare(ranks, world_size=2)
        assert finding.ranks == (named,)
        assert finding.message == f"entered gather where rank {1 - named} entered sum (collective 5)"
    # Here a step ends after its sum, so the gather that follows in the phase of the line is no surprise.
    steps = ("step 1: 0-sum 0-max", "log 1: 0-gather 0-vote", "step 2: 0-sum 0-max", "log 2: 0-gather")
    words = "; ".join([*steps, "step 3: 0-sum"])
    right, wrong = in_phases(f"{words} 0-max"), in_phases(f"{words}; log 3: 0-gather")
    assert compare({0: right, 1: wrong}, world_size=2).ranks == (1,)
    assert compare({0: wrong, 1: right}, world_size=2).ranks == (0,)
    one = compare({0: in_phases("step 1: 0-sum"), 1: in_phases("step 1: 0-gather")}, world_size=2)
    assert one.ranks == ()
    assert one.message == (
        "ranks are in different collectives, and no earlier step shows which is right: rank 1: entered "
        "gather where rank 0 entered sum (collective 1); rank 0: entered sum where rank 1 entered gather "
        "(collective 1)"
    )


def test_a_rank_that_waits_in_another_group_is_not_blamed() -> None:
    """0 waits for 1, which waits for 3 in a group of their own."""
    standings = {
        0: [calls("all_reduce", "all_reduce", ranks=(0, 1))],
        1: [calls("all_reduce", ranks=(0, 1)), calls("all_gather", "all_gather", group="1", ranks=(1, 3))],
        3: [calls("all_gather", group="1", ranks=(1, 3))],
    }
    finding = compare(standings, world_size=4)
    assert finding.ranks == (3,)


def test_of_two_that_wait_for_each_other_the_one_that_left_its_habit_is_to_blame() -> None:
    """Each step is a sum in group 0, then one in group 1; in the second rank 1 leaves out the latter."""
    sums = ("all_reduce",) * 3
    standings = {
        0: [calls(*sums[:2], ranks=(0, 1)), calls(*sums[:2], group="1", ranks=(0, 1))],
        1: [calls(*sums, ranks=(0, 1)), calls(*sums[:1], group="1", ranks=(0, 1))],
    }
    finding = compare(standings, world_size=2)
    assert (finding.ranks, finding.waiting) == ((1,), (0,))
    swapped = compare({0: standings[1], 1: standings[0]}, world_size=2)
    assert swapped.ranks == (0,)


def in_phases(words: str) -> list[Entered]:
    """Groups 0 and 1 of ranks 0 and 1, as a record has them, from `step 1: 0-sum 1-sum; log 1: ...`."""
    entries, phases = [], []
    for part in words.split("; "):
        phase, _, names = part.rpartition(": ")
        if phase:
            phases.append((100 * len(entries) - 50, phase))
        for name in names.split():
            group, kind = name.split("-")
            entries.append({
                "profiling_name": f"gloo:{kind}", "process_group": [group, "undefined"], "is_p2p": False,
                "collective_seq_id": 1 + sum(entry["process_group"][0] == group for entry in entries),
                "input_sizes": [[4]], "time_created_ns": 100 * len(entries),
            })  # fmt: skip
    return flight_recorder.by_group(entries, members={"0": (0, 1), "1": (0, 1)}, phases=phases)


def test_collectives_of_the_start_are_no_habit_of_the_steps(folder: RunFolder) -> None:
    """A start ends with a gather after a broadcast, and a step too; rank 1 leaves out the sum of group 1."""
    first = "0-broadcast 0-gather; step 1: 1-sum"
    later = f"{first} 0-sum; log 1: 0-gather 0-broadcast; step 2: "
    habit = {0: in_phases(f"{later}1-sum"), 1: in_phases(f"{later}0-sum")}
    assert compare(habit, world_size=2).ranks == (1,)
    assert compare({0: habit[1], 1: habit[0]}, world_size=2).ranks == (0,)

    # Nothing before the first step says which of the two is right, so neither is blamed.
    for rank, start in ((0, first), (1, first.replace("1-sum", "0-sum"))):
        error = RuntimeError("Timed out waiting 12000ms for recv operation to complete")
        failure.record_exception(folder, world=world(rank), error=error, collectives=in_phases(start))
    assert conclude(folder, returncode=1) == (
        "ranks are in different collectives, and no earlier step shows which is right: rank 0: "
        "missing from sum (collective 3), in which rank 1 waited; its last collective was gather 2; rank 1: "
        "missing from sum (collective 1), in which rank 0 waited"
    )
    assert read_json(folder.failure)["rank"] is None


def test_sizes_that_are_new_do_not_hide_who_left_its_habit() -> None:
    """The gather of figures grew by one; after it the sum of group 1 is usual, and rank 1 leaves it out."""
    order = ["gather 5", "1 sum", "0 sum", "gather 6", "0 broadcast", "1 sum", "0 sum", "gather 6"]

    def standing(last: str) -> list[Entered]:
        groups: dict[str, list[Call]] = {"0": [], "1": []}
        for now, word in enumerate([*order, last]):
            first, second = word.split()
            group, name, size = ("0", first, second) if first == "gather" else (first, second, "4")
            groups[group].append(Call(len(groups[group]) + 1, name, size, now, None))
        return [Entered(group, [0, 1], found) for group, found in groups.items()]

    assert compare({0: standing("1 sum"), 1: standing("0 sum")}, world_size=2).ranks == (1,)
    assert compare({1: standing("1 sum"), 0: standing("0 sum")}, world_size=2).ranks == (0,)


def test_a_host_that_runs_ahead_does_not_blame_one_that_waits() -> None:
    """Rank 0 needs the result of the 15th all-reduce, ranks 1 and 3 queue more of them; rank 2 has 14."""
    last = {0: 15, 1: 60, 2: 14, 3: 60}
    standings = {rank: [calls(*["all_reduce"] * count, ranks=())] for rank, count in last.items()}
    finding = compare(standings, world_size=4)
    assert (finding.ranks, finding.waiting, finding.number) == ((2,), (0, 1, 3), 15)
    for (group,) in standings.values():  # a record keeps the newest
        del group.calls[:-32]
    assert compare({rank: standings[rank] for rank in (1, 2, 3)}, world_size=4) == replace(
        finding, waiting=(1, 3), collective="a collective that is no longer recorded",
        message="missing from a collective that is no longer recorded (collective 15), in which ranks 1, 3 "
        "waited; its last collective was all_reduce 14",
    )  # fmt: skip


NCCL = (
    "[rank5]:[E1121] [Rank 5] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, "
    "OpType=ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for 600012 milliseconds before "
    "timing out."
)


def test_nccls_watchdog_names_the_missing_rank(folder: RunFolder) -> None:
    """It writes the recorder's content and aborts the process: ranks 0 and 5 waited, 6 stood one before."""
    for rank, count in ((0, 12), (5, 12), (6, 11)):
        entries = [
            {"profiling_name": "nccl:all_reduce", "process_group": ["0", "default_pg"], "is_p2p": False,
             "collective_seq_id": number, "input_sizes": [[4]],
             "time_created_ns": number}
            for number in range(1, count + 1)
        ]  # fmt: skip
        config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 5, 6]"}}
        dump = {"version": "2.10", "pg_config": config, "entries": entries}
        flight_recorder.dump_of(folder, rank=rank).write_bytes(pickle.dumps(dump, protocol=2))
        folder.log(rank, "err").write_text(f"{NCCL}\nterminate called\n")
        failure.record_death(folder, world=world(rank), returncode=-6)
    assert conclude(folder, returncode=134) == (
        "rank 6 on n3 failed first: missing from all_reduce (collective 12), in which ranks 0, 5 waited; its "
        "last collective was all_reduce 11; 2 followers"
    )
    assert read_json(folder.failure)["details"]["missing"] == [6]
    failure.forget(folder, rank=6)
    assert not flight_recorder.dump_of(folder, rank=6).exists()


@pytest.mark.parametrize("ended_by", [signal.SIGTERM, signal.SIGKILL])
def test_a_missing_rank_is_named_with_the_place_at_which_it_was_ended(
    folder: RunFolder, ended_by: signal.Signals
) -> None:
    """It writes its stack in C at SIGTERM, also if a handler of Python goes on, until SIGKILL comes."""
    if (child := os.fork()) == 0:
        os.dup2(os.open(folder.log(1, "err"), os.O_CREAT | os.O_WRONLY), 2)
        later = signal.SIG_DFL if ended_by == signal.SIGTERM else (lambda number, frame: None)
        signal.signal(signal.SIGTERM, later)
        stop.show_place_at_sigterm()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    failure.record_death(folder, world=world(1), returncode=-os.WTERMSIG(status), stopped=True)
    error = RuntimeError("Timed out waiting 12000ms for recv operation to complete")
    failure.record_exception(folder, world=world(0), error=error, collectives=in_phases("step 1: 0-sum"))
    assert re.fullmatch(
        r"rank 1 on n0 failed first: missing from sum \(collective 1\), in which rank 0 waited; it stood at "
        r"unit/test_failure.py:\d+ in test_a_missing_rank_is_named_with_the_place_at_which_it_was_ended; "
        "1 follower",
        conclude(folder, returncode=1) or "",
    )
    assert os.WTERMSIG(status) == ended_by
    log = folder.log(1, "err")
    for stale, text in ((True, log.read_text()), (False, f"{log.read_text()}a later line\n")):
        failure.forget(folder, rank=1)
        log.write_text(text)
        os.utime(log, (time.time() - 60 * stale,) * 2)
        failure.record_death(folder, world=world(1), returncode=-9, stopped=True)
        assert "it stood" not in (conclude(folder, returncode=1) or "it stood")


def test_a_rank_that_gloo_ended_is_not_called_missing(folder: RunFolder) -> None:
    """Either side may have left a collective out: gloo ends the one that receives more than it expects."""
    why = "[enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 256 vs 8. Is there a mismatch?"
    text = f"terminate called\n  what():  {why}\nFatal Python error: Aborted\n\nThread 0x1:"
    folder.log(1, "err").write_text(f'{text}\n  File "/me/net.py", line 3 in forward\n')
    failure.record_death(folder, world=world(1), returncode=-6)
    lost = RuntimeError("Read error: Connection reset by peer")
    failure.record_exception(folder, world=world(0), error=lost, collectives=in_phases("step 1: 0-sum"))
    assert conclude(folder, returncode=1) == (
        f"rank 1 on n0 failed first: {why}; its main thread was at me/net.py:3 in forward; 1 follower"
    )
    assert read_json(folder.failure)["kind"] == "desync"


@pytest.mark.parametrize(
    ("members", "blamed"),
    [((2, 3), "rank 3 on n1 failed first: [enforce fail"),
     ((1, 2), "rank 2 on n1 failed first: missing from sum (collective 3), in which ranks 0, 1 waited")],
)  # fmt: skip
def test_a_rank_that_waited_for_one_that_gloo_ended_is_not_called_missing(
    folder: RunFolder, members: tuple[int, int], blamed: str
) -> None:
    """Ranks 0 and 1 wait for rank 2, which waits in a group of its own; gloo has ended rank 3."""
    folder.log(3, "err").write_text(
        "  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes\n"
        "Fatal Python error: Aborted\n"
    )
    ahead, behind = calls("sum", "sum", "sum"), calls("sum", "sum")
    own = calls("all_to_all", first=5, group="5", ranks=members)
    for rank, entered in {0: [ahead], 1: [ahead], 2: [behind, own]}.items():
        lost = RuntimeError("Read error: Connection reset by peer")
        failure.record_exception(folder, world=world(rank), error=lost, collectives=entered)
    failure.record_death(folder, world=world(3), returncode=-6)
    line = conclude(folder, returncode=1)
    assert line is not None
    assert line.startswith(blamed)


@pytest.mark.parametrize(
    "line",
    [
        "[rank1]:[E1121] [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated "
        "with exception: NCCL error: remote process exited or there was a network error, NCCL version 2.27.5",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting early.",
    ],
)
def test_a_rank_that_nccl_ended_after_its_peer_is_a_follower(folder: RunFolder, line: str) -> None:
    folder.log(1, "err").write_text(f"the user's server: connection refused\n{line}\nterminate called\n")
    failure.record_death(folder, world=world(1), returncode=-6)
    failure.record_death(folder, world=world(5), returncode=-9)  # later, by the clock of its host
    kinds = {record.rank: (record.kind, record.message) for record in failure.records(folder)}
    assert kinds == {1: ("lost_peer", line), 5: ("killed", "killed by SIGKILL")}
    assert conclude(folder, returncode=134).startswith("rank 5 on n2 failed first: killed by SIGKILL")


def test_an_abort_of_another_reason_is_no_follower(folder: RunFolder) -> None:
    folder.log(1, "err").write_text("the user's server: connection refused\nterminate called\n")
    failure.record_death(folder, world=world(1), returncode=-6)
    (record,) = failure.records(folder)
    assert (record.kind, record.message) == ("killed", "killed by SIGABRT")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("terminate called after an instance of X\n  what():  std::bad_alloc", "std::bad_alloc"),
        ("terminate called after an instance of X\n  what():  bad access\nCompile with DSA", "bad access"),
        ("python: a.c:12: f: Assertion `x' failed.", "python: a.c:12: f: Assertion `x' failed."),
        ("double free or corruption (out)", "double free or corruption (out)"),
    ],
)
def test_an_abort_is_told_with_what_was_written_before_it(folder: RunFolder, text: str, why: str) -> None:
    folder.log(1, "err").write_text(f"a warning\n{text}\nFatal Python error: Aborted\n\nThread 0x1\n")
    failure.record_death(folder, world=world(1), returncode=-6)
    (record,) = failure.records(folder)
    assert (record.message, record.signal) == (f"killed by SIGABRT: {why}", "SIGABRT")
    assert record.kind == ("out_of_memory" if "alloc" in why else "killed")


def test_a_rank_is_told_what_its_log_got_since_it_started(folder: RunFolder) -> None:
    folder.log(1, "err").write_text(f"{NCCL}\nterminate called\n")
    failure.record_death(folder, world=world(1), returncode=-6, log_start=len(NCCL) + 1)
    assert failure.records(folder)[0].message == "killed by SIGABRT"


def test_a_crash_is_told_with_the_place_in_its_thread(folder: RunFolder) -> None:
    stack = ['  File "/me/train.py", line 7 in <module>', '  File "/me/net.py", line 3 in forward']
    threads = (
        "Thread 0x1:",
        '  File "/me/reader.py", line 1 in read',
        "",
        "Current thread 0x2:",
        *stack[::-1],
    )
    text = "\n".join(["Fatal Python error: Segmentation fault", "", *threads, "", "Extension modules: x"])
    for rank, code in ((1, -11), (2, -9)):  # nothing is written at SIGKILL: that was an earlier start
        folder.log(rank, "err").write_text(text)
        failure.record_death(folder, world=world(rank), returncode=code)
    segfault, kill = failure.records(folder)
    assert (segfault.message, segfault.traceback) == ("killed by SIGSEGV at me/net.py:3 in forward", stack)
    assert (kill.message, kill.traceback) == ("killed by SIGKILL", [])


def test_a_dump_that_would_run_code_is_refused(folder: RunFolder) -> None:
    class Evil:
        def __reduce__(self) -> object:
            return Path.touch, (folder.path / "pwned",)

    path = flight_recorder.dump_of(folder, rank=0)
    path.write_bytes(pickle.dumps({"entries": [Evil()]}))
    assert flight_recorder.read_dump(path) == []
    assert not (folder.path / "pwned").exists()
    for content in (b"", b"\x80", b"text", pickle.dumps([1]), pickle.dumps({"entries": [{"is_p2p": False}]})):
        path.write_bytes(content)
        assert flight_recorder.read_dump(path) == []


def test_the_recorders_variables_leave_the_users_alone(folder: RunFolder) -> None:
    environment = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "9", "TORCH_FR_DUMP_TEMP_FILE": "/mine"}
    reasons = flight_recorder.set_variables(folder, environment)
    reason = "the last collectives, for failure.json"
    assert reasons == {"TORCH_NCCL_DUMP_ON_TIMEOUT": reason, "TORCH_NCCL_ENABLE_TIMING": reason}
    assert environment == {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "9", "TORCH_FR_DUMP_TEMP_FILE": "/mine",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_NCCL_ENABLE_TIMING": "1",
    }  # fmt: skip
