"""What a parameter server costs and saves: bytes by its link, optimizer state on it alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.training.optimizer import build_optimizer
from hpc_parallel.training.step import Step
from hpc_parallel.worker.session import Session, read_config
from tests.parity import COMMON
from tests.workers import Workers

SMALL = (*COMMON, "model.layers=2")
OPTIONS = {True: "strategy.dedicated_server=true", False: "strategy.dedicated_server=false"}


@pytest.mark.parametrize(("dedicated", "ranks"), [(True, 3), (False, 4)])
def test_traffic_is_twice_the_weights_a_worker(workers: Workers, dedicated: bool, ranks: int) -> None:
    """Against 2(n-1)/n of the weights by each link of a ring over those who compute."""
    words = ("strategy=parameter_server", f"nodes={ranks}", OPTIONS[dedicated])
    trained = workers.train(*words, *SMALL)
    summary = trained.summary
    weights = 4 * sum(weight.numel() for weight in trained.weights.values())
    assert summary["traffic_bytes"] == 2 * weights * (ranks - 1)
    assert summary["traffic"] == {"send": summary["traffic_bytes"]}
    assert summary["busiest_rank_traffic_bytes"] == summary["traffic_bytes"]  # one end of all is the server
    computing = ranks - dedicated
    ring = pytest.approx(2 * (computing - 1) / computing * weights)
    assert summary["ring_all_reduce"]["traffic_bytes"] / computing == ring
    assert summary["ring_all_reduce"]["busiest_rank_traffic_bytes"] / 2 == ring
    assert summary["layout"]["replicate"] == computing
    assert summary["world_size"] == ranks


def _round(run_folder: str) -> dict[str, Any]:
    """One step: bytes that this rank holds of each kind, and the gradient where it is whole."""
    config, _ = read_config(RunFolder(Path(run_folder)).config)
    session = Session.open(config, device=torch.device("cpu"))
    weights = session.assembled.named_parameters()
    optimizer = build_optimizer(weights, config.optimizer)
    whole: dict[str, torch.Tensor] = {}

    def look() -> None:
        whole.update({name: weight.grad.clone() for name, weight in weights.items()})

    batches = session.batches(session.data.train, seed=config.seed)
    step = Step(session.assembled, optimizer=optimizer, clip_norm=0.1, on_gradients=look)
    step.run(*batches.at(0))
    state = list(optimizer.state().values())
    held = {name: sum(tensor.nbytes for tensor in tensors) for name, tensors in
            (("weights", weights.values()), ("state", state))}  # fmt: skip
    return {**held, "gradient": whole}


def test_only_the_server_has_the_optimizer_and_the_full_gradient(workers: Workers) -> None:
    options = (*SMALL, "training.precision=float64")
    alone = workers.prepare("strategy=single", *options)
    (reference,) = workers.run(1, _round, str(alone.folder.path))
    split = workers.prepare("strategy=parameter_server", "nodes=3", *options)
    server, *others = workers.run(3, _round, str(split.folder.path))
    assert server["state"] == reference["state"] > 2 * reference["weights"]
    for name, gradient in reference["gradient"].items():
        assert (server["gradient"][name] - gradient).norm() < 1e-10 * gradient.norm()
    for worker in others:
        assert worker == {"weights": reference["weights"], "state": 0, "gradient": {}}
