"""Weights that the first and the last stage of a pipeline share: each has a copy, and both stay equal."""

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
    """Gives both copies the sum of their gradients, or keeps one of them where both are on one rank.

    There the copy of the last stage follows the first's, which alone is the optimizer's: were they one
    parameter, fully_shard could not slice it, since each stage is gathered by itself.
    """

    def __init__(self, stages: Sequence[LayeredModel], *, mesh: DeviceMesh, v_shaped: bool) -> None:
        """`v_shaped`: the first stage and the last are on one rank, in every pipeline."""
        names = dict(pair for stage in stages for pair in stage.tied.items())
        here = dict(pair for stage in stages for pair in stage.named_parameters())
        self.copies = [here[alias] for alias in names if alias in here]  # held by the last stage
        originals = [here[name] for name in names.values() if name in here]
        self._pairs = list(zip(self.copies, originals, strict=True)) if v_shaped else []
        self._shared = [] if v_shaped else self.copies or originals
        self._group = ends_group(mesh) if names and not v_shaped else None

    @torch.no_grad()
    def follow(self) -> None:
        """Give this rank's copies what the optimizer, or a file, has made of the originals."""
        for copy, original in self._pairs:
            _local(copy).copy_(_local(original))

    def sum_gradients(self) -> None:
        for gradient in local_gradients(self._shared):
            dist.all_reduce(gradient, group=self._group)
        for copy, original in self._pairs:
            for here, there in zip(local_gradients([original]), local_gradients([copy]), strict=True):
                here.add_(there)
            copy.grad = None


def _local(weight: Parameter) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def ends_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The group of this pipeline's first and last rank; None on the ranks between.

    Every rank of the world makes every pipeline's: NCCL splits a communicator only with all its ranks.
    """
    assert mesh.mesh_dim_names is not None
    dim = mesh.mesh_dim_names.index("pipeline")
    pipelines = mesh.mesh.movedim(dim, -1).reshape(-1, mesh.size(dim))  # [pipeline, stage's rank]
    mine = None
    for ranks in pipelines.tolist():
        ends = [ranks[0], ranks[-1]]
        group = dist.new_group(ends)
        if dist.get_rank() in ends:
            mine = group
    return mine
