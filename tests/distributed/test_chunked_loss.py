"""The loss in chunks with a projection whose rows are split over devices, against whole logits."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from hpc_parallel.layout.counts import LOSS_CHUNK_BYTES
from hpc_parallel.strategies.chunked_loss import ChunkedCrossEntropy, ProjectionRows
from tests.marks import in_full
from tests.parity import COMMON, assert_follows
from tests.workers import Workers

TOKENS, DIM, VOCABULARY = 30, 12, 17  # the first device has 9 rows, the second 8


def operands() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, DIM, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCABULARY, DIM, generator=generator, dtype=torch.float64, requires_grad=True)
    return hidden, weight, torch.randint(VOCABULARY, (TOKENS,), generator=generator)


def by_rows() -> tuple[Tensor, Tensor, Tensor]:
    """The loss, the summed gradient of the input, and the gradient of this rank's rows; three chunks."""
    axis = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    hidden, weight, target = operands()
    rows = ProjectionRows.of(weight, axis=axis)
    local = weight.detach()[rows.first : rows.first + rows.count].requires_grad_()
    with patch.dict(LOSS_CHUNK_BYTES, cpu=10 * rows.count * 4):
        loss = ChunkedCrossEntropy.apply(hidden, local, target, torch.float64, rows)
    grad_hidden, grad_weight = torch.autograd.grad(0.3 * loss, (hidden, local))
    return loss.detach(), rows.reduce(grad_hidden), grad_weight


def test_rows_over_two_devices_equal_whole_logits(workers: Workers) -> None:
    hidden, weight, target = operands()
    exact = F.cross_entropy(hidden @ weight.T, target, reduction="sum")
    grad_hidden, grad_weight = torch.autograd.grad(0.3 * exact, (hidden, weight))
    ranks = workers.run(2, by_rows)
    for loss, of_hidden, _ in ranks:
        torch.testing.assert_close(loss, exact.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(of_hidden, grad_hidden, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([rows for *_, rows in ranks]), grad_weight, rtol=1e-12, atol=1e-12)


OWN = "model._target_=tests.models.Decided model.tied_head=false strategy=data nodes=2"


@pytest.mark.parametrize("layout", ["strategy=single", OWN, *in_full([("strategy=tensor nodes=2",)])])
def test_a_run_with_it_equals_one_without(workers: Workers, layout: str) -> None:
    """DistributedDataParallel looks for unused weights in a model of one's own."""
    words = (*COMMON, "training.precision=float64", "model.layers=2", "training.microbatch_size=4")
    model = [word for word in layout.split() if word.startswith("model.")]
    plain = workers.train(*words, *model, "strategy=single", "training.chunked_loss=false")
    chunked = workers.train(*words, *layout.split())
    assert_follows(chunked, plain, losses=1e-10, weights=1e-10)
