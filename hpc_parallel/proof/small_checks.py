"""What a small copy of a user's own model must keep on one device, before its layout is compared.

Its loss is a sum of as many terms as it says. Packed documents stay apart. Positions meet only in attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpc_parallel.data.sampler import Data, to_device
from hpc_parallel.models.attention import Attention
from hpc_parallel.models.layered import LayeredModel, as_tuple, materialise
from hpc_parallel.problems import ConfigError
from hpc_parallel.proof.small_model import SmallRun
from hpc_parallel.strategies.replace_forward import replace_modules
from hpc_parallel.user_code import UserCodeError, described, hint

ROUNDING = 1e-5  # relative, of a loss that a model computes in float32
# Of the largest output. Products of float64 may round differently; in float32, the same row of a product can
# also round differently beside other rows.
NEAR, NEAR_IN_FLOAT32 = 1e-9, 1e-3


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
        output = model(inputs)
    except (ConfigError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UserCodeError([
            f"{described(error)}, raised by {type(model).__name__} for samples of shape "
            f"{list(inputs.shape[1:])} ({inputs.dtype}){hint(str(error))}"
        ]) from error  # fmt: skip
    if kind := _no_tensor(output):
        returns = f"a tuple with a {kind} in it" if isinstance(output, tuple) else f"a {kind}"
        rule = "It must return a tensor, or a tuple of tensors, which its loss takes"
        raise UserCodeError([f"{type(model).__name__}.forward returns {returns}. {rule}."])
    return output


def _no_tensor(output: Any) -> str | None:
    """The type of the first value in an output that is no tensor; None if there is none."""
    if isinstance(output, tuple):
        return next(filter(None, map(_no_tensor, output)), None)
    return None if isinstance(output, Tensor) else type(output).__name__


def _loss_problems(model: LayeredModel, output: Any, targets: Tensor) -> Iterator[str]:
    loss = model.loss(output, targets)
    if not isinstance(loss, Tensor) or loss.shape:
        found = f"a {type(loss).__name__} of shape {list(getattr(loss, 'shape', []))}"
        yield f"loss must return one number (a tensor of shape []), the SUM of its terms, but returns {found}"
        return
    once = float(loss)
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
    if any(model.loss_terms(torch.full_like(targets, value)) != once for value in (0, -1)):
        yield (
            "loss_terms depends on the values of the targets, which differ between devices: it may depend on "
            "their shape only. A target that does not count is named by ignore_index"
        )


def _doubled(values: Any) -> Any:
    if isinstance(values, tuple):
        return tuple(map(_doubled, values))
    return torch.cat([values, values])


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
    return bool(difference > NEAR_IN_FLOAT32 * outputs[0].abs().amax())


class OwnValue(Attention):
    """Instead of attention: each position gets its own value."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **masks: Any) -> Tensor:
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
