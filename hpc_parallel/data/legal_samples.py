"""Which samples a model can be trained on, by their integers and shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hpc_parallel.problems import ConfigError

_ADVICE = "give the model's class `ignore_index = -100`, a model of ours by a subclass (docs/own-model.md)"


class LegalSamples(NamedTuple):
    """What `require` knows of a model; None is what it does not know.

    ignored: its `ignore_index`; classes: how many its loss tells apart; tokens: the size of its vocabulary;
    each_token: whether its loss takes one target for each token; pixels: whether its stem takes bytes.

    If the logits or the table of embeddings are split, a number that no device has would count as 0. On a GPU
    it would end the process. A loss that flattens its arguments would take targets of other positions.
    """

    ignored: int | None
    classes: int | None
    tokens: int | None
    each_token: bool
    pixels: bool = False

    def require(self, inputs: Tensor, targets: Tensor) -> None:
        """Raises ConfigError with all that is wrong with a batch of samples [batch, ...]."""
        if problems := [*self._of_inputs(inputs), *self._of_each_token(inputs, targets), *self._of(targets)]:
            raise ConfigError(problems)

    def _of_inputs(self, inputs: Tensor) -> Iterator[str]:
        if self.pixels and inputs.is_floating_point():
            yield (
                f"the data has images of {inputs.dtype}, but the model takes pixels from 0 to 255: return "
                "uint8, as torchvision's PILToTensor does."
            )
        if self.tokens is None or inputs.dim() != 2 or inputs.is_floating_point():
            return
        if (wrong := _outside(inputs, self.tokens)).size:
            yield (
                f"the data has the token {wrong[0]}, but the model's vocabulary is 0 to {self.tokens - 1}. "
                "Correct the data or the size of the vocabulary."
            )

    def _of_each_token(self, inputs: Tensor, targets: Tensor) -> Iterator[str]:
        if not self.each_token or inputs.is_floating_point() or targets.is_floating_point():
            return
        tokens = np.from_dlpack(inputs[..., 0] if inputs.dim() == 3 else inputs)  # of packed samples
        wanted = np.from_dlpack(targets)
        if wanted.shape != tokens.shape:
            yield (
                f"the data has targets of shape {list(targets.shape[1:])} for {inputs.shape[1]} tokens, but "
                f"the loss takes one target for each token: return [{inputs.shape[1]}]."
            )
        elif self._are_copied(tokens[:, :-1], wanted[:, :-1], following=tokens[:, 1:]):
            yield (
                "the data has its inputs as targets, but a language model predicts the next token, and the "
                "loss does not shift them, as that of transformers does: return tokens[:-1], tokens[1:]."
            )

    def _are_copied(self, tokens: NDArray[Any], targets: NDArray[Any], *, following: NDArray[Any]) -> bool:
        """Whether most targets count, and each of these is the token itself and not the following one."""
        counted = targets != (-1 if self.ignored is None else self.ignored)
        if not ((tokens == targets) | ~counted).all() or counted.sum() * 2 <= counted.size:
            return False
        return bool((counted & (targets != following)).any())

    def _of(self, targets: Tensor) -> Iterator[str]:
        if targets.is_floating_point() or targets.is_complex():
            if self.classes is not None:
                yield f"the data has targets of {targets.dtype}, but the loss takes classes: return integers."
            return
        least = np.from_dlpack(targets).min(initial=0)
        if least < 0 and self.ignored is None:
            yield (
                f"the data has the target {least}, which counts as a term of the loss. If the loss leaves it "
                f"out, as torch's cross-entropy leaves out -100, {_ADVICE}. If it is a number to predict, "
                "return floats."
            )
        elif self.classes is not None and (wrong := _outside(targets, self.classes, self.ignored)).size:
            yield (
                f"the data has the target {wrong[0]}, but the model's classes are 0 to {self.classes - 1}. "
                "Correct the data or the number of classes. If the loss should leave this target out, return "
                f"-100 in its place, and {_ADVICE}."
            )


def _outside(tensor: Tensor, count: int, besides: int | None = None) -> NDArray[Any]:
    """The integers that are neither in [0, count) nor `besides`."""
    values: NDArray[Any] = np.from_dlpack(tensor)
    if values.min(initial=0) >= 0 and values.max(initial=0) < count:
        return values.ravel()[:0]
    wrong: NDArray[Any] = values[((values < 0) | (values >= count)) & (values != besides)]
    return wrong
