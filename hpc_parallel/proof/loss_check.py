"""Checks that the loss of a user's own model is a sum, over as many terms as the model says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpc_parallel.data.sampler import Data, to_device
from hpc_parallel.models.layered import LayeredModel, materialise
from hpc_parallel.problems import ConfigError
from hpc_parallel.user_code import UserCodeError, described, hint

ROUNDING = 1e-5  # relative, of a loss that a model computes in float32


@torch.no_grad()
def check_loss(model: LayeredModel, *, seed: int, data: Data, device: torch.device) -> None:
    """Raises UserCodeError if the mean over all terms can't be computed from the loss of `model`.

    `model`: a small model on the meta device. It runs on two samples of full length, in float64 and in
    evaluation mode.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        materialise(model, seed=seed, device=device, dtype=torch.float64).eval()
        batch = data.train.batch(np.arange(2, dtype=np.int64) % len(data.train))
        inputs, targets = to_device(batch, device)
        output = _output_of(model, inputs.double() if inputs.is_floating_point() else inputs)
        problems = [*_loss_problems(model, output, targets), *_terms_problems(model, targets)]
    if problems:
        raise UserCodeError([f"{type(model).__name__}.{problem}" for problem in problems])


def _output_of(model: LayeredModel, inputs: Tensor) -> Any:
    try:
        return model(inputs)
    except (ConfigError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UserCodeError([
            f"{described(error)}, raised by {type(model).__name__} for samples of shape "
            f"{list(inputs.shape[1:])} ({inputs.dtype}){hint(str(error))}"
        ]) from error  # fmt: skip


def _loss_problems(model: LayeredModel, output: Any, targets: Tensor) -> Iterator[str]:
    once = float(model.loss(output, targets))
    twice = float(model.loss(_doubled(output), _doubled(targets)))
    if not abs(twice - 2 * once) <= ROUNDING * abs(once):
        yield (
            f"loss must return the SUM of its terms, as with reduction='sum': samples that are there twice "
            f"have a loss of {twice:.6g} instead of twice {once:.6g}"
        )
    ignored = model.ignore_index
    if ignored is not None and (rest := float(model.loss(output, torch.full_like(targets, ignored)))) != 0:
        yield f"ignore_index is {ignored}, but the loss of such targets alone is {rest:.6g}, not 0"


def _terms_problems(model: LayeredModel, targets: Tensor) -> Iterator[str]:
    if model.ignore_index is not None:
        return
    once, twice = model.loss_terms(targets), model.loss_terms(_doubled(targets))
    if twice != 2 * once:
        yield f"loss_terms returns {twice} for samples that are there twice instead of twice {once}"
    if (
        model.loss_terms(torch.zeros_like(targets)) != once
        or model.loss_terms(torch.full_like(targets, -1)) != once
    ):
        yield (
            "loss_terms depends on the values of the targets, which differ between devices: it may depend on "
            "their shape only. A target that does not count is named by ignore_index"
        )


def _doubled(values: Any) -> Any:
    if isinstance(values, tuple):
        return tuple(map(_doubled, values))
    return torch.cat([values, values])
