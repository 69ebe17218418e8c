"""Weights that are split: each rank has the very bits of one device's, and none is left out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from hpc_parallel.config.schema import StrategyConfig
from hpc_parallel.models.transformer import Transformer
from hpc_parallel.strategies import shard
from tests.marks import in_full
from tests.parity import opened
from tests.workers import Workers

MODEL = ("model.layers=2", "model.dim=36", "model.heads=2", "model.kv_heads=2", "model.ffn_dim=46")


def _first_weights(*overrides: str) -> Mapping[str, Tensor]:
    """As drawn, before any step."""
    session = opened(*overrides, "training.global_batch_size=12", "data.max_bytes=100000")
    weights = {name: weight.detach() for name, weight in session.assembled.named_parameters().items()}
    return {name: w.full_tensor() if isinstance(w, DTensor) else w for name, w in weights.items()}


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        (("strategy=fsdp", "nodes=3"), 3),
        (("strategy=tensor", "nodes=2"), 2),
        (("strategy=fsdp", "nodes=3", "gpus_per_node=2", "strategy.tensor=2"), 6),
        *in_full([(("strategy=fsdp", "nodes=3", "gpus_per_node=2", "strategy.context=2"), 6)]),
        *in_full([(("strategy=hsdp", "nodes=2", "gpus_per_node=4", "strategy.tensor=2"), 8)]),
    ],
)
def test_slices_are_of_one_devices_weights(workers: Workers, layout: tuple[str, ...], ranks: int) -> None:
    (whole,) = workers.run(1, _first_weights, "strategy=single", *MODEL)
    for found in workers.run(ranks, _first_weights, *layout, *MODEL):
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], weight) for name, weight in whole.items())


def _gathered_ahead(ahead: int) -> list[tuple[list[int], list[int]]]:
    """Of each block and the whole model (4): what is gathered while it runs, forward and backward."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    with torch.device("meta"):
        model = Transformer(layers=4, dim=8, heads=2, kv_heads=2, ffn_dim=8, vocab_size=8)
    shard.apply(model, mesh=mesh, options=StrategyConfig(name="fsdp", prefetch=ahead), precision="float32")
    states = [module._get_fsdp_state() for module in (*model.blocks.values(), model)]
    return [
        tuple(
            [states.index(other) for other in others]
            for others in (state._states_to_forward_prefetch, state._states_to_backward_prefetch)
        )
        for state in states
    ]


def test_prefetch_reaches_torch(workers: Workers) -> None:
    found = workers.run(2, _gathered_ahead, 2)[0]
    assert found == [([1, 2], []), ([2, 3], [0]), ([3], [1, 0]), ([], [2, 1]), ([0, 1], [3, 2])]


class Flattening(Transformer):
    def forward(self, *inputs: Tensor, document_starts: Tensor | None = None) -> Tensor:
        return super().forward(*inputs, document_starts=document_starts).flatten(0, 1)  # a view


def _warnings_of_a_changed_output() -> list[str]:
    """Of torch, when a loss changes the output in place."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    model = Flattening(layers=2, dim=8, heads=2, kv_heads=2, ffn_dim=8, vocab_size=8)
    shard.apply(model, mesh=mesh, options=StrategyConfig(name="fsdp"), precision="float32")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        output = model(torch.arange(8).view(2, 4))
        output *= 3
        output.sum().backward()
    return [str(warning.message) for warning in found]


def test_a_loss_may_change_an_output_in_place(workers: Workers) -> None:
    """torch loses FSDP2's hook on an output that is a view, and warns of wrong gradients."""
    assert workers.run(2, _warnings_of_a_changed_output) == [[], []]
