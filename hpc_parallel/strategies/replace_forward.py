"""Another forward pass for one module: visible when the model is printed, and kept by copies of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.nn import Module

Forward = Callable[..., Tensor]


def replace_forward(module: Module, forward: Callable[..., Tensor], *, technique: str) -> None:
    """Let `module` compute `forward(before, module, *inputs)`; `before(module, *inputs)` is what it did.

    `technique` is put before the name of the module's class: a checkpointed `TransformerBlock` is printed
    as `CheckpointedTransformerBlock`.

    The module gets a class of its own. An attribute `forward` would hold this very module, and the copies
    that nn.DataParallel makes of it would compute with its weights.
    """
    module.__class__ = _subclass(type(module), forward, technique)  # type: ignore[arg-type]


@lru_cache(maxsize=256)
def _subclass(kind: type[Module], forward: Callable[..., Tensor], technique: str) -> type[Module]:
    """One for all modules that are given the same `forward`: torch.compile tells them apart by class."""
    before: Forward = kind.forward

    def replaced(self: Module, *inputs: Any) -> Tensor:
        return forward(before, self, *inputs)

    return type(f"{technique}{kind.__name__}", (kind,), {"forward": replaced})
