"""Whether a model keeps packed documents apart: a user's blocks might ignore their argument `documents`."""

from __future__ import annotations

import torch

from hpc_parallel.models.layered import LayeredModel, as_tuple, materialise
from hpc_parallel.proof.small_model import SmallRun

NEAR = 1e-9  # of the largest output; products of float64 may round differently


@torch.no_grad()
def mixes_documents(run: SmallRun, model: LayeredModel) -> bool:
    """Compute a sample of two documents with `model` (on meta) twice, the second time with another first one.

    The outputs of the second document must not change.
    """
    materialise(model, seed=run.config.seed, device=run.device, dtype=torch.float64)
    model.eval()
    tokens = run.inputs[:1, :, 0].to(run.device)
    length, half = tokens.shape[1], tokens.shape[1] // 2
    others = tokens.clone()
    others[:, :half] = (tokens[:, :half] + 1) % (run.inputs[..., 0].amax() + 1).to(run.device)
    starts = torch.zeros_like(tokens)
    starts[:, half:] = half
    outputs = [as_tuple(model(torch.stack((text, starts), dim=-1)))[0] for text in (tokens, others)]
    first, second = (output.reshape(length, -1)[half:] for output in outputs)
    return bool((first - second).abs().amax() > NEAR * first.abs().amax())
