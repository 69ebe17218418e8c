"""What the technique `tensor` adds by itself: on a mesh of one rank against the plain model."""

from __future__ import annotations

import torch

from hpc_parallel.config.schema import StrategyConfig
from hpc_parallel.strategies import tensor
from tests.gpu.report import setting
from tests.gpu.report.findings import Findings

TITLE, LIMIT_S = "tensor on one rank against plain", 25.0


def run(findings: Findings) -> None:
    setting.join()
    inputs, targets = setting.batch()
    model = setting.build()
    options = StrategyConfig(name="tensor", loss_parallel=False)
    tensor.apply(model, axis=setting.mesh_of("tensor"), options=options)
    losses, seconds = {}, {}
    for name, step in {
        "plain": setting.step_of("plain", microbatches=1, chunked=False),
        "tensor": setting.step_of("plain", model=model, microbatches=1, chunked=False),
    }.items():
        losses[name] = full(step(inputs, targets))
        seconds[name] = setting.seconds(lambda step=step: step(inputs, targets))
    findings.add(losses=losses, step_s=seconds, ratio=seconds["tensor"] / seconds["plain"])


def full(loss: torch.Tensor) -> float:
    return float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss)
