"""Held-out samples that no batch divides, in a training with the default batch: each counts once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hpc_parallel.config.build import build
from hpc_parallel.data.dataset import as_data
from hpc_parallel.worker.session import read_config
from tests.workers import Workers

HELD_OUT = 5  # of 100 by default


class Rows:
    """Rows whose targets grow, so that the mean shows which of them count."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([float(index), 1.0]), torch.tensor([float(index) ** 1.5])


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        nn.init.constant_(self.layer.weight, 0.5)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().sum()


@pytest.mark.parametrize(
    "layout",
    [
        "strategy=single",
        "strategy=data nodes=4",  # the second replica has one sample, the others have none
        "strategy=parameter_server nodes=3 training.microbatch_size=2",
    ],
)
def test_few_samples_count_once(workers: Workers, layout: str) -> None:
    run = workers.train(
        *layout.split(), "training.steps=1", "training.measure_steps=0", "training.checkpoint_every=null",
        "training.precision=float64", "optimizer=sgd", "optimizer.learning_rate=1e-30", "data=dataset",
        f"data.dataset._target_={__name__}.Rows", "~model", f"+model={{_target_: {__name__}.Line}}",
    )  # fmt: skip
    config, _ = read_config(run.folder / "config.yaml")
    rows, targets = as_data(build(config.data, key="data")).validation.batch(np.arange(HELD_OUT))
    wanted = (rows.double().sum(1) / 2 - targets.double()[:, 0]).square().mean().item()
    assert round(wanted) == 142397
    assert run.lines[0]["validation_loss"] == pytest.approx(wanted, rel=1e-12)
