"""What activation checkpointing saves and costs: bytes kept for the backward pass and the time of a step,
as ratios to keeping everything (the fastest of 12).

python tests/benchmarks/checkpointing.py
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hpc_parallel.models.layered import LayeredModel, materialise
from hpc_parallel.models.transformer import Transformer
from hpc_parallel.strategies import checkpointing
from tests.distributed.test_checkpointing import Alive

ROUNDS = 12
WAYS = ("none", "selective", "full")
TOKENS = torch.arange(4 * 128).reshape(4, 128) % 256  # [batch, seq]


def build(keeps: str) -> LayeredModel:
    model = Transformer(layers=4, dim=384, heads=6, kv_heads=3, ffn_dim=1024, vocab_size=256)
    materialise(model, seed=0, device="cpu", dtype=torch.float32)
    return checkpointing.apply(model, keeps=keeps, compiled=False)


def kept_bytes(model: LayeredModel) -> int:
    with Alive(model) as alive:
        output = model(TOKENS)
    assert output.requires_grad
    return alive.bytes


def step_s(model: LayeredModel) -> float:
    started = time.perf_counter()
    model.loss(model(TOKENS), TOKENS).backward()
    model.zero_grad()
    return time.perf_counter() - started


def main() -> None:
    models = {keeps: build(keeps) for keeps in WAYS}
    kept = {keeps: kept_bytes(model) for keeps, model in models.items()}
    times_s: dict[str, list[float]] = {keeps: [] for keeps in WAYS}
    for round_ in range(ROUNDS + 1):
        for keeps, model in models.items():  # in turns; what else runs here only makes a step slower
            taken_s = step_s(model)
            if round_:  # the first fills caches
                times_s[keeps].append(taken_s)
    fastest_s = {keeps: min(taken_s) for keeps, taken_s in times_s.items()}
    for keeps in WAYS:
        print(
            f"{keeps}: keeps {kept[keeps] / kept['none']:.2f} of {kept['none'] / 2**20:.0f} MiB, "
            f"a step takes {fastest_s[keeps] / fastest_s['none']:.2f} of {fastest_s['none']:.2f} s"
        )


if __name__ == "__main__":
    main()
