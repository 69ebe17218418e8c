"""The operations of a device, and their times by a roofline (Williams et al. 2009)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hpc_parallel.planning.hardware import Hardware

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))  # of cuBLAS and CUTLASS
NUMBER_BYTES = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}  # of inputs of products, by precision
FLOAT32_BYTES = 4
FLOAT8 = "float8"  # the precision of products with `training.fp8`


def precise_bytes(number_bytes: int) -> int:
    """Bytes of one number of the weights, the gradient sums and the loss: float32 or float64."""
    return max(FLOAT32_BYTES, number_bytes)


@dataclass(frozen=True)
class MatrixProduct:
    """`batch` products of [rows, depth] and [depth, columns].

    number_bytes: the bytes of each number; with float8, the bytes of each number of the result (the factors
    have one byte for each number). in_cache: whether the largest matrix stays in the cache.
    """

    name: str
    rows: float
    columns: float
    depth: float
    number_bytes: int
    batch: float = 1
    in_cache: bool = False
    float8: bool = False

    @property
    def flops(self) -> float:
        return 2 * self.rows * self.columns * self.depth * self.batch

    @property
    def bytes(self) -> float:
        """The bytes that the product moves: each matrix once."""
        sides = (self.rows * self.depth, self.depth * self.columns, self.rows * self.columns)
        if self.float8:
            return self.batch * (sides[0] + sides[1] + self.number_bytes * sides[2])
        return self.number_bytes * self.batch * (sum(sides) - self.in_cache * max(sides))

    def seconds(self, hardware: Hardware, *, peak: float) -> float:
        """The longer time of computation and memory traffic, plus the least time of a kernel."""
        peak = hardware.device.peak_flops[FLOAT8] if self.float8 else peak
        compute_s = self.flops / (peak * hardware.products.peak_share * self.efficiency(hardware))
        memory_s = self.bytes / (hardware.device.memory_bytes_per_s * hardware.traffic.share)
        return max(compute_s, memory_s) + hardware.traffic.kernel_s

    def efficiency(self, hardware: Hardware) -> float:
        """The relative rate of the best tile, times the share of the multiprocessors that have work."""
        products, processors = hardware.products, hardware.device.multiprocessors
        best = 0.0
        for rows, columns in TILES:
            tiles = math.ceil(self.rows / rows) * math.ceil(self.columns / columns) * math.ceil(self.batch)
            turns = math.ceil(tiles / processors)
            filled = self.rows * self.columns * self.batch / (turns * processors * rows * columns)
            intensity = rows * columns / (rows + columns)
            best = max(best, filled * intensity / (intensity + products.tile_intensity))
        return best * self.depth / (self.depth + products.depth)

    def backward(self) -> list[MatrixProduct]:
        """The products that make the gradients of both matrices."""
        return [
            replace(self, name=f"{self.name}: gradient of inputs", columns=self.depth, depth=self.columns),
            replace(self, name=f"{self.name}: gradient of weights", rows=self.depth, depth=self.rows),
        ]

    def formula(self) -> str:
        shape = f"{self.rows:g} x {self.columns:g} x {self.depth:g}" + f" x {self.batch:g}" * (
            self.batch != 1
        )
        rate = f"{FLOAT8} rate" if self.float8 else "rate"
        return f"max(2 x {shape} FLOP / {rate}, {self.bytes:.4g} B / memory bandwidth) + kernel"


@dataclass(frozen=True)
class Move:
    """Operations that only move `bytes` through memory, in a number of kernels."""

    name: str
    bytes: float
    kernels: int = 0

    def seconds(self, hardware: Hardware, *, peak: float) -> float:
        rate = hardware.device.memory_bytes_per_s * hardware.traffic.share
        return self.bytes / rate + self.kernels * hardware.traffic.kernel_s

    def backward(self) -> list[Move]:
        """The operation of the gradient, which reads the inputs again."""
        return [Move(f"{self.name}: gradient", 2 * self.bytes, 2 * self.kernels)]

    def formula(self) -> str:
        return f"{self.bytes:.4g} B / memory bandwidth + {self.kernels} kernels"


Operation = MatrixProduct | Move
