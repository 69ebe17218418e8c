"""Weights that are split: each rank has the very bits of one device's, and none is left out."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from tests.marks import in_full
from tests.workers import Workers

MODEL = ("model.layers=2", "model.dim=36", "model.heads=2", "model.kv_heads=2", "model.ffn_dim=46")


def _first_weights(*overrides: str) -> Mapping[str, Tensor]:
    """As drawn, before any step."""
    from torch.distributed.tensor import DTensor

    from hpc_parallel.config.typed_config import typed
    from hpc_parallel.layout.batch_plan import plan_batch
    from hpc_parallel.layout.layout import Layout
    from hpc_parallel.strategies.assemble import assemble
    from hpc_parallel.strategies.groups import make_groups
    from hpc_parallel.strategies.whole_model import build_model
    from tests.composed import prepared

    run = prepared(*overrides, "training.global_batch_size=12")
    config = typed(run.values)
    layout = Layout.resolve(config.strategy, devices=run.processes)
    batch = plan_batch(12, layout=layout, microbatch_size=None, microbatches=None)
    groups = make_groups(config, layout, device_type="cpu")
    assembled = assemble(
        build_model(config),
        config=config,
        batch=batch,
        sample_shape=(32,),
        groups=groups,
        device=torch.device("cpu"),
    )
    weights = {name: weight.detach() for name, weight in assembled.named_parameters().items()}
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
    from torch.distributed.device_mesh import init_device_mesh

    from hpc_parallel.config.schema import StrategyConfig
    from hpc_parallel.models.transformer import Transformer
    from hpc_parallel.strategies import shard

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
