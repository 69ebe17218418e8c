"""Recorded steps: where their time went, which words wrap a rank, and what can't be recorded."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpc_parallel.config.schema import ProfileConfig, RunConfig
from hpc_parallel.failure import failure, rank_process
from hpc_parallel.failure.rank_process import ProfilerError, profiler_words
from hpc_parallel.layout.step_facts import measured_steps
from hpc_parallel.problems import ConfigError
from hpc_parallel.profiling.recording import describe, parts
from hpc_parallel.profiling.timeline import STEP, WAIT, Event
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.strategies import ranges
from tests.composed import prepared

MS = 1_000_000
HOST = [  # one thread; times in ms from the start of the recorded window
    Event(STEP, 100 * MS, 200 * MS, is_mark=True),
    Event("data", 100 * MS, 110 * MS, is_mark=True),
    Event("aten::randint", 101 * MS, 105 * MS),
    Event("aten::mm", 110 * MS, 140 * MS),
    Event("aten::copy_", 135 * MS, 145 * MS),
    Event(WAIT, 150 * MS, 170 * MS, is_mark=True),
    Event("aten::mul", 170 * MS, 175 * MS),
]
KERNELS = [
    Event(STEP, 100 * MS, 200 * MS, is_mark=True),
    Event("data", 100 * MS, 110 * MS, is_mark=True),
    Event("aten::mm", 110 * MS, 112 * MS),
    Event("sgemm", 120 * MS, 150 * MS, on_device=True),
    Event("ncclDevKernel_AllReduce", 140 * MS, 170 * MS, on_device=True),
    Event("Memcpy HtoD", 165 * MS, 180 * MS, on_device=True),
]


@pytest.mark.parametrize(
    ("events", "on_gpu", "expected"),
    [
        (HOST, False, {"compute": 30, "copies": 10, "exposed communication": 20, "data": 10, "idle": 30}),
        (KERNELS, True, {"compute": 30, "copies": 15, "exposed communication": 15, "data": 10, "idle": 30}),
    ],
)
def test_where_the_time_went(events: list[Event], on_gpu: bool, expected: dict[str, int]) -> None:
    found = parts(events, on_gpu=on_gpu)
    assert {name: nanoseconds / MS for name, nanoseconds in found.items()} == expected
    assert sum(found.values()) == 100 * MS
    lines = describe(events, steps=2, on_gpu=on_gpu).splitlines()
    assert lines[0].split()[:4] == ["compute", "15.00", "ms", "30.0%"]
    assert lines[-1].split()[:4] == ["one", "step", "50.00", "ms"]


def test_ranges_are_balanced_on_a_gpu_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVTX itself needs CUDA, so a stand-in keeps what it is given."""
    calls: list[str] = []

    @contextmanager
    def nvtx(name: str) -> Iterator[None]:
        calls.append(name)
        try:
            yield
        finally:
            calls.append("end")

    monkeypatch.setattr(ranges, "_has_nvtx", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range", nvtx)
    with pytest.raises(ValueError, match="inside"), ranges.marked("step 1"), ranges.marked("forward"):
        raise ValueError("inside")
    assert calls == ["step 1", "forward", "end", "end"]


def test_a_compiled_block_may_have_ranges() -> None:
    def doubled(x: Tensor) -> Tensor:
        with ranges.marked("all_reduce replicate"):
            return 2 * x

    compiled = torch.compile(doubled, fullgraph=True, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [2, 2]


def config(kind: str, **others: object) -> dict[str, object]:
    return {"profile": {"kind": kind, "ranks": [0, 3], "arguments": [], **others}}


def test_the_words_around_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nsys", "ncu"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = RunFolder(tmp_path)

    def words(kind: str, rank: int) -> list[str]:
        return profiler_words(config(kind, arguments=["--a=b c"]), folder=folder, rank=rank, host="n1")

    assert words("none", 0) == words("torch", 0) == words("nsys", 1) == []
    assert words("nsys", 3)[:2] == ["nsys", "profile"]
    assert words("nsys", 3)[-2:] == [f"--output={tmp_path}/profile/rank-3", "--a=b c"]
    assert "--capture-range=cudaProfilerApi" in words("nsys", 0)
    assert words("ncu", 0)[-2:] == [f"--export={tmp_path}/profile/rank-0", "--a=b c"]
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ProfilerError, match=r"there is no nsys on n1\. Try launcher\.modules"):
        words("nsys", 0)
    assert profiler_words({}, folder=folder, rank=0, host="n1") == []  # a run from before this key


@pytest.fixture
def keeps_signals() -> Iterator[None]:
    """A rank's supervisor ignores SIGTERM and others, and a pool ends its processes by SIGTERM."""
    before = {number: signal.getsignal(number) for number in rank_process.STEP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("keeps_signals")
@pytest.mark.parametrize("exists", [True, False])
def test_a_rank_in_the_profiler(exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for nsys keeps its words and runs the rank, as nsys does."""
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.config.write_text(
        "cluster: {environment: {}}\nprofile: {kind: nsys, ranks: [0], arguments: ['--x=1']}\n"
    )
    stub = tmp_path / "nsys"
    stub.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/words\nwhile [ "$1" != --x=1 ]; do shift; done\n'
        'shift; exec "$@"\n'
    )
    stub.chmod(0o755 if exists else 0o644)
    monkeypatch.setenv("PATH", str(tmp_path))
    worker = (sys.executable, "-c", "import sys; open(sys.argv[1] + '/ran', 'w').write('x')")
    if exists:
        rank_process.run(str(folder.path), worker=worker)
        assert (folder.path / "ran").exists()
        assert (tmp_path / "words").read_text().splitlines()[-5:-1] == ["--x=1", *worker]
    else:
        with pytest.raises(SystemExit):
            rank_process.run(str(folder.path), worker=worker)
        (found,) = failure.records(folder)
        assert "profile=nsys: there is no nsys on" in found.message
        assert not (folder.path / "ran").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["profile=torch", "training.steps=11"],
         "profile.first_step = 10 and profile.steps = 3 end after training.steps = 11. "
         "Try profile.first_step=9."),
        (["profile=torch", "training.steps=5"],
         "profile.first_step = 10 and profile.steps = 3 end after training.steps = 5. "
         "Try profile.first_step=6 training.steps=8."),
        (["profile=torch", "profile.first_step=5"],
         "profile.first_step = 5 lies in the steps that training.measure_steps = 2 watches. "
         "Try profile.first_step=6."),
        (["profile=torch", "profile.ranks=[0,2]", "nodes=2"],
         "profile.ranks = [0,2] has no rank 2: the ranks are 0 to 1. Try profile.ranks=[0]."),
        (["profile=torch", "task=infer"],
         "profile.kind = torch records steps, and task=infer has none. Try profile.kind=none."),
        (["profile=torch", "profile.arguments=[-x]"],
         "profile.arguments = [-x] are for profile=nsys and profile=ncu. Try profile.arguments=[]."),
        (["profile=torch", "profile.memory=true", "device=cpu"],
         "profile.memory = true records the memory of GPUs, and the run has none. Try profile.memory=false."),
        (["profile=torch", "profile.memory=true", "cluster=cpu", "launcher=script"],
         "profile.memory = true records the memory of GPUs, and the run has none. Try profile.memory=false."),
        (["profile=nsys", "profile.memory=true"],
         "profile.memory = true is for profile=torch. Try profile.memory=false."),
        (["profile=nsys", "profile.first_step=0", "launcher.modules=[cuda]"],
         "profile.first_step = 0 must be at least 1. Try profile.first_step=1."),
        (["profile=nsys", "launcher=local"],
         "profile.kind = nsys wraps the processes of a job, and launcher=local forks its ranks. "
         "Try profile.kind=torch."),
        (["profile=nsys"],
         "profile.kind = nsys is not installed on this machine, and nothing that the job runs first may find "
         "it. Try profile.kind=nsys launcher.modules=[MODULE]."),
        (["profile=ncu", "nodes=2", "launcher.modules=[cuda]"],
         "profile.kind = ncu repeats each kernel, for which 2 ranks would wait for ever: it is for one "
         "device. Try profile.kind=nsys."),
    ],
)  # fmt: skip
def test_what_can_not_be_recorded(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError) as caught:
        prepared("launcher=script", "launcher.snapshot=false", *words)
    assert message in map(str, caught.value.problems)


@pytest.mark.parametrize(("kind", "measured"), [("none", 2), ("torch", 2), ("nsys", 0), ("ncu", 0)])
def test_no_step_is_measured_beside_nsight(kind: str, measured: int) -> None:
    """The second profiler of a process gets CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED."""
    config = RunConfig(profile=ProfileConfig(kind=kind))
    assert config.training.measure_steps == 2
    assert measured_steps(config) == measured


def test_first_steps_may_be_recorded_if_none_is_measured() -> None:
    assert prepared("profile=torch", "profile.first_step=1", "training.measure_steps=0")
    nsys = ("launcher=script", "profile=nsys", "launcher.modules=[nsight]", "launcher.snapshot=false")
    assert prepared(*nsys, "profile.first_step=1")
