"""Inference and generation tell the watchdog how far they are, as training does."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name

import pytest

from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import read_json
from tests.distributed.test_hangs import VICTIM, agents, hang
from tests.distributed.test_local_launcher import AgentServer
from tests.workers import Workers

pytestmark = pytest.mark.processes

__all__ = ["agents"]
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
    import torch

    from hpc_parallel.training.observers import Progress
    from hpc_parallel.worker.main import TASKS, WATCHED
    from hpc_parallel.worker.session import TaskContext, read_config

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
    failure = read_json(folder.failure)
    assert failure is not None
    assert (failure["rank"], failure["kind"]) == (VICTIM, "hang")
