"""A plain compiled loop in the manner of nanoGPT: one model, autocast, fused AdamW, nothing else."""

from __future__ import annotations

from typing import Any

import torch

from tests.benchmarks.peers.plain_transformer import PlainTransformer, cross_entropy
from tests.gpu.report import setting


def step_s(shape: dict[str, Any], *, samples: int, seq: int, compiled: bool = True) -> float:
    """The median step of a model of this `shape`."""
    device = setting.device()
    with torch.device(device):
        model = PlainTransformer(shape, seq=seq)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = torch.compile(model) if compiled else model
    tokens = torch.randint(min(256, shape["vocab_size"]), (samples, seq), device=device)

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = cross_entropy(run(tokens), tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return setting.seconds(step, repeats=setting.sized(10, 2))
