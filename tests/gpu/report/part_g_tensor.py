"""What the technique `tensor` adds by itself: on a mesh of one rank against the plain model."""

from __future__ import annotations

import torch

from hpc_parallel.config.schema import StrategyConfig
from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.strategies.tensor import split_layers
from tests.gpu.report import setting
from tests.gpu.report.findings import Findings

TITLE, LIMIT_S = "tensor on one rank against plain", 25.0


def run(findings: Findings) -> None:
    setting.join()
    inputs, targets = setting.batch()
    setting.compile_quickly()
    for compiled in (False, True):
        losses, seconds = {}, {}
        for name, model in {"plain": setting.build(), "tensor": split()}.items():
            step = setting.step_of("plain", model=model, microbatches=1, chunked=False, compiled=compiled)
            losses[name] = full(step(inputs, targets))
            seconds[name] = setting.seconds(lambda step=step: step(inputs, targets))
        figures = {"losses": losses, "step_s": seconds, "ratio": seconds["tensor"] / seconds["plain"]}
        findings.add(**{"compiled" if compiled else "eager": figures})


def split() -> LayeredModel:
    options = StrategyConfig(name="tensor", loss_parallel=False)
    return split_layers.apply(setting.build(), axis=setting.mesh_of("tensor"), options=options)


def full(loss: torch.Tensor) -> float:
    return float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss)
