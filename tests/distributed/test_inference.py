"""Inference: the untrained model's loss on every layout, and times that are those of the whole path."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra.utils import instantiate

from hpc_parallel.config.tasks import batch_sizes
from hpc_parallel.models.layered import materialise
from hpc_parallel.record.checkpoint_index import MARKER
from hpc_parallel.record.recorded import read_run
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.training.observers import Progress
from hpc_parallel.training.validation import validate
from hpc_parallel.worker import inference
from hpc_parallel.worker.inference import LEAST_PASSES
from hpc_parallel.worker.session import Session, read_config
from tests.marks import in_full
from tests.workers import Workers

SAMPLES = 27  # not a multiple of any batch
COMMON = (
    "task=infer",
    "task.repeats=3",
    "training.precision=float64",
    f"training.validation_samples={SAMPLES}",
)
TEXT = ("data.max_bytes=300000", "data.sequence_length=32", "model.dim=64", "model.ffn_dim=160")
IMAGES = ("model=segmenter", "data=cells", "data.height=16", "data.width=32", "data.samples=400",
          "model.channels=[4,8]", "training.global_batch_size=16")  # fmt: skip
LAYOUTS = {
    "single, four microbatches": (*TEXT, "strategy=single", "training.microbatch_size=4"),
    "data over 2": (*TEXT, "strategy=data", "nodes=2"),
    "fsdp over 2": (*TEXT, "strategy=fsdp", "nodes=2"),
    "tensor over 2": (*TEXT, "strategy=tensor", "nodes=2"),
    "pipeline of 2": (*TEXT, "strategy=pipeline", "nodes=2"),
    "interleaved pipeline of 2": (*TEXT, "strategy=pipeline", "nodes=2", "strategy.schedule=interleaved"),
    "pipeline 2 x tensor 2": (*TEXT, "strategy=hybrid", "nodes=2", "gpus_per_node=2"),
    "layers over 2, one at a time": (*TEXT, "strategy=model", "nodes=2"),
    "context over 2": (*TEXT, "strategy=context", "nodes=2"),
    "one process, two devices": (*TEXT, "strategy=dataparallel", "gpus_per_node=2"),
    "two workers and a server": (
        *TEXT,
        "strategy=parameter_server",
        "nodes=3",
        "strategy.dedicated_server=true",
    ),
    "expert over 2": (*TEXT, "model=moe_tiny", "strategy=expert", "nodes=2"),
    "expert 2 x tensor 2": (
        *TEXT,
        "model=moe_tiny",
        "strategy=tensor",
        "nodes=2",
        "gpus_per_node=2",
        "strategy.tensor=2",
        "strategy.expert=2",
        "model.shared_experts=1",
        "model.dense_layers=1",
        "model.balance_step=0.1",
    ),
    "tile over 2": (*IMAGES, "strategy=tile", "nodes=2"),
    "tile 2 x replicate 2": (*IMAGES, "strategy=tile", "nodes=4", "strategy.tile=2", "strategy.replicate=2"),
}


@torch.no_grad()
def losses_of_one_device(run_folder: Path) -> list[float]:
    """The mean loss of each held-out sample, by the whole model alone."""
    config, _ = read_config(run_folder / "config.yaml")
    model = instantiate(config.model).eval()
    materialise(model, seed=config.seed, device="cpu", dtype=torch.float64)
    inputs, targets = instantiate(config.data).validation.batch(np.arange(SAMPLES))
    pairs = zip(inputs.split(1), targets.split(1), strict=True)
    return [(model.loss(model(x), y) / model.loss_terms(y)).item() for x, y in pairs]


def read(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return lines, json.loads((folder / "summary.json").read_text())


# `make test` proves one layout of each technique.
IN_FULL = (
    "pipeline 2 x tensor 2",
    "expert 2 x tensor 2",
    "interleaved pipeline of 2",
    "tile 2 x replicate 2",
)
CASES = [*(layout for layout in LAYOUTS if layout not in IN_FULL), *in_full((layout,) for layout in IN_FULL)]


@pytest.mark.parametrize("layout", CASES)
def test_the_loss_is_the_untrained_model_s(workers: Workers, layout: str) -> None:
    """Of the validation, and of each size of batch that is timed: stages must take them all."""
    run = workers.prepare(*COMMON, *LAYOUTS[layout], "strategy.microbatches=null")
    wanted = losses_of_one_device(run.folder.path)
    validation, batches = workers.run(run.processes, _losses, str(run.folder.path))[0]
    assert validation == pytest.approx(sum(wanted) / SAMPLES, rel=1e-12)
    replicas = run.plan.layout.data
    assert list(batches) == [size for size in (1, 2, 4, 8, 16) if size >= replicas]
    for size, loss in batches.items():
        assert loss == pytest.approx(sum(wanted[:size]) / size, rel=1e-12)


def _losses(run_folder: str) -> tuple[float, dict[int, float]]:
    config, _ = read_config(Path(run_folder) / "config.yaml")
    session = Session.open(config, device=torch.device("cpu"), trains=False)
    found: dict[int, float] = {}
    for size in batch_sizes(config):
        plan = inference.plan_of(session, batch_size=size)
        batches = session.batches(session.data.validation, seed=None, batch=plan)
        schedule = session.assembled.build_schedule(plan.microbatches)
        loss = validate(
            schedule.evaluate, batches, count=size, device=session.device,
            evaluation=session.assembled.evaluation,
        )["validation_loss"]  # fmt: skip
        assert loss is not None
        found[size] = loss
    return inference.validate(session, Progress())["validation_loss"], found


def test_training_validates_alike(workers: Workers) -> None:
    """Its first validation, after a step of a learning rate that changes nothing."""
    words = (*COMMON, *TEXT, "strategy=data", "nodes=2")
    inferred = read(workers.do(*words))[1]["validation_loss"]
    still = ("training.steps=1", "optimizer.learning_rate=1e-30", "optimizer.weight_decay=0")
    trained = workers.train(*words[2:], *still).lines[0]["validation_loss"]
    assert inferred == pytest.approx(trained, rel=1e-12)


def test_an_evaluation_beside_a_training_takes_its_newest_checkpoint(workers: Workers) -> None:
    """On another layout and with another batch; its line comes into the metrics of the training."""
    own = ("training.steps=3", "training.validate_every=1", "training.checkpoint_every=1")
    words = (*COMMON[2:], *TEXT, *own)
    trained = workers.train(*words, "strategy=data", "nodes=2")
    losses = {line["step"]: line["validation_loss"] for line in trained.lines}
    folder = RunFolder(trained.folder)
    write_json(folder.summary, {"outcome": "completed"})
    other = ("task=infer", "task.follow=true", "strategy=single", "training.global_batch_size=4")
    beside = workers.do(*words, *other, f"weights={folder.path}")
    (line,), summary = read(beside)
    assert (line["step"], line["samples"]) == (3, trained.lines[-1]["samples"])
    assert line["validation_loss"] == pytest.approx(losses[3], rel=1e-12) != losses[2]
    assert summary["outcome"] == "completed"
    assert read_run(folder.path).metrics == [*trained.lines, line]
    (folder.checkpoints / "step-3" / MARKER).write_text("damaged")
    (older,), _ = read(workers.do(*words, "task=infer", "task.follow=true", f"weights={folder.path}"))
    assert (older["step"], older["validation_loss"]) == (2, pytest.approx(losses[2], rel=1e-12))


def test_an_inference_writes_its_results(workers: Workers) -> None:
    lines, summary = read(workers.do(*COMMON, *TEXT, "strategy=data", "nodes=2", "task.batch_sizes=[8,4]"))
    assert [line.get("batch_size") for line in lines] == [None, 2, 4, 8]  # one a replica comes unasked
    assert lines[0]["samples"] == SAMPLES
    for line in lines[1:]:
        assert 0 < line["latency_s"] <= line["latency_p99_s"]
        assert line["samples_per_s"] == pytest.approx(line["batch_size"] / line["latency_s"])
        assert line["tokens_per_s"] == pytest.approx(32 * line["samples_per_s"])
    assert {line["passes"] for line in lines[1:]} == {3}
    kept = ("batch_size", "latency_s", "latency_p99_s", "samples_per_s", "tokens_per_s", "passes")
    assert summary["batch_sizes"] == [{key: line[key] for key in kept} for line in lines[1:]]
    assert summary["latency_s"] == lines[1]["latency_s"]
    assert summary["latency_p99_s"] == lines[1]["latency_p99_s"]
    assert summary["samples_per_s"] == max(line["samples_per_s"] for line in lines[1:])
    assert (summary["outcome"], summary["steps"], summary["samples"]) == ("completed", 0, SAMPLES)
    assert summary["final_loss"] is None


PAUSE_S = 0.03


@pytest.mark.parametrize("layout", [("strategy=single",), ("strategy=pipeline", "nodes=2"),
                                    ("strategy=data", "nodes=2")])  # fmt: skip
def test_a_time_is_that_of_the_slowest_rank(workers: Workers, layout: Sequence[str]) -> None:
    """A head that takes its time: only the last stage knows, and in a pipeline it has microbatches to do."""
    slow = ("model._target_=tests.models.Slow", f"+model.pause_s={PAUSE_S}", "task.batch_sizes=[4]")
    few = "training.validation_samples=4"
    _, summary = read(
        workers.do(*COMMON, *TEXT, "model.layers=2", *layout, *slow, "training.microbatch_size=1", few)
    )
    one, four = summary["batch_sizes"]
    replicas = one["batch_size"]
    assert one["latency_s"] > PAUSE_S
    assert 4 / replicas * PAUSE_S < four["latency_s"]


def test_the_budget_of_an_inference_leaves_large_batches_out(workers: Workers) -> None:
    words = ("task.batch_sizes=[1,2,4]", "task.seconds=0.000001", "task.repeats=50")
    lines, summary = read(workers.do(*COMMON, *TEXT, "strategy=single", *words))
    assert [line.get("batch_size") for line in lines] == [None, 1]
    assert lines[1]["passes"] == LEAST_PASSES  # of the smallest batch in any case
    assert summary["left_out"].startswith(
        "left out: batch sizes 2, 4: the time of task.seconds=1e-06 is used."
    )
