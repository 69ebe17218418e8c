"""The peak of a GPU by the name that its driver gives."""

from __future__ import annotations

import pytest

from hpc_parallel.training.metrics import peak_of


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        # Half of the data sheets' values with sparsity: 1,979, 1,513, 1,671, 1,979, 1,671, 1,979 and 624.
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_a_part_has_its_own_peak(name: str, tflops: int | None) -> None:
    assert peak_of(name) == (None if tflops is None else tflops * 1e12)
