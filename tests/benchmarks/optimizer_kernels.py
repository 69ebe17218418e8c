"""AdamW's three kernels on this machine, as ratios to the plain loop.

python tests/benchmarks/optimizer_kernels.py
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

KERNELS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
ROUNDS = 15


def main() -> None:
    for name, shapes in {
        "tiny, 0.8 M weights in 38 tensors": [(128, 128)] * 29 + [(344, 128)] * 8 + [(256, 128)],
        "20 M weights in 48 tensors": [(512, 512)] * 32 + [(1376, 512)] * 16,
    }.items():
        times: dict[str, list[float]] = {kernel: [] for kernel in KERNELS}
        optimizers = {kernel: build(shapes, options) for kernel, options in KERNELS.items()}
        for _ in range(ROUNDS):  # in turn, so that what else runs here meets all three alike
            for kernel, optimizer in optimizers.items():
                started = time.perf_counter()
                optimizer.step()
                times[kernel].append(time.perf_counter() - started)
        medians = {kernel: statistics.median(found[3:]) for kernel, found in times.items()}
        ratios = ", ".join(f"{kernel} {found / medians['loop']:.2f}" for kernel, found in medians.items())
        print(f"{name}: {ratios} (times the loop's {medians['loop'] * 1e3:.2f} ms)")


def build(shapes: list[tuple[int, int]], options: dict[str, bool]) -> torch.optim.AdamW:
    weights = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    return torch.optim.AdamW(weights, **options)


if __name__ == "__main__":
    main()
