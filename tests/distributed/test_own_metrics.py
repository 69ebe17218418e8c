"""A model's own metrics: what one device counts by hand. tests/parity.py compares them on every layout."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from torch import Tensor, nn

from hpc_parallel.problems import ConfigError
from hpc_parallel.report.gather import gather
from hpc_parallel.report.page import render
from hpc_parallel.report.tables import digits
from hpc_parallel.report.verdict import own_metrics
from hpc_parallel.strategies.loss import WithMetrics
from hpc_parallel.worker.session import read_config
from tests.distributed.test_models_of_others import words_of
from tests.workers import Workers

GUIDE = Path(__file__).resolve().parents[2] / "docs/training.md"
(SNIPPET,) = re.findall(r"```python\n(from hpc_parallel.models.convnet.*?)```", GUIDE.read_text(), re.DOTALL)
SAMPLES = 19  # the last batch has 3 of 16


NET: Any = {"terms": len, "model": "Net"}


def test_metrics_are_those_counted_by_hand(workers: Workers) -> None:
    run = workers.train(
        *words_of("split gpt"), "strategy=tensor", "nodes=2", "training.steps=4", "training.validate_every=4",
        "training.global_batch_size=16", f"training.validation_samples={SAMPLES}", "strategy.verify=never",
        "training.precision=float64", "training.checkpoint_every=null", "training.measure_steps=0",
    )  # fmt: skip
    config, _ = read_config(run.folder / "config.yaml")
    model, data = instantiate(config.model).double().eval(), instantiate(config.data)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(run.weights[name])
        inputs, targets = data.validation.batch(np.arange(SAMPLES))
        wrong = int((model(inputs).argmax(-1) != targets).sum())
    error = run.lines[-1]["validation_error"]
    assert error * targets.numel() == pytest.approx(wrong, abs=1e-9)
    assert 0 < wrong < targets.numel()
    assert json.loads((run.folder / "summary.json").read_text())["validation_error"] == error
    gathered = gather([run.folder])
    table = own_metrics(gathered.rows)
    assert table is not None
    assert (table.names, [cells for _, cells in table.lines]) == (["error"], [[error]])
    report = render(gathered)
    assert (
        f"| run | error |\n|---|---:|\n| {gathered.rows[0].label} | {digits(error, 3)} |" in report.markdown
    )
    assert report.html.count('id="own-metrics"') == 1


def test_the_class_of_the_guide_counts() -> None:
    names: dict[str, Any] = {}
    exec(SNIPPET, names)
    model = names["Digits"](channels=[4], classes=10)
    output = torch.zeros(3, 10).index_put((torch.arange(3), torch.tensor([4, 1, 0])), torch.tensor(1.0))
    assert {k: int(v) for k, v in model.metrics(output, torch.tensor([4, 0, 9])).items()}["accuracy"] == 1


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"loss": torch.zeros(())}, "Net.metrics returned 'loss': a name has small letters"),
        ({"Top 1": torch.zeros(())}, "Net.metrics returned 'Top 1'"),
        ({"hits": torch.zeros(2)}, r"Net.metrics returned a tensor of shape \[2\] for hits: it must be one"),
        ({"hits": 3}, "Net.metrics returned int for hits"),
        (None, "Net.metrics returned a NoneType: it must be a dict of sums"),
    ],
)
def test_what_is_no_metric_is_refused(values: Any, problem: str) -> None:
    evaluation = WithMetrics(nn.functional.mse_loss, lambda output, target: values, **NET)
    x = torch.zeros(4)
    with torch.no_grad(), pytest.raises(ConfigError, match=problem):
        evaluation(x, x)


def test_a_mean_is_refused() -> None:
    evaluation = WithMetrics(
        nn.functional.mse_loss, lambda output, target: {"error": (output - target).abs().mean()}, **NET
    )
    with torch.no_grad(), pytest.raises(ConfigError, match="returned error, which is not the sum of its v"):
        evaluation(torch.ones(4), torch.zeros(4))


def test_training_computes_the_loss_alone() -> None:
    def fails(output: Tensor, target: Tensor) -> dict[str, Tensor]:
        raise AssertionError

    evaluation = WithMetrics(nn.functional.mse_loss, fails, **NET)
    assert evaluation(torch.ones(4), torch.zeros(4)).shape == ()
