"""A model of one block from a plain `nn.Module`. The block can be replicated and sharded but not cut."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.flop_counter import FlopCounterMode

from hpc_parallel.models.adapter import Adapter
from hpc_parallel.models.layered import INPUT_TYPES, PartFlops

METHODS = ("loss_terms", "metrics")
VALUES = {"small": dict, "ignore_index": int}


def plain_model(module: nn.Module) -> PlainModel:
    """Returns `module`, which is on the CPU and has a method `loss`, as a model on meta.

    The model takes over the METHODS and VALUES that the module defines. The model's class has the name of the
    module's class, because messages name a model by its class.
    """
    kind = type(module)
    methods = {name: _delegated(name) for name in METHODS if callable(getattr(kind, name, None))}
    values = {name: getattr(module, name, None) for name in VALUES}
    attributes = {name: value for name, value in values.items() if isinstance(value, VALUES[name])}
    model: PlainModel = type(kind.__name__, (PlainModel,), methods | attributes)(module)
    return model


def _delegated(name: str) -> Callable[..., Any]:
    return lambda model, *arguments: getattr(model.module, name)(*arguments)


class PlainModel(Adapter):
    """One block, which is the module, with the module's own loss and starting weights."""

    def __init__(self, module: nn.Module) -> None:
        values = _onto_meta(module)
        super().__init__(module, stem=nn.Identity(), blocks=[module], head=AsItIs())
        self._values = Values({name: values[self.library_name(name)] for name, _ in self.named_parameters()})

    @property
    def module(self) -> Any:
        return self.blocks["0"]

    def loss(self, output: Any, target: Tensor) -> Tensor:
        loss: Tensor = self.module.loss(output, target)
        return loss

    def initialise(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Set the value that the module's constructor made under the run's seed, and free the stored copy."""
        tensor.copy_(self._values.pop(name))

    def forward_flops(self, sample_shape: tuple[int, ...]) -> PartFlops:
        """FLOPs that torch counts in a forward pass on meta; the default if the module can't run there."""
        for dtype in INPUT_TYPES:
            counter = FlopCounterMode(display=False)
            try:
                tried = deepcopy(self).to("meta").eval()
                with torch.no_grad(), counter:
                    tried(torch.empty(1, *sample_shape, dtype=dtype, device="meta"))
            except Exception:  # the user's code may raise any kind
                continue
            return PartFlops(stem=0, blocks=(counter.get_total_flops(),), head=0)
        return super().forward_flops(sample_shape)


class AsItIs(nn.Module):
    """Returns what the module returns: one value, or several as a tuple."""

    def forward(self, *outputs: Any) -> Any:
        return outputs[0] if len(outputs) == 1 else outputs


class Values(dict[str, Tensor]):
    """Values by name. They are as large as the model's weights, so a copy of the model shares them."""

    def __deepcopy__(self, memo: object) -> Values:
        return self


def _onto_meta(module: nn.Module) -> dict[str, Tensor]:
    """Move the parameters of `module` to meta, shared ones too; returns their values by name."""
    values = {name: weight.detach() for name, weight in module.named_parameters()}
    moved: dict[int, Parameter] = {}
    for part in module.modules():
        for name, weight in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            empty = Parameter(torch.empty_like(weight, device="meta"), requires_grad=weight.requires_grad)
            setattr(part, name, moved.setdefault(id(weight), empty))
    return values
