"""The number of terms by which a rank divides its loss, by shapes or counted if a model ignores targets."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.strategies.mesh import name_of
from hpc_parallel.strategies.ranges import marked


class LossTerms:
    """Counts the terms of a batch, so that the mean over ranks of their mean losses is that of one device."""

    def __init__(self, model: LayeredModel, *, weight: float = 1.0, axis: DeviceMesh | None = None) -> None:
        """`weight`: the factor of this replica's mean loss (`BatchPlan.weight`).

        `axis`: the ranks that have other targets of the batch, for a model that ignores some.
        """
        self._model = model
        self._weight = weight
        self._axis = axis

    def __call__(self, targets: Tensor) -> float | Tensor:
        """Terms of this rank's `targets` [batch, ...]; if some are ignored, the mean number of all ranks.

        The count stays on the device, a scalar in float32. Without any term it is 1, and the loss is 0.
        """
        ignored = self._model.ignore_index
        if ignored is None:
            return self._model.loss_terms(targets) / self._weight
        count = (targets != ignored).sum(dtype=torch.float32)
        if self._axis is not None:
            with marked(f"all_reduce {name_of(self._axis)}"):
                dist.all_reduce(count, group=self._axis.get_group())
            count /= self._axis.size()
        return torch.where(count > 0, count, 1.0)
