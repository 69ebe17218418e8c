"""What `task=calibrate` runs on each device: products, elementwise work, launches, blocks and updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from hpc_parallel.models.transformer import Transformer
from hpc_parallel.planning.device_fit import (
    BLOCK_BACKWARD,
    BLOCK_FORWARD,
    ELEMENTWISE,
    ENDS,
    FITTED_PRECISION,
    LAUNCH,
    PRODUCT,
    UPDATE,
    VOCABULARY,
    ffn_dim,
    heads_of,
)
from hpc_parallel.planning.operations import FLOAT8
from hpc_parallel.strategies.float8 import device_problem
from hpc_parallel.torch_internals import scaled_product

PRECISIONS = ("float32", "bfloat16", "float64")
SIDES = {"cpu": (64, 128, 256, 512, 1024), "cuda": (256, 512, 1024, 2048, 4096, 8192)}
MOVED_BYTES = {"cpu": (2**18, 2**22, 2**26), "cuda": (2**20, 2**24, 2**28, 2**30)}
# (width, tokens). The time of the smallest block is only that of its launches.
BLOCKS = {
    "cpu": ((32, 8), (128, 128), (256, 256), (384, 512)),
    "cuda": ((64, 16), (1024, 2048), (2048, 4096), (4096, 4096)),
}
UPDATED = {"cpu": (2**10, 2**20, 2**22), "cuda": (2**10, 2**24, 2**27)}  # weights
TENSORS = 32  # in an update; about four blocks have as many


@dataclass(frozen=True)
class Probe:
    """One measurement to make. less: kinds of earlier probes whose times are part of this probe's time."""

    kind: str
    precision: str
    size: int
    prepare: Callable[[], Callable[[], object]]
    tokens: int = 1
    less: tuple[str, ...] = ()


def probes(device: torch.device) -> Iterator[Probe]:
    """All probes, from small to large within each kind."""
    kind = device.type
    precision = FITTED_PRECISION[kind]
    yield Probe(LAUNCH, precision, 4, partial(_launch, device))
    for width, tokens in BLOCKS[kind]:
        yield from _block_probes(width, tokens, precision=precision, device=device)
    for name in PRECISIONS:
        for side in SIDES[kind]:
            yield Probe(PRODUCT, name, side, partial(_product, side, name, device))
    if kind == "cuda" and device_problem("tensorwise", device) is None:
        for side in SIDES[kind]:
            yield Probe(PRODUCT, FLOAT8, side, partial(_float8_product, side, device))
    for size in MOVED_BYTES[kind]:
        yield Probe(ELEMENTWISE, precision, size, partial(_elementwise, size, device))
    for count in UPDATED[kind]:
        yield Probe(UPDATE, precision, count, partial(_update, count, device))


def _block_probes(width: int, tokens: int, *, precision: str, device: torch.device) -> Iterator[Probe]:
    def forward() -> Callable[[], object]:
        block, x = _block(width, tokens, precision, device)
        return lambda: block(x)

    def backward() -> Callable[[], object]:
        block, x = _block(width, tokens, precision, device)
        return lambda: block(x).backward(x)

    def ends() -> Callable[[], object]:
        model = _decoder(width, device).to(getattr(torch, precision))
        ids = torch.arange(tokens, device=device).remainder(VOCABULARY)[None]
        return lambda: model.loss(model(ids), ids).backward()

    yield Probe(BLOCK_FORWARD, precision, width, forward, tokens)
    yield Probe(BLOCK_BACKWARD, precision, width, backward, tokens, less=(BLOCK_FORWARD,))
    yield Probe(ENDS, precision, width, ends, tokens, less=(BLOCK_FORWARD, BLOCK_BACKWARD))


def _decoder(width: int, device: torch.device) -> Transformer:
    with torch.device(device):
        return Transformer(
            layers=1, dim=width, heads=heads_of(width), kv_heads=heads_of(width), ffn_dim=ffn_dim(width),
            vocab_size=VOCABULARY,
        )  # fmt: skip


def _block(width: int, tokens: int, precision: str, device: torch.device) -> tuple[nn.Module, Tensor]:
    dtype = getattr(torch, precision)
    (block,) = _decoder(width, device).to(dtype).blocks.values()
    return block, torch.randn(1, tokens, width, device=device).to(dtype).requires_grad_()


def _launch(device: torch.device) -> Callable[[], object]:
    one = torch.zeros(1, device=device)
    return lambda: one.add_(1)


def _product(side: int, precision: str, device: torch.device) -> Callable[[], object]:
    """A product of random numbers: with equal ones, a GPU needs less power and is faster than in training."""
    one, other = (torch.randn(side, side, device=device).to(getattr(torch, precision)) for _ in range(2))
    result = torch.empty_like(one)
    return lambda: torch.mm(one, other, out=result)


def _float8_product(side: int, device: torch.device) -> Callable[[], object]:
    """Only the product of `training.fp8=tensorwise`. A plan counts the time of the rounding separately."""
    one, other = (torch.randn(side, side, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    scale, columns = torch.ones((), device=device), other.t()
    return lambda: scaled_product(one, columns, scales=(scale, scale), fast=True)


def _elementwise(size_bytes: int, device: torch.device) -> Callable[[], object]:
    """Read two arrays and write one, `size_bytes` together."""
    one, other, result = (torch.ones(size_bytes // 12, device=device) for _ in range(3))
    return lambda: torch.add(one, other, out=result)


def _update(count: int, device: torch.device) -> Callable[[], object]:
    """Clip the gradient and update `count` weights, as a training does at the end of a step."""
    weights = [nn.Parameter(torch.zeros(max(1, count // TENSORS), device=device)) for _ in range(TENSORS)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW(weights, fused=True)

    def run() -> None:
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()

    return run
