"""A whole training session: text is learnt, what the contract names is written, the hot loop is quiet."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hpc_parallel.problems import ConfigError
from hpc_parallel.profiling.rank_times import FIRST_STEP
from hpc_parallel.training import metrics as metrics_module
from hpc_parallel.training.metrics import Energy, Metrics, Scale, StepResult
from hpc_parallel.worker.session import require_equal_data
from tests import printed
from tests.marks import in_full
from tests.nvml import Nvml
from tests.workers import Workers, train_here

SMALL = (
    "training.steps=12",
    "training.log_every=5",
    "training.validate_every=10",
    "training.validation_samples=32",
    "data.max_bytes=300000",
    "data.sequence_length=32",
    "model.dim=64",
    "model.ffn_dim=160",
    "optimizer.warmup_steps=2",
)
METRICS = {
    "step", "samples", "loss", "grad_norm", "learning_rate", "step_time_s", "data_s", "samples_per_s",
    "tokens_per_s", "timed_steps", "tflops_per_device", "mfu", "peak_memory_bytes", "time",
    "spent_s",
}  # fmt: skip
SUMMARY = {
    "outcome", "strategy", "layout", "nodes", "spares", "gpus_per_node", "world_size", "steps", "samples",
    "final_loss", "samples_per_s", "step_time_s", "latency_s", "peak_memory_bytes",
    "exposed_communication_share", "bubble_share", "step_parts_s", "traffic_bytes",
    "busiest_rank_traffic_bytes", "traffic", "unknown_collectives", "ring_all_reduce", "predicted",
    "restarts", "lost_steps", "layout_after_step", "skipped_steps", "started", "ended", "job_ids", "weights",
    "comparison",
    "ended_early", "left_out", "slow_ranks", "shares", "statistics_samples", "in_bfloat16",
    "rank_memory_bytes", "rank_state_bytes", "time_use_s", "useful_share", "energy",
}  # fmt: skip


def counted_energy() -> dict[str, float]:
    """Of three ranks: the first two share a GPU, and the host of the third has no counter."""
    rank, readings = dist.get_rank(), iter((1000.0, 6000.0))
    nvml = Nvml(
        1, nvmlDeviceGetHandleByUUID=lambda uuid: 0,
        **({"nvmlDeviceGetTotalEnergyConsumption": lambda handle: next(readings)} if rank < 2 else {}),
    )  # fmt: skip
    with (
        mock.patch.object(metrics_module, "nvml_module", return_value=nvml),
        mock.patch.object(metrics_module, "gpu_uuid", return_value=f"GPU-{max(1, rank)}"),
    ):
        energy = Energy.of(torch.device("cuda"), devices=3)
    metrics = Metrics(Scale(3, None, 1.0, 3, 3, None), device=torch.device("cpu"), energy=energy)
    metrics.note(StepResult(torch.zeros(()), torch.zeros(())))
    return dict(metrics.line(step=1, learning_rate=0.1)["energy"])


def test_a_line_has_the_energy_of_each_gpu_once(workers: Workers) -> None:
    assert workers.run(3, counted_energy) == [{"joules": 5.0, "gpus": 1, "of_gpus": 2}] * 3


def refusal_of_rates() -> str:
    metrics = Metrics(Scale(2, None, 1.0, 2, 2, None), device=torch.device("cpu"))
    metrics.note(StepResult(torch.zeros(()), torch.zeros(())))
    metrics.line(step=1, learning_rate=0.1 + dist.get_rank() * 1e-15)  # hosts may have other libraries
    with pytest.raises(ConfigError) as raised:
        metrics.line(step=2, learning_rate=0.1 + dist.get_rank())
    return str(raised.value)


def test_ranks_with_other_learning_rates_are_refused(workers: Workers) -> None:
    """They would train on: only copies of a weight are compared, and fsdp has none."""
    refusal = "step 2: the ranks must have one learning rate, but optimizer.schedule gives them 0.1 to 1.1"
    assert workers.run(2, refusal_of_rates) == [refusal] * 2


@pytest.mark.full
@pytest.mark.timing  # beside another busy process its threads wait for each other: 600 s in place of 90 s
@pytest.mark.timeout(700)
def test_the_default_run_learns_text(tmp_path: Path) -> None:
    """The command as a user types it: validation loss from about ln(256) to below 2.1 nats a byte."""
    shown = printed("-m", "hpc_parallel.run", "launcher=local", cwd=tmp_path)
    (folder,) = tmp_path.glob("runs/data/*")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    validation = [line["validation_loss"] for line in lines if "validation_loss" in line]
    assert validation[0] == pytest.approx(math.log(256), rel=0.1)
    assert validation[-1] < 2.1
    assert str(folder.relative_to(tmp_path)) in shown
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["outcome"] == "completed"
    assert summary["validation_loss"] == validation[-1]
    names = {path.name for path in folder.iterdir()}
    assert names - {"rank_times.json"} == {  # which is there once a timed step has been paid for
        "attempts.jsonl", "checkpoints", "code", "config.yaml", "environment.json", "logs", "metrics.jsonl",
        "owner.json", "phase", "plots", "preflight.json", "rendezvous", "summary.json",
    }  # fmt: skip


def test_a_run_writes_the_keys_of_the_contract(workers: Workers) -> None:
    trained = workers.train("strategy=pipeline", "nodes=2", "gpus_per_node=2", "strategy.pipeline=2",
                            "strategy.replicate=2", "strategy.microbatches=2", *SMALL)  # fmt: skip
    assert [line["step"] for line in trained.lines] == [1, 5, 10, 12]
    assert all(set(line) - {"validation_loss"} == METRICS for line in trained.lines)
    assert [("validation_loss" in line) for line in trained.lines] == [True, False, True, True]
    last = trained.lines[-1]
    assert last["samples"] == 12 * 16
    assert last["samples_per_s"] == pytest.approx(16 / last["step_time_s"])
    assert last["tokens_per_s"] == pytest.approx(32 * last["samples_per_s"])
    assert last["mfu"] is None  # a CPU's peak is unknown
    assert last["learning_rate"] == pytest.approx(0.1 * 0.003)  # the end of the cosine
    summary = json.loads((trained.folder / "summary.json").read_text())
    assert set(summary) == SUMMARY | {"validation_loss", "tokens_per_s"}
    assert summary["tokens_per_s"] == pytest.approx(32 * summary["samples_per_s"])
    assert summary["outcome"] == "completed"
    assert summary["layout"] == {
        "pipeline": 2, "replicate": 2, "shard": 1, "expert": 1, "context": 1, "tensor": 1, "tile": 1,
    }  # fmt: skip
    assert (summary["steps"], summary["samples"], summary["world_size"]) == (12, 192, 4)
    assert summary["final_loss"] == last["loss"]
    assert summary["predicted"] is None
    assert 0 < summary["bubble_share"] < 1
    assert 0 <= summary["exposed_communication_share"] < 1
    assert summary["traffic_bytes"] == sum(summary["traffic"].values())


def test_model_flops_are_those_of_the_closed_form(workers: Workers) -> None:
    """6 FLOPs a weight and token, and 12 x layers x width for each position it sees (PaLM, appendix B)."""
    trained = workers.train("strategy=single", *SMALL)
    line = trained.lines[-1]
    dim, ffn_dim, layers, length = 64, 160, 4, 32
    weights = layers * (dim * dim * 2 + dim * (dim // 2) * 2 + 3 * dim * ffn_dim) + 256 * dim
    flops_per_token = 6 * weights + 12 * layers * dim * (length + 1) / 2
    expected = flops_per_token * line["tokens_per_s"] / 1e12
    assert line["tflops_per_device"] == pytest.approx(expected, rel=1e-6)


def _reads_from_the_device(run_folder: str) -> int:
    """How often a whole session asks a device for values: each would make the host wait for a GPU."""
    reads = 0
    originals = {name: getattr(torch.Tensor, name) for name in ("item", "tolist", "numpy", "cpu", "__bool__")}

    def counting(original: Any) -> Any:
        def read(*words: Any) -> Any:
            nonlocal reads
            reads += 1
            return original(*words)

        return read

    for name, original in originals.items():
        setattr(torch.Tensor, name, counting(original))
    try:
        assert torch.ones(()).item() == 1.0
        assert reads == 1  # the counter counts
        train_here(run_folder, {})
    finally:
        for name, original in originals.items():
            setattr(torch.Tensor, name, original)
    return reads


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        ("single", 1),
        ("pipeline", 2),
        *in_full([("fsdp", 2), ("data", 2), ("dataparallel", 2), ("parameter_server", 3), ("tensor", 2)]),
    ],
)
def test_steps_read_nothing_back_from_the_device(workers: Workers, strategy: str, devices: int) -> None:
    """Four steps and as many as are not timed, with lines at the first and the last alone: as many reads."""
    counts = []
    for steps in (4, FIRST_STEP - 1):
        quiet = (f"training.steps={steps}", "training.log_every=1000", "training.validate_every=null",
                 "model.layers=2")  # fmt: skip
        run = workers.prepare(f"strategy={strategy}", f"gpus_per_node={devices}", *SMALL, *quiet)
        counts.append(workers.run(run.processes, _reads_from_the_device, str(run.folder.path)))
    assert counts[0] == counts[1]


def test_tensorboard_holds_the_same_figures(workers: Workers) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trained = workers.train("strategy=single", *SMALL, "training.tensorboard=true")
    events = EventAccumulator(str(trained.folder / "tensorboard"))
    events.Reload()
    written = {event.step: event.value for event in events.Scalars("loss")}
    assert written == pytest.approx({line["step"]: line["loss"] for line in trained.lines}, rel=1e-6)
    assert [event.step for event in events.Scalars("validation_loss")] == [1, 10, 12]


@pytest.fixture
def fresh_workers(tmp_path: Path) -> Iterator[Workers]:
    """Ranks that no other test has used."""
    with closing(Workers(tmp_path)) as pool:
        yield pool


def test_wandb_runs_offline(fresh_workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real library, without a network: its run file has the figures and no credentials."""
    monkeypatch.setenv("WANDB_MODE", "offline")  # for the checks of this process
    offline = {"WANDB_MODE": "offline"}
    secret = ["launcher.setup=['export KEY=hunter2']", "+cluster.environment.KEY=hunter2"]
    trained = fresh_workers.train(
        "strategy=single", *SMALL, *secret, "training.wandb=true", variables=offline
    )
    (file,) = trained.folder.glob("wandb/offline-run-*/*.wandb")
    content = file.read_bytes()
    assert b"validation_loss" in content
    assert b"global_batch_size" in content  # the configuration's public part
    assert b"hunter2" not in content


def test_writers_that_are_off_import_nothing(fresh_workers: Workers) -> None:
    fresh_workers.train("strategy=single", *SMALL)
    names = ("wandb", "tensorboard", "torch.utils.tensorboard")
    assert fresh_workers.run(1, _imported, *names) == [[]]


def _imported(*names: str) -> list[str]:
    return [name for name in names if name in sys.modules]


def test_ranks_that_read_other_data_are_named(workers: Workers) -> None:
    with pytest.raises(AssertionError, match="rank 1 read other data than rank 0"):
        workers.run(2, _compare_digests)


def _compare_digests() -> None:
    require_equal_data(f"digest {dist.get_rank()}")
