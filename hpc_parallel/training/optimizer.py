"""AdamW, its learning rate as a pure function of the step, and the gradient's global norm."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer

from hpc_parallel import torch_internals
from hpc_parallel.config.schema import OptimizerConfig
from hpc_parallel.strategies.mesh import holders, local_gradients


def build_optimizer(parameters: Mapping[str, Parameter], config: OptimizerConfig) -> Optimizer:
    """AdamW (Loshchilov and Hutter 2019); weight decay on matrices only.

    The fused kernel reads each weight once; on CPUs too it was the fastest (docs/performance.md).
    """
    matrices = [parameter for parameter in parameters.values() if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters.values() if parameter.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    beta1, beta2 = config.betas
    return AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(beta1, beta2),
        eps=config.eps,
        fused=True,
    )


def learning_rate(step: int, *, steps: int, config: OptimizerConfig) -> float:
    """Rate of the 1-based `step`: linear warm-up, then constant or half a cosine down to `final_share`."""
    warmup = steps // 20 if config.warmup_steps is None else config.warmup_steps
    if step <= warmup:
        return config.learning_rate * step / warmup
    if config.schedule == "constant":
        return config.learning_rate
    progress = (step - warmup) / max(1, steps - warmup)
    share = config.final_share + (1 - config.final_share) * (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * share


class GradientNorm:
    """The 2-norm of the whole model's gradient, whichever ranks hold its parts."""

    def __init__(self, counted: Iterable[Parameter], *, axes: Sequence[DeviceMesh]) -> None:
        """`counted`: this rank's weights, a weight that two stages hold counted on one of them only;
        `axes`: the mesh axes over which weights are split, some of them maybe not over all."""
        self._by_holders: dict[int, list[Parameter]] = defaultdict(list)
        for parameter in counted:
            self._by_holders[holders(parameter, axes=axes)].append(parameter)
        self._groups = [axis.get_group() for axis in axes]

    @property
    def counted(self) -> list[Parameter]:
        """In the order of the norms that a call returns."""
        return [parameter for parameters in self._by_holders.values() for parameter in parameters]

    def __call__(self) -> tuple[Tensor, Tensor]:
        """The norm, a scalar on the device, and those of this rank's parts [parameter]; nothing waits.

        A weight that the loss did not reach has norm 0.
        """
        shares, each = [], []
        for count, parameters in self._by_holders.items():
            present = [parameter for parameter in parameters if parameter.grad is not None]
            norms = iter(torch_internals.norms(local_gradients(present)))
            zero = torch.zeros((), device=parameters[0].device)
            each += [zero if parameter.grad is None else next(norms) for parameter in parameters]
            own = torch.stack(each[-len(parameters) :])
            shares.append(torch.linalg.vector_norm(own).square() / count)
        squared = torch.stack(shares).sum()
        for group in self._groups:
            dist.all_reduce(squared, group=group)
        return squared.sqrt(), torch.stack(each)


def clip(parameters: Iterable[Parameter], *, norm: Tensor, most: float) -> None:
    """Scale all gradients so that their global `norm` is at most `most`, without reading it back."""
    scale = (most / (norm + 1e-6)).clamp(max=1.0)
    torch_internals.scale(local_gradients(parameters), scale)


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
