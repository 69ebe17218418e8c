"""The operations of a device, and their times by a roofline (Williams et al. 2009)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hpc_parallel.planning.hardware import Hardware

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))  # of cuBLAS and CUTLASS
# Of inputs of products, by precision.
NUMBER_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
FLOAT32_BYTES = 4
FLOAT8 = "float8"  # the precision of products with `training.fp8`
# Bytes that move for each number of a matrix in bfloat16, by whether compiled code fuses operations.
ROUNDED = {
    # Absolute value (2 + 2), maximum (2), to float32 (2 + 4), times the scale (4 + 4), to float8 (4 + 1).
    False: 25,
    True: 5,  # the maximum (2), and the result (2 + 1)
}
SCALED = {False: 20, True: 4}  # multiply a result by both scales in float32, and cast it back
TRANSPOSED = 2  # a copy in float8 in the order that cuBLAS takes
ROUNDING_KERNELS = {False: 12, True: 3}  # of one matrix, including the kernels of its scale
SCALING_KERNELS = {False: 3, True: 1}


def precise_bytes(number_bytes: int) -> int:
    """Bytes of one number of the weights, the gradient sums and the loss: float32 or float64."""
    return max(FLOAT32_BYTES, number_bytes)


@dataclass(frozen=True)
class MatrixProduct:
    """`batch` products of [rows, depth] and [depth, columns].

    number_bytes: the bytes of each number; with float8, the bytes of each number of the result (the factors
    have one byte for each number). in_cache: whether the largest matrix stays in the cache. experts: the
    matrices are those of experts, whose gradient of the weights is not in float8.
    """

    name: str
    rows: float
    columns: float
    depth: float
    number_bytes: int
    batch: float = 1
    in_cache: bool = False
    float8: bool = False
    experts: bool = False

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
        by_weights = replace(self, name=f"{self.name}: gradient of weights", rows=self.depth, depth=self.rows)
        return [
            replace(self, name=f"{self.name}: gradient of inputs", columns=self.depth, depth=self.columns),
            replace(by_weights, float8=self.float8 and not self.experts),
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


def in_float8(operations: Sequence[Operation]) -> list[MatrixProduct]:
    return [one for one in operations if isinstance(one, MatrixProduct) and one.float8]


@dataclass(frozen=True)
class Rounding:
    """How factors of products are rounded, as in strategies/float8.py.

    by_rows: whether each row has a scale; if not, the whole tensor has one. fused: whether compiled code
    rounds; if not, separate kernels do. apart: whether a backward pass computes gradients of weights only.
    """

    by_rows: bool
    fused: bool
    apart: bool = False

    @property
    def passes(self) -> int:
        """How many backward passes find the same scales of a gradient."""
        return 2 if self.apart and not self.by_rows else 1

    def forward(self, products: Sequence[MatrixProduct], *, layers: Mapping[str, int]) -> Iterator[Move]:
        """Round inputs and weights. layers: how many layers a product (by name) stands for; default: 1."""
        for product in products:
            count = layers.get(product.name, 1)
            inputs, weights, _ = _numbers(product, count)
            moved = ROUNDED[self.fused] * (inputs + weights)
            yield Move(f"{product.name}: to float8", moved, 2 * count * ROUNDING_KERNELS[self.fused])

    def backward(self, products: Sequence[MatrixProduct], *, layers: Mapping[str, int]) -> Iterator[Move]:
        """Round and copy weights, inputs and the gradient.

        With a scale for each row, or in passes apart, the gradient is rounded for each of the two products.
        With a scale for each row, their results are scaled afterwards. Experts have one of these products,
        which scales its result, and no copy of inputs.
        """
        for product in products:
            count = layers.get(product.name, 1)
            inputs, weights, results = _numbers(product, count)
            if product.experts:
                moved = ROUNDED[self.fused] * (weights + results) + TRANSPOSED * weights
                kernels = 2 * ROUNDING_KERNELS[self.fused] + 1
                yield Move(f"{product.name}: gradients to float8", moved, count * kernels)
                continue
            moved = ROUNDED[self.fused] * (inputs + weights + (self.by_rows + self.passes) * results)
            moved += TRANSPOSED * (inputs + weights + results)
            moved += SCALED[self.fused] * (inputs + weights) * self.by_rows
            kernels = (2 + self.by_rows + self.passes) * ROUNDING_KERNELS[self.fused] + 3
            kernels += 2 * SCALING_KERNELS[self.fused] * self.by_rows
            yield Move(f"{product.name}: gradients to float8", moved, count * kernels)

    def exchanged(
        self, product: MatrixProduct, *, axis: str, splits_inputs: bool, is_backward: bool
    ) -> float:
        """How many largest values the ranks of `axis` exchange in one message for one layer; 0: none.

        A scale for each row needs only the ranks that have parts of this row. splits_inputs: whether `tensor`
        splits the inputs of the layer, and not its outputs.
        """
        if not self.by_rows:  # of the inputs or of the gradient; one message a step has the weights'
            exchanged = axis == "context" or splits_inputs != is_backward
            return 1 if exchanged else 0
        if axis == "context":
            return (product.depth + product.columns) * (is_backward and not product.experts)
        if splits_inputs:
            return product.batch * (product.rows + product.columns) * (not is_backward)
        return product.batch * (product.rows + product.depth) * is_backward


def _numbers(product: MatrixProduct, layers: int) -> tuple[float, float, float]:
    """The numbers of the inputs of all layers, of their weights and of their results."""
    rows, columns, depth = product.batch * product.rows, product.columns, product.depth
    return layers * rows * depth, product.batch * columns * depth, rows * columns
