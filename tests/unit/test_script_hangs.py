"""Which rank of a hung script is behind, by NCCL's dumps and by stacks with frames of C code."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpc_parallel.failure import failure, flight_recorder, hang_report
from hpc_parallel.failure.conclude_run import conclude
from hpc_parallel.failure.flight_recorder import DeviceProgress, DumpRequest
from hpc_parallel.failure.hang_cause import cause_of
from hpc_parallel.failure.hang_report import HangReport
from hpc_parallel.failure.restart import RECOVERABLE
from hpc_parallel.layout.layout import Layout
from hpc_parallel.machine.world import World
from hpc_parallel.record.endings import Failure
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.script import script_failure
from hpc_parallel.script.script_failure import ScriptSupervisor

SILENT = "no rank has written anything for 20 s"
# As py-spy 0.4.3 --native showed the main threads of own scripts on an H100, innermost frame first.
ITEM = (
    ("0x7fb311a14820", "/usr/lib/libcuda.so.580.159.04"),
    ("cuStreamSynchronize", "/usr/lib/libcuda.so.580.159.04"),
    ("cudaStreamSynchronize", "/site-packages/nvidia/cu13/lib/libcudart.so.13"),
    ("at::native::_local_scalar_dense_cuda", "/site-packages/torch/lib/libtorch_cuda.so"),
)
FINALIZE = (
    ("cudaStreamSynchronize", "/site-packages/nvidia/nccl/lib/libnccl.so.2"),
    ("ncclCommFinalize", "init.cc"),
    ("c10d::ProcessGroupNCCL::shutdown", "/site-packages/torch/lib/libtorch_cuda.so"),
)
GLOO = (
    ("pthread_cond_wait", "/usr/lib/libc.so.6"),
    ("c10d::Work::wait", "/site-packages/torch/lib/libtorch_cpu.so"),
)
SLEEP = (("clock_nanosleep", "/usr/lib/libc.so.6"), ("time_sleep", "/usr/lib/libpython3.12.so.1.0"))


def entry(number: int, state: str, *, name: str = "all_reduce", group: str = "0") -> dict[str, Any]:
    """An entry of a dump by torch 2.11 on an H100, without its frames."""
    return {
        "record_id": number - 1, "pg_id": int(group), "process_group": (group, "default_pg"),
        "thread_name": "python3", "thread_id": "140505595822400", "collective_seq_id": number,
        "p2p_seq_id": 0, "op_id": number, "profiling_name": f"nccl:{name}",
        "time_created_ns": 1795829479269007193 + number, "input_sizes": [[1000]], "input_dtypes": ["Float"],
        "output_sizes": [[1000]], "output_dtypes": ["Float"], "state": state,
        "time_discovered_started_ns": None, "time_discovered_completed_ns": None,
        "retired": state == "completed", "timeout_ms": 600000, "is_p2p": False,
    }  # fmt: skip


def dump(*, completed: int, started: int = 0, scheduled: int = 0) -> bytes:
    """What NCCL of one of four ranks writes: so many collectives, in order, in each state."""
    states = ["completed"] * completed + ["started"] * started + ["scheduled"] * scheduled
    entries = [entry(number, state) for number, state in enumerate(states, start=1)]
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
    last = {"last_enqueued_collective": len(states), "last_completed_collective": completed}
    content = {"version": "2.10", "pg_config": config, "comm_lib_version": "2.28.9", "pg_status": {"0": last}}
    return pickle.dumps(content | {"entries": entries}, protocol=2)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.create()
    config = {
        "nodes": 4, "gpus_per_node": 1, "task": {"name": "script"}, "training": {"steps": 1},
        "strategy": {"name": "single", "execution": "spmd", **Layout().degrees, "replicate": -1},
    }  # fmt: skip
    made.config.write_text(yaml.safe_dump(config))
    return made


def request(folder: RunFolder, *, rank: int) -> DumpRequest:
    environment: dict[str, str] = {}
    flight_recorder.set_variables(folder, environment)
    environment["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] = str(folder.path / "rank-")
    made = DumpRequest.of(folder, rank=rank, environment=environment)
    assert made is not None
    return made


def progress(folder: RunFolder, content: bytes | None) -> DeviceProgress | None:
    made = request(folder, rank=0)
    if content is None:
        return None
    made.dump.write_bytes(content)
    return made.answer()


def stack(line: int, native: tuple[tuple[str, str], ...] = (), *, file: str = "/me/own.py") -> list[str]:
    frames = [f'  Binary file "{module}", at {name}' for name, module in reversed(native)]
    return [f'  File "{file}", line {line} in <module>', *frames]


def verdict(folder: RunFolder, *ranks: tuple[bytes | None, int, list[str]]) -> tuple[int, str]:
    """The rank and the message for ranks with a dump, the line of the script, and the main thread's stack."""
    for rank, (content, line, frames) in enumerate(ranks):
        world = replace(World.discover({}), rank=rank, world_size=len(ranks), host=f"n{rank}", attempt="a")
        failure.record_hang(folder, world=world, message="no progress", stack=[])
        report = HangReport(
            rank=rank, host=world.host, world_size=len(ranks), attempt="a", phase=None, step=None,
            idle_s=20.2, where=f"me/own.py:{line} in <module>", stack=frames, is_script=True,
            device=progress(folder, content),
        )  # fmt: skip
        hang_report.write_report(folder, report)
    cause = cause_of(folder, failure.records(folder))
    return cause.rank, cause.message


WAITS = dump(completed=14, started=1)  # the host waits for the result of the 15th
RUNS_AHEAD = dump(completed=14, started=1, scheduled=45)  # the host has queued all, and waits at the end
IDLE = dump(completed=14)
UNBEGUN = dump(completed=14, scheduled=46)
IN_15 = "waits in all_reduce 15 of default_pg"


def test_the_host_that_has_not_queued_the_collective_is_behind(folder: RunFolder) -> None:
    """Without py-spy, rank 0 seems to stand at its own line, `loss.item()`: it was named."""
    assert verdict(folder, (WAITS, 30, stack(30)), (IDLE, 23, stack(23))) == (
        1, "hangs at me/own.py:23 in <module>; the GPU of rank 0 waits in all_reduce 15 of default_pg, which "
        f"it has not queued; {SILENT}",
    )  # fmt: skip


@pytest.mark.parametrize("native", [(), FINALIZE])
def test_hosts_that_run_ahead_do_not_hide_it(folder: RunFolder, native: tuple[tuple[str, str], ...]) -> None:
    end = (RUNS_AHEAD, 33, stack(33, native))
    behind = (IDLE, 22, stack(22, SLEEP if native else ()))
    rank, message = verdict(folder, (WAITS, 30, stack(30, ITEM if native else ())), end, behind, end)
    assert rank == 2
    assert f"the GPU of ranks 0, 1, 3 {IN_15}, which it has not queued" in message


def test_the_gpu_that_has_not_begun_it_is_behind_if_all_hosts_have_queued_it(folder: RunFolder) -> None:
    end = (RUNS_AHEAD, 33, stack(33))
    assert verdict(folder, (WAITS, 30, stack(30)), end, (UNBEGUN, 33, stack(33)), end) == (
        2, f"its GPU hangs before all_reduce 15 of default_pg; the GPU of ranks 0, 1, 3 {IN_15}; the host "
        f"stands at me/own.py:33 in <module>; {SILENT}",
    )  # fmt: skip


def test_a_rank_that_never_used_the_group_is_behind(folder: RunFolder) -> None:
    other = pickle.loads(IDLE)
    other["entries"] = [entry(1, "completed", group="3")]
    for content in (dump(completed=0), pickle.dumps(other)):
        assert verdict(folder, (WAITS, 30, stack(30)), (content, 5, stack(5))) == (
            1, f"hangs at me/own.py:5 in <module>; the GPU of rank 0 {IN_15}, which it has not queued; "
            f"{SILENT}",
        )  # fmt: skip


def test_one_rank_without_an_answer_is_behind_if_all_other_gpus_wait(folder: RunFolder) -> None:
    """On an H100, a dump did not come within 12 s."""
    end = (RUNS_AHEAD, 33, stack(33, FINALIZE))
    silent = (None, 33, stack(33, FINALIZE))
    first = (WAITS, 30, stack(30, ITEM))
    rank, message = verdict(folder, first, end, silent, end)
    assert (rank, message) == (
        2, f"hangs at me/own.py:33 in <module>; the GPU of ranks 0, 1, 3 {IN_15}; {SILENT}"
    )  # fmt: skip
    assert verdict(folder, first, silent, silent, end) == (
        -1, f"NCCL in ranks 1, 2 gave no answer; the GPU of ranks 0, 3 {IN_15}; {SILENT}"
    )  # fmt: skip
    # Stacks tell then: a rank that waits for nothing.
    assert verdict(folder, first, silent, (None, 22, stack(22, SLEEP)), end)[0] == 2


def test_a_wait_for_the_gpu_or_for_gloo_counts_as_waiting(folder: RunFolder) -> None:
    """Without dumps: the innermost Python frame of rank 0 is the user's own, as that of rank 1."""
    for native in (ITEM, FINALIZE, GLOO):
        assert verdict(folder, (None, 30, stack(30, native)), (None, 23, stack(23, SLEEP))) == (
            1, f"hangs at me/own.py:23 in <module>; others wait at me/own.py:30 in <module>; {SILENT}"
        )  # fmt: skip
    # A host that waits for its GPU may stand anywhere, so the rarest place tells nothing.
    item, end = (None, 30, stack(30, ITEM)), (None, 33, stack(33, FINALIZE))
    assert verdict(folder, item, end, end, end)[0] == failure.NOBODY


def test_contradictions_blame_nobody(folder: RunFolder) -> None:
    assert verdict(folder, (None, 30, stack(30)), (None, 23, stack(23))) == (
        -1, "nothing tells which rank is behind; rank 0 at me/own.py:30 in <module>, rank 1 at me/own.py:23 "
        f"in <module>; {SILENT}",
    )  # fmt: skip
    # NCCL says rank 1, but it waits in gloo, and rank 0 sleeps although its GPU waits.
    rank, message = verdict(folder, (WAITS, 30, stack(30, SLEEP)), (IDLE, 23, stack(23, GLOO)))
    assert rank == failure.NOBODY
    assert message.startswith("NCCL and the stacks contradict each other: rank 1 hangs at me/own.py:23")
    assert message.endswith(
        "; but rank 1 waits for others in C code, and rank 0 stands at me/own.py:30 in <module>"
    )
    # Each GPU waits in another collective.
    other = pickle.loads(WAITS)
    other["entries"][-1]["profiling_name"] = "nccl:all_gather"
    rank, message = verdict(folder, (WAITS, 30, stack(30)), (pickle.dumps(other), 23, stack(23)))
    assert (rank, message) == (
        -1, f"the GPUs of all ranks wait; the GPU of rank 0 {IN_15}, the GPU of rank 1 waits in all_gather "
        f"15 of default_pg; {SILENT}",
    )  # fmt: skip
    line = f"the run hangs: {message}"
    assert conclude(folder, returncode=1) == line
    ended = Failure.read(folder)
    assert (ended.kind, ended.rank, ended.host, ended.line) == ("hang", None, None, line)
    assert [follower.rank for follower in ended.followers] == [0, 1]
    assert ended.kind in RECOVERABLE


@contextmanager
def nccl(made: DumpRequest, contents: list[bytes]) -> Iterator[None]:
    """The thread of NCCL that serves the pipe as torch's DumpPipe does, and writes one file after another."""
    os.mkfifo(made.pipe)
    pipe = os.open(made.pipe, os.O_RDONLY | os.O_NONBLOCK)
    ended = threading.Event()

    def serve() -> None:
        while not ended.wait(0.02):
            if os.read(pipe, 128):
                for content in contents:  # ofstream: not in one piece
                    made.dump.write_bytes(content)
                    time.sleep(0.1)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        os.close(pipe)


def test_a_rank_is_stopped_after_all_ranks_have_answered(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store of a stopped rank 0 would hold up the thread that answers in the other ranks."""
    stops: list[float] = []
    monkeypatch.setattr(script_failure, "python_of", lambda process: process)
    monkeypatch.setattr(script_failure, "spied_stacks", lambda process, native: f"native={native}")
    monkeypatch.setattr(os, "kill", lambda process, number: stops.append(time.monotonic()))
    made, other = request(folder, rank=0), request(folder, rank=1)
    environment = {
        "TORCH_FR_DUMP_TEMP_FILE": str(folder.logs / "collectives-rank-"),
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(folder.path / "rank-"),
    }
    world = replace(World.discover({}), rank=0, world_size=2, attempt="a")
    supervisor = ScriptSupervisor(
        folder, world=world, process=os.getpid(), timeout_s=100, environment=environment
    )
    assert not made.send()  # without NCCL
    made.dump.write_bytes(dump(completed=3))  # of an earlier time
    answered: list[float] = []

    def answer_later() -> None:
        time.sleep(0.5)
        answered.append(time.monotonic())
        other.dump.write_bytes(WAITS)

    thread = threading.Thread(target=answer_later)
    with nccl(made, [WAITS[:40], WAITS[:-1], WAITS]):
        thread.start()
        supervisor.on_alarm()
        thread.join()
    assert supervisor.device == made.answer()
    assert supervisor.device.queued == {"0 default_pg": 15}
    assert len(stops) == 1
    assert stops[0] > answered[0]
    assert supervisor.alarmed_at is not None
    assert supervisor.alarmed_at >= stops[0]


def test_dumps_that_do_not_come_to_the_run_folder_are_not_asked_for(
    folder: RunFolder, tmp_path: Path
) -> None:
    pipes = str(tmp_path)
    environment = {"TORCH_FR_DUMP_TEMP_FILE": "/mine/rank-"}
    flight_recorder.add_pipe(environment, folder=pipes, rank=3)
    assert DumpRequest.of(folder, rank=3, environment=environment) is None
    environment = {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(folder.logs / "collectives-rank-")}
    assert DumpRequest.of(folder, rank=3, environment=environment) is None  # no pipe
    with pytest.raises(OSError, match="exists"):  # as on a disk without pipes
        flight_recorder.add_pipe(environment, folder=pipes, rank=3)
    assert "TORCH_NCCL_DEBUG_INFO_PIPE_FILE" not in environment
    flight_recorder.add_pipe(environment, folder=pipes, rank=31)
    made = DumpRequest.of(folder, rank=31, environment=environment)
    assert made == DumpRequest(tmp_path / "rank-31.pipe", folder.logs / "collectives-rank-31")
    assert made.pipe.is_fifo()
    assert not made.send()  # nobody listens
    for rank in (0, 2, 31):
        (folder.logs / f"collectives-rank-{rank}").touch()
    assert made.ranks_without_answer(4) == {1, 3}
    assert made.answer() is None
