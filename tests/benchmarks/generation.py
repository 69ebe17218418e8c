"""What keeping keys and values is worth: time of a token with the cache to that of reading all anew.

python tests/benchmarks/generation.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from hpc_parallel.models.layered import LayeredModel, materialise
from hpc_parallel.models.transformer import Transformer
from hpc_parallel.strategies import cache

BATCH, ROUNDS = 4, 15


def main() -> None:
    torch.manual_seed(0)
    for length in (32, 128, 512):
        tokens = torch.randint(256, (BATCH, length + ROUNDS))
        whole, cached = build(), cache.apply(build(), length=length + ROUNDS)
        with torch.no_grad():
            cached(tokens[:, :length])
            kept, anew = [], []
            for place in range(length, length + ROUNDS):  # in turn, so that other work here meets both alike
                kept.append(seconds(cached, tokens[:, place : place + 1]))
                anew.append(seconds(whole, tokens[:, : place + 1]))
        ratio = statistics.median(anew) / statistics.median(kept)
        print(f"after {length} tokens: {ratio:.1f} times the cache's {statistics.median(kept) * 1e3:.2f} ms")


def build() -> LayeredModel:
    """The shapes of model=tiny."""
    model = Transformer(layers=4, dim=128, heads=4, kv_heads=2, ffn_dim=344, vocab_size=256)
    return materialise(model, seed=0, device="cpu", dtype=torch.float32).eval()


def seconds(model: Callable[[Tensor], Tensor], tokens: Tensor) -> float:
    started = time.perf_counter()
    model(tokens)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
