"""Sequences split over devices: attention alone, whole trainings, balance and memory, against one device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.parity import Alone, follow_one_device
from tests.workers import Workers

WAYS = ("ring", "gather")
SHALLOW = ("model.layers=2",)
LAYOUTS = {
    **{
        f"context over {degree}, {way}": (
            "strategy=context", f"nodes={degree}", f"strategy.context_attention={way}", *SHALLOW,
        )
        for way in WAYS for degree in (2, 4)
    },
    "context over 3, slices of 5, whole heads": (
        "strategy=context", "nodes=3", "data.sequence_length=30", "model.kv_heads=4", *SHALLOW,
    ),
    "context over 2, accumulating 4": (
        "strategy=context", "nodes=2", "training.microbatch_size=4", *SHALLOW,
    ),
    "replicate 2 x context 2": (
        "strategy=data", "nodes=2", "gpus_per_node=2", "strategy.context=2", "training.microbatch_size=2",
        *SHALLOW,
    ),
    "shard 2 x context 2": (
        "strategy=fsdp", "nodes=2", "gpus_per_node=2", "strategy.context=2", *SHALLOW,
    ),
    "shard 2 x context 2, gather, accumulating 4": (
        "strategy=fsdp", "nodes=2", "gpus_per_node=2", "strategy.context=2", "training.microbatch_size=2",
        "strategy.context_attention=gather", *SHALLOW,
    ),
    "pipeline 2 x context 2": (
        "strategy=pipeline", "nodes=2", "gpus_per_node=2", "strategy.pipeline=2", "strategy.context=2",
        "strategy.microbatches=8", *SHALLOW,
    ),
    "tensor 2 x context 2": (
        "strategy=tensor", "nodes=2", "gpus_per_node=2", "strategy.tensor=2", "strategy.context=2", *SHALLOW,
    ),
    "tensor 2 x context 2, whole sequence and logits": (
        "strategy=tensor", "nodes=2", "gpus_per_node=2", "strategy.tensor=2", "strategy.context=2",
        "strategy.sequence_parallel=false", "strategy.loss_parallel=false", *SHALLOW,
    ),
    "replicate 2 x shard 2 x context 2": (
        "strategy=hsdp", "nodes=2", "gpus_per_node=4", "strategy.context=2", "training.microbatch_size=2",
        *SHALLOW,
    ),
    "pipeline 2 x context 2 x tensor 2": (
        "strategy=hybrid", "nodes=2", "gpus_per_node=4", "strategy.tensor=2", "strategy.context=2", *SHALLOW,
    ),
}  # fmt: skip
CASES = [
    *((layout, "float64") for layout in LAYOUTS),
    *((f"context over 4, {way}", exactness) for way in WAYS for exactness in ("float32",)),
    ("shard 2 x context 2", "float32"),
    ("context over 2, ring", "float64, untied head"),
]


@pytest.mark.parametrize(("layout", "exactness"), CASES)
def test_layout_follows_one_device(workers: Workers, alone: Alone, layout: str, exactness: str) -> None:
    follow_one_device(workers, alone, LAYOUTS[layout], exactness=exactness)


def _attention(way: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Output and the gradients of query, key, value on this rank's slices: by the technique, by one device."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from hpc_parallel.models.attention import CausalAttention
    from hpc_parallel.strategies.context import WAYS, SplitAttention

    batch, kv_heads, group, half, width = shape
    degree = dist.get_world_size()
    mesh = init_device_mesh("cpu", (degree,), mesh_dim_names=("context",))
    split = SplitAttention(axis=mesh, way=WAYS[way])
    mine = split.positions(2 * half, device=torch.device("cpu"))
    numbers = torch.Generator().manual_seed(0)
    length = 2 * half * degree
    q_shape, k_shape = (batch, kv_heads * group, length, width), (batch, kv_heads, length, width)
    query, key, value, weight = (
        3 * torch.randn(shape, dtype=dtype, generator=numbers) for shape in (q_shape, k_shape, k_shape, q_shape)
    )
    found = []
    for attention, places in ((split, mine), (CausalAttention(), torch.arange(length))):
        taken = [tensor[:, :, places].requires_grad_() for tensor in (query, key, value)]
        out = attention(*taken)
        (out * weight[:, :, places]).sum().backward()
        results = [out.detach(), *(tensor.grad for tensor in taken)]
        found.append([r if attention is split else r[:, :, mine] for r in results])
    return found[0], found[1]


SHAPES = st.tuples(*(st.integers(1, most) for most in (2, 3, 3, 4, 5)))


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=8, deadline=None)
@given(degree=st.integers(2, 4), shape=SHAPES, strip=st.sampled_from([1, 3, 256]))
def test_attention_is_one_devices(
    workers: Workers, way: str, degree: int, shape: tuple[int, ...], strip: int
) -> None:
    for split, whole in workers.run(degree, _in_strips, strip, way, shape):
        for found, wanted in zip(split, whole, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def _in_strips(rows: int, way: str, shape: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
    from hpc_parallel.strategies import partial_attention

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partial_attention, "ROWS", rows)
        return _attention(way, shape, torch.float64)
