"""Replaces the forward pass of one module. The printed model shows this, and copies of the module keep it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

from torch import Tensor
from torch.nn import Module

Forward = Callable[..., Tensor]
Kind = TypeVar("Kind", bound=Module)


def replace_forward(module: Module, forward: Callable[..., Tensor], *, technique: str) -> None:
    """Let `module` compute `forward(original, module, *inputs)`; `original` is its class's forward pass.

    `technique` becomes a prefix of the module's class: a checkpointed `TransformerBlock` is printed as
    `CheckpointedTransformerBlock`.

    The module gets a new class. An attribute `forward` would be bound to this module, and the copies that
    nn.DataParallel makes would compute with this module's weights.
    """
    module.__class__ = _subclass(type(module), forward, technique)  # type: ignore[arg-type]


def replace_modules(model: Module, kind: type[Kind], replacement: Callable[[Kind], Module]) -> None:
    """Replace each module of this `kind` by `replacement(module)`; shared modules stay shared."""
    replacements: dict[int, Module] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, kind):
            if id(module) not in replacements:
                replacements[id(module)] = replacement(module)
            model.set_submodule(name, replacements[id(module)])


class OriginalForward(Module):
    """`module` with its original forward pass; functional_call would call the replaced one again."""

    def __init__(self, module: Module) -> None:
        super().__init__()
        self.module = module
        self._forward: Forward = type(module).forward

    def forward(self, *inputs: Any) -> Tensor:
        return self._forward(self.module, *inputs)


@lru_cache(maxsize=256)
def _subclass(kind: type[Module], forward: Callable[..., Tensor], technique: str) -> type[Module]:
    """One class for all modules with the same `forward`: torch.compile distinguishes them by class."""
    original: Forward = kind.forward

    def replaced(self: Module, *inputs: Any, **named: Any) -> Tensor:
        return forward(original, self, *inputs, **named)

    return type(f"{technique}{kind.__name__}", (kind,), {"forward": replaced})
