"""Updates that need a whole weight, where several ranks hold slices of it.

Muon orthogonalises a matrix and Adafactor averages its rows and columns, so a slice is not enough. Each
weight has an owner among the ranks that share it. The owner gathers the weight and its gradient, keeps the
optimizer's state, and sends the new weight back. States and updates are thereby divided among the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from hpc_parallel.layout.holdings import Place, owners
from hpc_parallel.models.drawn_weights import own_slice


class SharedWeight:
    """A distributed weight. The rank that owns it also gets the whole weight."""

    def __init__(self, weight: Parameter, *, owner: Place) -> None:
        assert isinstance(weight, DTensor)
        self._weight = weight
        self._owner = owner
        self._dims = split_dims(weight)
        self._mesh = weight.device_mesh
        self.owned = all(self._mesh.get_local_rank(dim) == owner[dim] for dim in self._dims)
        local = weight.to_local()
        # It has the full shape, because optimizers check the shape, but the memory of one number.
        self._placeholder = local.new_zeros(()).expand(weight.shape)
        self.whole = Parameter(self._placeholder, requires_grad=weight.requires_grad)

    @torch.no_grad()
    def gather(self) -> None:
        """Fill `whole` and its gradient on the owner. All ranks that share the weight must call it."""
        if self._weight.grad is None:
            return
        full, gradient = _full(self._weight), _full(self._weight.grad)
        if self.owned:
            self.whole.data, self.whole.grad = full, gradient

    @torch.no_grad()
    def hand_out(self) -> None:
        """Copy the owner's `whole` to the slices of all ranks, which must call it together; free `whole`."""
        if self._weight.grad is None:
            return
        local = self._weight.to_local()
        full = self.whole.data.contiguous() if self.owned else local.new_empty(self._weight.shape)
        for dim in self._dims:
            dist.broadcast(full, group=self._mesh.get_group(dim), group_src=self._owner[dim])
        local.copy_(own_slice(full, like=self._weight).to_local())
        self.whole.data, self.whole.grad = self._placeholder, None


def share(weights: Iterable[Parameter]) -> list[SharedWeight]:
    """Give each weight an owner, so that the owners of one mesh have equally many numbers to update."""
    weights = list(weights)
    chosen = owners(map(_size, weights))
    return [SharedWeight(weight, owner=owner) for weight, owner in zip(weights, chosen, strict=True)]


def _size(weight: Parameter) -> tuple[object, int, list[int]]:
    assert isinstance(weight, DTensor)
    mesh, dims = weight.device_mesh, split_dims(weight)
    degrees = [mesh.size(dim) if dim in dims else 1 for dim in range(mesh.ndim)]
    return mesh.mesh_dim_names, weight.numel(), degrees


def split_dims(weight: DTensor) -> list[int]:
    """The dims of its mesh over which a weight is split."""
    return [dim for dim, placement in enumerate(weight.placements) if not placement.is_replicate()]


def _full(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()
