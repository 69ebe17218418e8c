"""Sequences split over devices: attention alone, whole trainings, balance and memory, against one device."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from hpc_parallel.models.attention import CausalAttention, FullAttention
from hpc_parallel.strategies.context import attention_kernels, ring
from hpc_parallel.strategies.context.split_sequence import split_attention
from tests.marks import in_full
from tests.parity import LONG, follow_one_device, opened
from tests.workers import Train, Workers

WAYS = ("ring", "gather", "all_to_all")
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
    "context over 4, all_to_all, two devices for a key-value head": (
        "strategy=context", "nodes=4", "strategy.context_attention=all_to_all", "model.heads=8",
        "model.kv_heads=2", *SHALLOW,
    ),
    "tensor 2 x context 2, all_to_all": (
        "strategy=tensor", "nodes=2", "gpus_per_node=2", "strategy.tensor=2", "strategy.context=2",
        "strategy.context_attention=all_to_all", *SHALLOW,
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
        "strategy.microbatches=4", *SHALLOW,
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
ENCODERS = {
    f"encoder, {name}": ("model._target_=tests.models.Encoder", *words)
    for name, words in LAYOUTS.items() if "kv_heads" not in str(words)
}  # fmt: skip
LAYOUTS |= ENCODERS
SLOW = [
    *ENCODERS,
    "replicate 2 x shard 2 x context 2", "pipeline 2 x context 2 x tensor 2", "context over 4, gather",
    "shard 2 x context 2, gather, accumulating 4", "tensor 2 x context 2, whole sequence and logits",
    "context over 4, all_to_all", "tensor 2 x context 2, all_to_all", "context over 2, accumulating 4",
    "context over 4, ring", "replicate 2 x context 2",
]  # fmt: skip
CASES = [
    *((layout, "float64") for layout in LAYOUTS if layout not in SLOW),
    *in_full((layout, "float64") for layout in SLOW),
    *in_full((f"context over 4, {way}", "float32") for way in WAYS),
    *in_full([("shard 2 x context 2", "float32")]),
    *in_full(("context over 2, ring", exactness) for exactness in ("float64, untied head", LONG)),
]


@pytest.mark.parametrize(("layout", "exactness"), CASES)
def test_layout_follows_one_device(trained: Train, layout: str, exactness: str) -> None:
    follow_one_device(trained, LAYOUTS[layout], exactness=exactness)


def _attention(
    way: str, shape: tuple[int, ...], dtype: torch.dtype, *, causal: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Output, gradients of query, key, value on this rank's slices: by the technique and by one device."""
    batch, kv_heads, group, half, width = shape
    degree = dist.get_world_size()
    mesh = init_device_mesh("cpu", (degree,), mesh_dim_names=("context",))
    whole = CausalAttention() if causal else FullAttention()
    split = split_attention(whole, axis=mesh, kind=way)
    mine = split.positions(2 * half, device=torch.device("cpu"))
    numbers = torch.Generator().manual_seed(0)
    length = 2 * half * degree
    q_shape, k_shape = (batch, kv_heads * group, length, width), (batch, kv_heads, length, width)
    query, key, value, weight = (
        torch.randn(shape, dtype=dtype, generator=numbers) for shape in (q_shape, k_shape, k_shape, q_shape)
    )
    found = []
    for attention, places in ((split, mine), (whole, torch.arange(length))):
        taken = [tensor[:, :, places].requires_grad_() for tensor in (query, key, value)]
        out = attention(*taken)
        (out * weight[:, :, places]).sum().backward()
        results = [out.detach(), *(tensor.grad for tensor in taken)]
        found.append([r if attention is split else r[:, :, mine] for r in results])
    return found[0], found[1]


SHAPES = st.tuples(*(st.integers(1, most) for most in (2, 3, 3, 4, 5)))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=5, deadline=None)
@given(degree=st.integers(2, 4), shape=SHAPES, strip=st.sampled_from([None, 1, 30, 2**18]))
def test_attention_is_one_devices(
    workers: Workers, way: str, causal: bool, degree: int, shape: tuple[int, ...], strip: int | None
) -> None:
    """By the fused kernel (without a size of strips) and by strips."""
    if way == "all_to_all":  # each device needs whole heads
        batch, kv_heads, group, *others = shape
        shape = (batch, kv_heads if degree % kv_heads == 0 else degree, group * degree, *others)
    for split, whole in workers.run(degree, _in_strips, strip, way, shape, causal):
        for found, wanted in zip(split, whole, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def _biased(way: str, causal: bool, heads: int, kv_heads: int) -> tuple[list[Tensor], list[Tensor]]:
    """As `_attention`, with ALiBi's slopes as weights and a mask; the gradient of the slopes is the last."""
    degree, half = dist.get_world_size(), 3
    length = 2 * half * degree
    mesh = init_device_mesh("cpu", (degree,), mesh_dim_names=("context",))
    whole = CausalAttention() if causal else FullAttention()
    split = split_attention(whole, axis=mesh, kind=way)
    mine = split.positions(2 * half, device=torch.device("cpu"))
    numbers = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=numbers)

    inputs = drawn(2, heads, length, 4), *(drawn(2, kv_heads, length, 4) for _ in range(2))
    weight, kept = drawn(2, heads, length, 4), drawn(2, length) > -0.5
    kept[0, :3] = False  # the first queries of a causal attention see no key
    found = []
    for attention, places in ((split, mine), (whole, torch.arange(length))):
        slopes = torch.linspace(0.1, 1, heads, dtype=torch.float64, requires_grad=True)
        taken = [tensor[:, :, places].requires_grad_() for tensor in inputs]
        out = attention(
            *taken, bias=lambda q, k, of=slopes: -of[:, None, None] * (q[:, None] - k).abs(),
            key_mask=kept[:, places],
        )  # fmt: skip
        (out * weight[:, :, places]).sum().backward()
        assert slopes.grad is not None
        if attention is split:
            dist.all_reduce(slopes.grad)
        results = [out.detach(), *(tensor.grad for tensor in taken)]
        found.append([*(r if attention is split else r[:, :, mine] for r in results), slopes.grad])
    return found[0], found[1]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_attention_with_a_bias_and_a_mask_is_one_devices(workers: Workers, way: str, causal: bool) -> None:
    for degree, heads, kv_heads in ((2, 4, 2), (3, 3, 3)):
        for split, whole in workers.run(degree, _biased, way, causal, heads, kv_heads):
            for found, wanted in zip(split, whole, strict=True):
                torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
                assert wanted.abs().max() > 0


def _in_strips(
    scores: int | None, way: str, shape: tuple[int, ...], causal: bool
) -> tuple[list[Tensor], list[Tensor]]:
    with pytest.MonkeyPatch.context() as patch:
        if scores is not None:
            patch.setattr(attention_kernels, "STRIP", scores)
            patch.setattr(ring, "kernel_for", lambda query: attention_kernels.STRIPS)
        return _attention(way, shape, torch.float64, causal=causal)


def _cost(*overrides: str) -> tuple[int, int, int]:
    """FLOPs of one step, bytes kept for its backward pass, and the most bytes allocated at once."""
    session = opened(*overrides)
    assembled, (length,) = session.assembled, session.data.sample_shape
    weights = {weight.data_ptr() for weight in assembled.named_parameters().values()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.arange(length)[None] % 256
    ops = torch.ops.aten
    flops = FlopCounterMode(
        display=False,
        custom_mapping={
            ops._scaled_dot_product_flash_attention_for_cpu: lambda *shapes, **_: sdpa_flop_count(
                *shapes[:3]
            ),
            ops._scaled_dot_product_flash_attention_for_cpu_backward: (
                lambda *shapes, **_: sdpa_backward_flop_count(*shapes[:4])
            ),
        },
    )
    counted = {name: counted_by(flops, exchange) for name, exchange in ring.EXCHANGES.items()}
    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with flops, hooks, mock.patch.dict(ring.EXCHANGES, counted):
        assembled.forward_backward.train(tokens, tokens)
    with torch.profiler.profile(profile_memory=True) as profile:
        assembled.forward_backward.train(tokens, tokens)
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    held = accumulate(event.nbytes() for event in events if event.name() == "[memory]")
    return flops.get_total_flops(), sum(kept.values()), max(held)


def counted_by(flops: FlopCounterMode, exchange: ring.KeyValueExchange) -> Any:
    """`exchange` with its products counted; a mode does not see what an operator of our own calls."""

    def within(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*inputs: Any, **options: Any) -> Any:
            with flops.mode:
                return call(*inputs, **options)

        return run

    return SimpleNamespace(forward=within(exchange.forward), backward=within(exchange.backward))


DIM, FLOAT = 128, 4  # of the model `tiny`; bytes
LONG_TEXT = ("model.layers=2", "data.sequence_length=4096", "data.max_bytes=2000000",
             "training.global_batch_size=1")  # fmt: skip


@pytest.fixture(scope="module")
def cost_alone(workers: Workers) -> tuple[int, int, int]:
    return workers.run(1, _cost, "strategy=single", *LONG_TEXT)[0]


@pytest.mark.parametrize(
    ("way", "degree"), [("ring", 2), *in_full([("ring", 4), ("gather", 4), ("all_to_all", 2)])]
)
def test_devices_hold_their_share_each_and_work_alike(
    workers: Workers, cost_alone: tuple[int, int, int], way: str, degree: int
) -> None:
    """A sequence four times as long takes what one device has: activations are all that grows with it.

    `ring` and `gather` write the heads of a position next to each other, which torch's attention copies.
    Four devices would hold a copy of each of the two key-value heads besides, to split by heads.
    """
    layout = ("strategy=context", f"nodes={degree}", f"strategy.context_attention={way}")
    flops, kept, peaks = zip(*workers.run(degree, _cost, *layout, *LONG_TEXT), strict=True)
    copied = 0 if way == "all_to_all" else 2 * 4096 * DIM * FLOAT
    share = (cost_alone[1] - copied) / degree
    assert kept == pytest.approx([share] * degree, rel=0.01)
    assert max(peaks) / cost_alone[2] < 1.6 / degree
    assert max(flops) / min(flops) < (1.05 if way == "gather" else 1.001)  # unequal rectangles, if gathered
