"""Which samples a model of ours can be trained on, by their integers and shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hpc_parallel.problems import raise_if_any

_ADVICE = "give the model's class `ignore_index = -100`, a model of ours by a subclass (docs/own-model.md)"


class LegalSamples(NamedTuple):
    """What `require` knows of a model; None or False for what it does not know.

    ignored: its `ignore_index`; classes: how many its loss tells apart; tokens: the size of its vocabulary;
    each_token: whether its loss takes one target for each token; predicts: whether this is the next one;
    pixels: whether its stem takes numbers from 0 to 255.

    If the logits or the table of embeddings are split, a number that no device has would count as 0. On a GPU
    it would end the process. A loss that flattens its arguments would take targets of other positions.
    """

    ignored: int | None = None
    classes: int | None = None
    tokens: int | None = None
    each_token: bool = False
    predicts: bool = False
    pixels: bool = False

    def require(self, inputs: Tensor, targets: Tensor) -> None:
        """Raises ConfigError with all that is wrong with a batch of samples [batch, ...]."""
        raise_if_any([*self._of_inputs(inputs), *self._of_each_token(inputs, targets), *self._of(targets)])

    def _of_inputs(self, inputs: Tensor) -> Iterator[str]:
        if self.pixels and inputs.is_floating_point() and inputs.numel():
            least, most = (float(bound) for bound in inputs.aminmax())
            if least < 0 or 0 < most <= 1:
                yield (
                    f"the data has images of {inputs.dtype} from {least:.3g} to {most:.3g}, but the model "
                    "takes pixels from 0 to 255: return uint8, as torchvision's PILToTensor does."
                )
        if self.tokens is None or inputs.dim() != 2 or inputs.is_floating_point():
            return
        if (wrong := _outside(inputs, self.tokens)).size:
            yield (
                f"the data has the token {wrong[0]}, but the model's vocabulary is 0 to {self.tokens - 1}. "
                "Correct the data or the size of the vocabulary."
            )

    def _of_each_token(self, inputs: Tensor, targets: Tensor) -> Iterator[str]:
        known = self.each_token and inputs.dim() in (2, 3)
        if not known or inputs.is_floating_point() or targets.is_floating_point():
            return
        tokens = np.from_dlpack(inputs[..., 0] if inputs.dim() == 3 else inputs)  # of packed samples
        wanted = np.from_dlpack(targets)
        if wanted.shape != tokens.shape:
            yield (
                f"the data has targets of shape {list(targets.shape[1:])} for {inputs.shape[1]} tokens, but "
                f"the loss takes one target for each token: return [{inputs.shape[1]}]."
            )
        elif self.predicts and self._are_copied(tokens[:, :-1], wanted[:, :-1], following=tokens[:, 1:]):
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
        if self.classes is not None:
            wrong = _outside(targets, self.classes, self.ignored)
        else:  # a user's own loss may take any number; only one that it may leave out is told
            values = np.from_dlpack(targets)
            wrong = values[values < 0] if self.ignored is None else values[:0]
        if wrong.size and wrong.min() < 0 and self.ignored is None:
            yield (
                f"the data has the target {wrong.min()}, which counts as a term of the loss. If the loss "
                f"leaves it out, as torch's cross-entropy leaves out -100, {_ADVICE}. If it is a number to "
                "predict, return floats."
            )
        elif wrong.size and self.classes is not None:
            yield (
                f"the data has the target {wrong[0]}, but the model's classes are 0 to {self.classes - 1}. "
                "Correct the data or the number of classes. If the loss should leave this target out, return "
                f"-100 in its place, and {_ADVICE}."
            )


def _outside(tensor: Tensor, count: int, besides: int | None = None) -> NDArray[Any]:
    """The integers that are neither in [0, count) nor `besides`; a negative one is large without its sign."""
    values: NDArray[Any] = np.from_dlpack(tensor)
    wrong: NDArray[Any] = values[values.view(f"u{values.itemsize}") >= count]
    return np.asarray(wrong[wrong != besides])
