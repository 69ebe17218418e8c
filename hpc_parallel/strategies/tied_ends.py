"""Tied weights of a pipeline's first and last stage: each stage has a copy, and both stay equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.strategies.mesh import local_gradients


class TiedEnds:
    """Keeps the copies of tied weights equal.

    On two ranks, both copies get the sum of their gradients. On one rank, the optimizer updates only the
    original in the first stage, and the copy in the last stage gets its values. They can't be one parameter:
    fully_shard gathers each stage separately and could not slice it.
    """

    def __init__(self, stages: Sequence[LayeredModel], *, mesh: DeviceMesh, v_shaped: bool) -> None:
        """`v_shaped`: the first and the last stage are on one rank, in every pipeline."""
        names = dict(pair for stage in stages for pair in stage.tied.items())
        local = dict(pair for stage in stages for pair in stage.named_parameters())
        self.copies = [local[alias] for alias in names if alias in local]  # in the last stage
        originals = [local[name] for name in names.values() if name in local]
        self._pairs = list(zip(self.copies, originals, strict=True)) if v_shaped else []
        self._shared = [] if v_shaped else self.copies or originals
        self._group = ends_group(mesh) if names and not v_shaped else None

    @torch.no_grad()
    def copy_originals(self) -> None:
        """Copy the originals to this rank's copies, after the optimizer or a checkpoint has changed them."""
        for copy, original in self._pairs:
            _local(copy).copy_(_local(original))

    def sum_gradients(self) -> None:
        for gradient in local_gradients(self._shared):
            dist.all_reduce(gradient, group=self._group)
        for copy, original in self._pairs:
            gradients = zip(local_gradients([original]), local_gradients([copy]), strict=True)
            for original_gradient, copy_gradient in gradients:
                original_gradient.add_(copy_gradient)
            copy.grad = None


def _local(weight: Parameter) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def ends_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The group of this pipeline's first and last rank; None on the ranks between.

    Every rank of the world creates the groups of all pipelines, because NCCL splits a communicator only with
    all its ranks.
    """
    assert mesh.mesh_dim_names is not None
    dim = mesh.mesh_dim_names.index("pipeline")
    pipelines = mesh.mesh.movedim(dim, -1).reshape(-1, mesh.size(dim))  # [pipeline, rank]
    own_group = None
    for ranks in pipelines.tolist():
        ends = [ranks[0], ranks[-1]]
        group = dist.new_group(ends)
        if dist.get_rank() in ends:
            own_group = group
    return own_group
