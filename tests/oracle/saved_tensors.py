"""Count what a forward pass keeps for its backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.utils.checkpoint import CheckpointPolicy

from hpc_parallel.strategies import checkpointing
from hpc_parallel.strategies.checkpointing import KeepUnwritten
from hpc_parallel.torch_internals import tree_leaves
from tests.oracle.fakes import memory_key


class SavedTensors:
    """The memory that autograd keeps for the backward pass, without the weights.

    Memory that several tensors share counts once. Weights are the parameters that the modules hold when their
    forward passes begin, cast and gathered ones included. Results that selective checkpointing keeps count
    too.
    """

    def __init__(self, modules: Sequence[Module]) -> None:
        self._modules = modules
        self._kept: dict[int, Tensor] = {}
        self._weights: dict[int, Tensor] = {}

    @property
    def bytes(self) -> int:
        kept = [tensor for key, tensor in self._kept.items() if key not in self._weights]
        return sum(tensor.untyped_storage().nbytes() for tensor in kept)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count what the forward passes inside the context keep."""
        modules = [module for model in self._modules for module in model.modules()]
        handles = [module.register_forward_pre_hook(self._note_weights) for module in modules]
        selective = patch.object(checkpointing, "KeepUnwritten", _noting(self._note))
        try:
            with saved_tensors_hooks(self._pack, lambda tensor: tensor), selective:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _pack(self, tensor: Tensor) -> Tensor:
        self._note(tensor)
        return tensor

    def _note(self, tensor: Tensor) -> None:
        local = _local(tensor)
        self._kept.setdefault(memory_key(local), local)

    def _note_weights(self, module: Module, _: object) -> None:
        for weight in module.parameters(recurse=False):
            local = _local(weight)
            self._weights[memory_key(local)] = local


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _noting(note: Callable[[Tensor], None]) -> type[KeepUnwritten]:
    """The policy of selective checkpointing that also calls `note` with each result that it keeps."""

    class Noting(KeepUnwritten):
        def __call__(self, context: Any, operation: Any, *inputs: Any, **named: Any) -> CheckpointPolicy:
            policy = super().__call__(context, operation, *inputs, **named)
            if policy is CheckpointPolicy.MUST_SAVE:
                for tensor in filter(torch.is_tensor, tree_leaves(context.op_output)):
                    note(tensor)
            return policy

    return Noting
