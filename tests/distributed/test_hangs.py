"""Real ranks that stand still: found, told apart, and named with where they stand.

Inference and generation tell the watchdog how far they are, as training does.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name

import psutil
import pytest
import torch

from hpc_parallel.launch.run_files import write
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.training.observers import Progress
from hpc_parallel.worker.main import TASKS, WATCHED, main
from hpc_parallel.worker.session import TaskContext, read_config
from tests.composed import prepared
from tests.distributed.test_local_launcher import HOST, AgentServer, agent_server, content, session, until
from tests.workers import Workers

pytestmark = pytest.mark.processes

VICTIM = 2
STEP = 7
SMALL = (
    "nodes=2", "gpus_per_node=2", "device=cpu", "launcher=local", "launcher.snapshot=false",
    "launcher.check_imports=false", "training.steps=100000", "training.log_every=1",
    "training.validate_every=null", "training.measure_steps=0", "data.max_bytes=300000",
    "data.sequence_length=16", "model.layers=1", "model.dim=32", "model.heads=2", "model.kv_heads=2",
    "model.ffn_dim=64", "cluster.hang_timeout_s=10",
)  # fmt: skip


@pytest.fixture(scope="module")
def agents() -> Iterator[AgentServer]:
    assert callable(main)  # what the agents import too
    with agent_server() as server:
        yield server


def hang(agents: AgentServer, path: Path, *words: str, stop: bool = False) -> RunFolder:
    """Train until the hang has been found and the run has ended."""
    run = prepared(f"run_dir={path / 'run'}", *SMALL, *words)
    write(run)
    agent = agents.start(run.folder)
    if stop:
        until(lambda: run.folder.metrics.exists() and len(run.folder.metrics.read_text().splitlines()) > 3)
        victims = [found for found in session(agent) if rank_of(found) == VICTIM]
        assert len(victims) == 1
        os.kill(victims[0], signal.SIGSTOP)
    assert agents.exit_code() == 1
    assert session(agent) == set()
    return run.folder


def rank_of(process: int) -> int | None:
    """By the files that it writes to: forked ranks have no command line of their own."""
    target = psutil.Process(process).as_dict(["pid"]) and os.readlink(f"/proc/{process}/fd/1")
    found = re.search(r"rank-(\d+)\.out$", target)
    return int(found[1]) if found else None


def stood(folder: RunFolder, rank: int) -> dict[str, object]:
    return json.loads((folder.logs / f"rank-{rank}.hang.json").read_text())


def test_a_rank_stuck_in_the_data_loader(agents: AgentServer, tmp_path: Path) -> None:
    data = ("data._target_=tests.harmed_data.HarmedData", f"+data.rank={VICTIM}", f"+data.step={STEP}")
    folder = hang(agents, tmp_path, *data)
    failure = content(folder.failure)
    assert (failure["rank"], failure["host"], failure["kind"]) == (VICTIM, HOST, "hang")
    assert re.fullmatch(
        rf"rank {VICTIM} on {HOST} failed first: hangs in loading the data of step {STEP} at "
        rf"tests/harmed_data\.py:\d+ in harm for 10 s; others wait in step {STEP} at \S+ in \w+ "
        r"\(all_reduce \d+ of \w+\); 3 followers",
        failure["line"],
    )
    assert "time.sleep(NEVER_S)" in failure["traceback"][-1]
    for rank in range(4):
        assert "can't meet through the store" not in folder.log(rank, "out").read_text()
        found = stood(folder, rank)
        assert (found["step"], found["phase"]) == (STEP, "data" if rank == VICTIM else "step")
        assert found["collective"]["complete"] == (rank == VICTIM)
        assert "most recent call first" in (folder.logs / f"rank-{rank}.stacks").read_text()


@pytest.mark.full
def test_a_stopped_rank(agents: AgentServer, tmp_path: Path) -> None:
    folder = hang(agents, tmp_path, stop=True)
    failure = content(folder.failure)
    assert (failure["rank"], failure["host"], failure["kind"]) == (VICTIM, HOST, "hang")
    assert re.fullmatch(
        rf"rank {VICTIM} on {HOST} failed first: stopped by a signal \(state T\) at \S+\.py:\d+ in \S+; "
        r"others wait in .*step \d+ at \S+ in \S+.*; 3 followers",
        failure["line"],
    )
    assert any("/trainer.py" in line for line in failure["traceback"])  # taken out of the stopped process
    assert [stood(folder, rank)["stopped"] for rank in range(4)] == [rank == VICTIM for rank in range(4)]


@pytest.mark.full
def test_a_rank_whose_python_cannot_run(agents: AgentServer, tmp_path: Path) -> None:
    data = ("data._target_=tests.harmed_data.HarmedData", f"+data.rank={VICTIM}", f"+data.step={STEP}")
    folder = hang(agents, tmp_path, *data, "+data.how=hold")
    failure = content(folder.failure)
    assert (failure["rank"], failure["kind"]) == (VICTIM, "hang")
    assert re.match(
        rf"rank {VICTIM} on {HOST} failed first: hangs at \S+ in \S+ or in reading the next batch at "
        r"tests/harmed_data\.py:\d+ in harm, "
        rf"where its Python can't run; others wait in step ({STEP - 1}|{STEP}) at ",
        failure["line"],
    )


TEXT = (
    "gpus_per_node=2", "strategy=pipeline", "data.max_bytes=100000", "data.sequence_length=16",
    "model.layers=2", "model.dim=16", "model.heads=2", "model.kv_heads=2", "model.ffn_dim=32",
    "training.global_batch_size=4",
)  # fmt: skip
MARKS = {
    # 3 batches of validation; of each batch size, 1 and 4, 3 passes to warm up and 2 timed ones
    "infer": ("task=infer", "task.batch_sizes=[4]", "task.repeats=2", "training.validation_samples=12"),
    "generate": ("task=generate", "task.new_tokens=5", "task.prompt_length=4"),
}


def marks_of(run_folder: str) -> list[tuple[str, int]]:
    class Kept(Progress):
        def mark(self, phase: str, step: int) -> None:
            super().mark(phase, step)
            marks.append((phase, step))

    marks: list[tuple[str, int]] = []
    folder = RunFolder(Path(run_folder))
    config, values = read_config(folder.config)
    assert config.task.name in WATCHED
    task = resolve_name(TASKS[config.task.name])
    task(TaskContext(config, values, folder, torch.device("cpu"), environment={}, progress=Kept()))
    return marks


@pytest.mark.parametrize(("task", "steps"), [("infer", 13), ("generate", 5)])
def test_every_pass_is_a_step(workers: Workers, task: str, steps: int) -> None:
    run = workers.prepare(*TEXT, *MARKS[task])
    expected = [("step", step) for step in range(1, steps + 1)] + [("done", steps)]
    assert workers.run(2, marks_of, str(run.folder.path)) == [expected] * 2


@pytest.mark.full
def test_a_rank_that_hangs_in_an_inference(agents: AgentServer, tmp_path: Path) -> None:
    data = (
        "data._target_=tests.harmed_data.HarmedData",
        "+data.split=validation",
        f"+data.rank={VICTIM}",
        "+data.step=4",
    )
    folder = hang(agents, tmp_path, *data, "task=infer")
    failure = content(folder.failure)
    assert (failure["rank"], failure["kind"]) == (VICTIM, "hang")
