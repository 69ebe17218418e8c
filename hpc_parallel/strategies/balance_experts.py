"""Balance of experts without a loss: each expert's bias moves against its load once in an optimizer step.

Wang et al. 2024. The load is that of the global batch, so the biases are the same on every device and in
every layout. They are buffers of the model: checkpoints hold them, and a step that is skipped restores them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hpc_parallel.models.experts import LoadBalance
from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.strategies.forward_backward import ForwardBackward
from hpc_parallel.strategies.mesh import name_of
from hpc_parallel.strategies.ranges import marked


def balances_of(parts: Sequence[LayeredModel]) -> list[LoadBalance]:
    return [module for part in parts for module in part.modules() if isinstance(module, LoadBalance)]


class BalanceExperts:
    """The `inner` schedule; then the `balances` of this device's blocks move.

    `axis`: the devices that have other samples, or other positions, of the batch; None: there are none.
    """

    def __init__(
        self, inner: ForwardBackward, *, balances: Sequence[LoadBalance], axis: DeviceMesh | None
    ) -> None:
        self._inner, self._balances, self._axis = inner, balances, axis
        self.copies = inner.copies

    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        for balance in self._balances:
            balance.expert_load.zero_()
        loss = self._inner.train(inputs, targets)
        loads = torch.cat([balance.expert_load for balance in self._balances])  # one message for all blocks
        if self._axis is not None:
            with marked(f"all_reduce {name_of(self._axis)}"):
                dist.all_reduce(loads, group=self._axis.get_group())
        sizes = [len(balance.expert_load) for balance in self._balances]
        for balance, load in zip(self._balances, loads.split(sizes), strict=True):
            balance.move(load)
        return loss

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self._inner.evaluate(inputs, targets)
