"""The memory traffic of rounding to float8, as strategies/float8.py does it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpc_parallel.planning.operations import MatrixProduct, Move, Operation

ALIGNED = 16  # the sizes of products in float8 are multiples of this
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


def in_float8(operations: Sequence[Operation]) -> list[MatrixProduct]:
    """The products in float8."""
    return [one for one in operations if isinstance(one, MatrixProduct) and one.float8]


@dataclass(frozen=True)
class Rounding:
    """How factors of products are rounded.

    by_rows: whether each row has a scale; if not, the whole tensor has one. fused: whether compiled code
    rounds; if not, separate kernels do.
    """

    by_rows: bool
    fused: bool

    def forward(self, products: Sequence[MatrixProduct], *, layers: Mapping[str, int]) -> Iterator[Move]:
        """Round inputs and weights. layers: how many layers a product (by name) stands for; default: 1."""
        for product in products:
            count = layers.get(product.name, 1)
            inputs, weights, _ = _numbers(product, count)
            moved = ROUNDED[self.fused] * (inputs + weights)
            yield Move(f"{product.name}: to float8", moved, 2 * count * ROUNDING_KERNELS[self.fused])

    def backward(self, products: Sequence[MatrixProduct], *, layers: Mapping[str, int]) -> Iterator[Move]:
        """Round and copy weights, inputs and the gradient.

        With a scale for each row, the gradient is rounded for each of the two products, and their results are
        scaled afterwards.
        """
        for product in products:
            count = layers.get(product.name, 1)
            inputs, weights, results = _numbers(product, count)
            moved = ROUNDED[self.fused] * (inputs + weights + (1 + self.by_rows) * results)
            moved += TRANSPOSED * (inputs + weights + results)
            moved += SCALED[self.fused] * (inputs + weights) * self.by_rows
            kernels = (3 + self.by_rows) * ROUNDING_KERNELS[self.fused] + 3
            kernels += 2 * SCALING_KERNELS[self.fused] * self.by_rows
            yield Move(f"{product.name}: gradients to float8", moved, count * kernels)


def _numbers(product: MatrixProduct, layers: int) -> tuple[float, float, float]:
    """The numbers of the inputs of all layers, of their weights and of their results."""
    rows, columns, depth = product.rows, product.columns, product.depth
    return layers * rows * depth, columns * depth, rows * columns
