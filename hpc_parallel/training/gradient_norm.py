"""The global norm of the gradient, and clipping by it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from hpc_parallel import torch_internals
from hpc_parallel.strategies.mesh import holders, local_gradients, name_of
from hpc_parallel.strategies.ranges import marked


class GradientNorm:
    """Computes the 2-norm of the entire model's gradient, which is split over ranks."""

    def __init__(self, counted: Iterable[Parameter], *, axes: Sequence[DeviceMesh]) -> None:
        """`counted`: this rank's weights. If two stages hold a weight, only one of them counts it.

        `axes`: the mesh axes over which weights are split. Some weights may be split over fewer.
        """
        self._by_holders: dict[int, list[Parameter]] = defaultdict(list)
        for parameter in counted:
            self._by_holders[holders(parameter, axes=axes)].append(parameter)
        self._groups = {name_of(axis): axis.get_group() for axis in axes}

    @property
    def counted(self) -> list[Parameter]:
        """This rank's weights in the order of the norms that a call returns."""
        return [parameter for parameters in self._by_holders.values() for parameter in parameters]

    def __call__(self) -> tuple[Tensor, Tensor]:
        """Returns the norm, a scalar, and the norms of this rank's parts [parameter], all on the device.

        Nothing waits for the device. A weight without a gradient has norm 0.
        """
        squares, norms = [], []
        for count, parameters in self._by_holders.items():
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
