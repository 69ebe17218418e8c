"""The gradients of this rank: slices, the norm of the entire gradient, and clipping."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import Parameter

from hpc_parallel import torch_internals
from hpc_parallel.strategies.mesh import all_reduce, name_of
from hpc_parallel.strategies.ranges import marked


def local_gradients(parameters: Iterable[Parameter]) -> list[Tensor]:
    """This rank's slices of the gradients, as plain tensors that share their memory.

    A distributed gradient is first redistributed to its weight's placements: autograd leaves the gradient
    of a norm's weight as partial sums over the tensor axis, and only fully_shard would add them up. All such
    gradients are added up in one collective, because each is small.
    """
    parameters = list(parameters)
    _sum_replicated(parameters)
    gradients: list[Tensor] = []
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            if gradient.placements != parameter.placements:
                gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
            gradient = gradient.to_local()
        if gradient is not None:
            gradients.append(gradient)
    return gradients


@torch.no_grad()
def _sum_replicated(parameters: Iterable[Parameter]) -> None:
    """Add up the partial gradients of weights that are whole on one axis, in a flat buffer for each dtype."""
    groups: defaultdict[tuple[DeviceMesh, torch.dtype], list[Parameter]] = defaultdict(list)
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            whole = parameter.placements == (Replicate(),)
            if whole and gradient.placements == (Partial(),):
                groups[gradient.device_mesh, gradient.dtype].append(parameter)
    for (axis, _), owners in groups.items():
        partial = [owner.grad.to_local() for owner in owners]  # type: ignore[union-attr]
        flat = torch.cat([gradient.reshape(-1) for gradient in partial])
        sums = all_reduce(flat, axis=axis).split([gradient.numel() for gradient in partial])
        for owner, gradient, total in zip(owners, partial, sums, strict=True):
            owner.grad = DTensor.from_local(total.view_as(gradient), axis, [Replicate()], run_check=False)


def used_anywhere(used: Sequence[bool], *, axis: DeviceMesh) -> list[bool]:
    """For each weight, whether any rank of `axis` has `used` it.

    The values are copied to and from the device only if needed: the host waits for such a copy.
    """
    message = torch.ones(len(used), dtype=torch.int32, device=axis.device_type)
    if not all(used):
        message = torch.tensor(used, dtype=torch.int32, device=axis.device_type)
    all_reduce(message, axis=axis, op=dist.ReduceOp.MAX)
    return [True] * len(used) if all(used) else message.bool().tolist()


class GradientNorm:
    """Computes the 2-norm of the entire model's gradient, which is split over ranks."""

    def __init__(self, counted: Iterable[Parameter], *, axes: Sequence[DeviceMesh]) -> None:
        """`counted`: this rank's weights. If two stages hold a weight, only one of them counts it.

        `axes`: the mesh axes over which weights are split. Some weights may be split over fewer.
        """
        self._by_copies: dict[int, list[Parameter]] = defaultdict(list)
        for parameter in counted:
            self._by_copies[copies_of(parameter, axes=axes)].append(parameter)
        self._groups = {name_of(axis): axis.get_group() for axis in axes}

    @property
    def counted(self) -> list[Parameter]:
        """This rank's weights in the order of the norms that a call returns."""
        return [parameter for parameters in self._by_copies.values() for parameter in parameters]

    def __call__(self) -> tuple[Tensor, Tensor]:
        """Returns the norm, a scalar, and the norms of this rank's parts [parameter], all on the device.

        Nothing waits for the device. A weight without a gradient has norm 0.
        """
        squares, norms = [], []
        for count, parameters in self._by_copies.items():
            present = [parameter for parameter in parameters if parameter.grad is not None]
            present_norms = iter(torch_internals.norms(local_gradients(present)))
            zero = torch.zeros((), device=parameters[0].device)
            group_norms = [
                zero if parameter.grad is None else next(present_norms) for parameter in parameters
            ]
            squares.append(torch.linalg.vector_norm(torch.stack(group_norms)).square() / count)
            norms += group_norms
        squared = torch.stack(squares).sum()
        for name, group in self._groups.items():
            with marked(f"all_reduce {name}"):
                dist.all_reduce(squared, group=group)
        return squared.sqrt(), torch.stack(norms)


def clip(parameters: Iterable[Parameter], *, norm: Tensor, max_norm: float) -> None:
    """Scale all gradients so that their global `norm` is at most `max_norm`. The host does not wait."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch_internals.scale(local_gradients(parameters), scale)


def copies_of(parameter: Parameter, *, axes: Iterable[DeviceMesh]) -> int:
    """Number of ranks of the `axes` that have the same slice of `parameter` as this rank."""
    count = math.prod(axis.size() for axis in axes if name_of(axis) != "pipeline")
    if isinstance(parameter, DTensor):
        for dim, placement in enumerate(parameter.placements):
            count //= 1 if placement.is_replicate() else parameter.device_mesh.size(dim)
    return count
