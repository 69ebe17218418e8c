"""The loss in chunks with a projection whose rows are split over devices, against whole logits."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F

from hpc_parallel.config.schema import StrategyConfig
from hpc_parallel.layout.counts import LOSS_CHUNK_BYTES
from hpc_parallel.models.layered import materialise
from hpc_parallel.models.transformer import Transformer
from hpc_parallel.strategies import chunked_loss
from hpc_parallel.strategies.chunked_loss import ChunkedCrossEntropy, ProjectionRows
from hpc_parallel.strategies.tensor import split_layers
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


class Own(Transformer):
    """Its data is not judged before: the class may take any number."""

    def __init__(self, **shape: Any) -> None:
        super().__init__(**shape)


class OwnLoss(Own):
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten() - 1, reduction="sum", ignore_index=-7)


def ends_of(kind: str, token: int, target: int, devices: int = 2) -> str:
    """The loss of a batch with these two numbers, or the error of this rank."""
    model = globals()[kind](vocab_size=64, dim=16, layers=1, heads=2, kv_heads=2, ffn_dim=32)
    loss = model.loss
    if devices > 1:
        axis = init_device_mesh("cpu", (devices,), mesh_dim_names=("tensor",))
        chunked = chunked_loss.apply(model) if kind == "Own" else None
        split_layers.apply(model, axis=axis, options=StrategyConfig(name="tensor"), chunked=chunked)
        whole = split_layers.loss_of_slices(loss, axis=axis)
        loss = chunked_loss.loss_of(model, dtype=None, mesh=axis) if chunked else whole
    materialise(model, seed=0, device="cpu", dtype=torch.float64)
    tokens, targets = torch.full((1, 8), 5), torch.full((1, 8), 9)
    tokens[0, 3], targets[0, 6] = token, target
    try:
        with loss_parallel():
            return f"{loss(model(tokens), targets).item():.9f}"
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize(
    ("kind", "token", "target", "told"),
    [
        ("Own", 64, 9, "the data has a token that is outside 0 to 63"),
        ("Own", 5, 64, "the data has a target that is outside 0 to 63"),
        ("Own", 5, -100, None),
        ("OwnLoss", 5, 0, "the data has a target that is outside 0 to 63"),
        ("OwnLoss", 5, -6, None),
    ],
)
def test_a_number_that_no_device_has_ends_the_run(
    workers: Workers, kind: str, token: int, target: int, told: str | None
) -> None:
    """torch counts it as 0. What a loss leaves out is none."""
    ends = workers.run(2, ends_of, kind, token, target)
    assert ends == [told or ends_of(kind, token, target, devices=1)] * 2


OWN = "model._target_=tests.models.Decided model.tied_head=false strategy=data nodes=2"


@pytest.mark.parametrize("layout", ["strategy=single", OWN, *in_full([("strategy=tensor nodes=2",)])])
def test_a_run_with_it_equals_one_without(workers: Workers, layout: str) -> None:
    """DistributedDataParallel looks for unused weights in a model of one's own."""
    words = (*COMMON, "training.precision=float64", "model.layers=2", "training.microbatch_size=4")
    model = [word for word in layout.split() if word.startswith("model.")]
    plain = workers.train(*words, *model, "strategy=single", "training.chunked_loss=false")
    chunked = workers.train(*words, *layout.split())
    assert_follows(chunked, plain, losses=1e-10, weights=1e-10)
