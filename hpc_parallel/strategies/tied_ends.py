"""Tied weights of a pipeline's first and last stage: each stage has a copy, and both stay equal.

Other shared weights are in one stage (`stages.divide`), which has them once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from hpc_parallel.models.layered import LayeredModel, part_of
from hpc_parallel.strategies.mesh import local_gradients
from hpc_parallel.strategies.ranges import marked

ENDS = {"stem", "head"}


class TiedEnds:
    """Keeps the copies of tied weights equal.

    On two ranks, both copies get the sum of their gradients. On one rank, the optimizer updates only the
    original in the first stage, and the copy in the last stage gets its values. They can't be one parameter:
    fully_shard gathers each stage separately and could not slice it.
    """

    def __init__(
        self, stages: Sequence[LayeredModel], *, group: dist.ProcessGroup | None, v_shaped: bool
    ) -> None:
        """`group`: of the ranks of the first and of the last stage (`Groups.ends`).

        `v_shaped`: the first and the last stage are on one rank, in every pipeline.
        """
        pairs = [pair for stage in stages for pair in stage.tied.items()]
        names = {alias: name for alias, name in pairs if {part_of(alias), part_of(name)} == ENDS}
        local = dict(pair for stage in stages for pair in stage.named_parameters())
        self.copies = [local[alias] for alias in names if alias in local]  # in the last stage
        originals = [local[name] for name in names.values() if name in local]
        self._pairs = list(zip(self.copies, originals, strict=True)) if v_shaped else []
        self._shared = [] if v_shaped else self.copies or originals
        self._group = group

    @torch.no_grad()
    def copy_originals(self) -> None:
        """Copy the originals to this rank's copies, after the optimizer or a checkpoint has changed them."""
        for copy, original in self._pairs:
            _local(copy).copy_(_local(original))

    def sum_gradients(self) -> None:
        assert self._group is not None or not self._shared  # None would be the group of all ranks
        for gradient in local_gradients(self._shared):
            with marked("all_reduce tied ends"):
                dist.all_reduce(gradient, group=self._group)
        for copy, original in self._pairs:
            gradients = zip(local_gradients([original]), local_gradients([copy]), strict=True)
            for original_gradient, copy_gradient in gradients:
                original_gradient.add_(copy_gradient)
            copy.grad = None


def _local(weight: Parameter) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight
