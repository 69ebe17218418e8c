"""Whether a model mixes positions outside of its attention, at any distance within a sample of the run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hpc_parallel.models.attention import Attention
from hpc_parallel.models.layered import LayeredModel, as_tuple, materialise
from hpc_parallel.proof.small_model import SmallRun
from hpc_parallel.strategies.replace_forward import replace_modules

NEAR = 1e-3  # of the largest output; the same row of a product can round differently beside other rows


@torch.no_grad()
def mixes_positions(run: SmallRun, model: LayeredModel) -> bool:
    """Compute `run.sequence` with `model` (on meta) twice: the second time, half of the tokens are others.

    Attention gives each position its own value, so the output changes at these positions only. This takes
    time in proportion to the length, which a comparison with attention would not. The head is left out: the
    logits of a long sample may not fit.
    """
    if run.sequence is None or run.sequence.dim() != 2:
        return False
    model.head = None
    replace_modules(model, Attention, lambda _: OwnValue())
    materialise(model, seed=run.config.seed, device=run.device, dtype=torch.float32)
    model.eval()
    sequence = run.sequence.to(run.device)
    sequence = sequence.float() if sequence.is_floating_point() else sequence
    generator = torch.Generator().manual_seed(run.config.seed)
    changed = (torch.rand(sequence.shape, generator=generator) < 0.5).to(run.device)
    changed[:, 0] = False
    others = torch.where(changed, sequence.roll(1, 1), sequence)
    outputs = [as_tuple(model(tokens))[0] for tokens in (sequence, others)]
    if outputs[0].shape[:2] != sequence.shape:
        return False  # no output for each position
    difference = (outputs[0] - outputs[1])[~changed].abs().amax()
    return bool(difference > NEAR * outputs[0].abs().amax())


class OwnValue(Attention):
    """Instead of attention: each position gets its own value."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **masks: Any) -> Tensor:
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
