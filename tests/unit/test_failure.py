"""Which rank is named as the cause, and what is written down about it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hpc_parallel.config.layout import Layout
from hpc_parallel.launch import attempts
from hpc_parallel.launch.run_folder import RunFolder, read_json, write_json
from hpc_parallel.worker import failure
from hpc_parallel.worker.conclude import conclude, first_cause
from hpc_parallel.worker.failure import Record
from hpc_parallel.worker.world import World

SUMMARY_KEYS = {
    "outcome", "strategy", "layout", "nodes", "gpus_per_node", "world_size", "steps", "samples",
    "final_loss", "validation_loss", "samples_per_s", "step_time_s", "latency_s", "peak_memory_bytes",
    "exposed_communication_share", "bubble_share", "traffic_bytes", "busiest_rank_traffic_bytes", "traffic",
    "ring_all_reduce", "predicted", "restarts", "lost_steps", "started", "ended", "job_ids",
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
                "training": {"steps": 20},
                "launcher": {"time_minutes": 60},
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
        (RuntimeError("Timed out waiting 600000ms for recv operation to complete"), "lost_peer"),
        (RuntimeError("Failed to recv, got 0 bytes. Connection was likely closed."), "lost_peer"),
        (RuntimeError("ncclRemoteError: A call failed possibly due to a network error"), "lost_peer"),
        (ConnectionResetError("Connection reset by peer"), "error"),  # the user's own socket
        (StartError("ranks 2, 3 on n1 never arrived"), "start"),
        (MemoryError(), "out_of_memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), "out_of_memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out_of_memory"),
        (ValueError("a bad label"), "error"),
    ],
)
def test_kind_of_an_exception(error: Exception, kind: str) -> None:
    assert failure.kind_of(error) == kind


def test_kind_of_a_wrapped_exception() -> None:
    wrapper = RuntimeError("[Stage 1] failed to run forward")
    wrapper.__cause__ = RuntimeError("Connection closed by peer")
    assert failure.kind_of(wrapper) == "lost_peer"
    wrapper.__cause__ = ValueError("a bad label")
    assert failure.kind_of(wrapper) == "error"


def test_a_ranks_own_word_stands(folder: RunFolder) -> None:
    try:
        raise ValueError("line one\nline two")
    except ValueError as error:
        failure.record_exception(folder, world=world(5), error=error)
    failure.record_death(folder, world=world(5), returncode=1)
    values = json.loads((folder.logs / "rank-5.failure.json").read_text())
    assert (values["rank"], values["host"], values["node"], values["kind"]) == (5, "n2", 2, "error")
    assert values["message"] == "ValueError: line one line two"
    assert values["signal"] is None
    assert values["traceback"][0] == "Traceback (most recent call last):"
    assert values["time"].endswith("+00:00")


def test_a_new_attempt_replaces_the_record_of_the_last(folder: RunFolder) -> None:
    failure.record_death(folder, world=world(5, attempt="1"), returncode=-9)
    failure.record_death(folder, world=world(6, attempt="1"), returncode=-9)
    failure.record_death(folder, world=world(5, attempt="2"), returncode=-11)
    assert [(found.rank, found.signal) for found in failure.records(folder)] == [(5, "SIGSEGV")]


def test_the_line(folder: RunFolder) -> None:
    failure.record_death(folder, world=world(5), returncode=-9)
    for rank in (0, 1, 2):
        lost = RuntimeError("Connection closed by peer")
        failure.record_exception(folder, world=world(rank), error=lost)
    line = "rank 5 on n2 failed first: killed by SIGKILL; 3 followers"
    assert conclude(folder, returncode=137) == line
    values = read_json(folder.failure)
    assert values is not None
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
    cause = first_cause(found)
    assert cause is not None
    assert cause.rank == 1


def test_the_earlier_of_two_causes_is_first() -> None:
    found = [record(0, "error", time_ns=7), record(1, "out_of_memory", time_ns=5)]
    assert first_cause(found) == found[1]


@given(
    st.lists(
        st.tuples(st.sampled_from(["killed", "error", "start", "lost_peer", "stopped"]), st.integers(0, 9)),
        min_size=1,
    )
)
def test_a_follower_is_the_cause_only_alone(ends: Sequence[tuple[str, int]]) -> None:
    found = [record(rank, kind, time_ns=at * MS) for rank, (kind, at) in enumerate(ends)]
    cause = first_cause(found)
    assert cause is not None
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
    assert summary is not None
    assert summary["outcome"] == "cancelled"


def test_a_clean_up_after_a_lost_peer_is_not_a_cancellation() -> None:
    """A network that broke: what Slurm ended half a second later is no cause."""
    found = [record(0, "lost_peer", time_ns=0), record(1, "killed", time_ns=500 * MS, signal="SIGTERM")]
    assert first_cause(found) == found[0]


def test_summary_of_a_failed_run(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    line = {"step": 10, "samples": 160, "loss": 3.5, "samples_per_s": 32.0, "step_time_s": 0.5}
    line |= {"peak_memory_bytes": 7}
    folder.metrics.write_text(json.dumps(line) + '\n{"step": 20, "sam')
    failure.record_death(folder, world=world(0), returncode=-9)
    conclude(folder, returncode=137)
    summary = read_json(folder.summary)
    assert summary is not None
    assert set(summary) == SUMMARY_KEYS
    assert (summary["outcome"], summary["strategy"], summary["job_ids"]) == ("failed", "hybrid", ["77"])
    assert (summary["steps"], summary["samples"], summary["final_loss"]) == (10, 160, 3.5)
    assert summary["layout"] == {
        "pipeline": 2, "replicate": 2, "shard": 1, "context": 1, "tensor": 2, "tile": 1,
    }  # fmt: skip


def test_a_completed_run_stays_so(folder: RunFolder) -> None:
    write_json(folder.summary, {"outcome": "completed"})
    failure.record_death(folder, world=world(3), returncode=-9)
    assert conclude(folder, returncode=1) is None
    assert not folder.failure.exists()
    assert read_json(folder.summary) == {"outcome": "completed"}


@pytest.mark.parametrize(
    ("returncode", "signal", "line"),
    [
        (1, None, "exit code 1: module: command not found"),
        (137, "SIGKILL", "killed by SIGKILL: module: command not found"),
        (-9, "SIGKILL", "killed by SIGKILL: module: command not found"),
    ],
)
def test_the_command_without_any_record(
    folder: RunFolder, returncode: int, signal: str | None, line: str
) -> None:
    log = folder.path / "slurm.out"
    log.write_text("loading\nmodule: command not found\n\n")
    code = (
        "import runpy, sys; sys.argv[0] = 'conclude';"
        "runpy.run_module('hpc_parallel.worker.conclude', run_name='__main__');"
        "assert not {'torch', 'hydra', 'omegaconf', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder.path), str(returncode), "--log", str(log)],
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stderr == f"the job failed before any rank started: {line}\n"
    values = read_json(folder.failure)
    assert values is not None
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
    assert (known["restarts"], known["lost_steps"], known["job_ids"]) == (1, 10, ["7", "9"])


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


def test_a_rank_that_said_why_is_not_outdone_by_srun(folder: RunFolder) -> None:
    failure.record_exception(folder, world=world(1), error=ValueError("a bad label"))
    line = conclude(folder, returncode=1, text="srun: error: n1: task 1: Killed\n")
    assert line == "rank 1 on n0 failed first: ValueError: a bad label"
