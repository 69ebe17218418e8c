"""The peak of a GPU by the name that its driver gives."""

from __future__ import annotations

import pytest
import torch

from hpc_parallel.config.places import find_folder
from hpc_parallel.planning.hardware import hardware_names, read_hardware
from hpc_parallel.start.join import tf32
from hpc_parallel.training.metrics import peak_of

FOLDERS = [find_folder("conf") / "hardware"]
GPUS = [
    name for name in hardware_names(FOLDERS) if read_hardware(name, folders=FOLDERS).device.kind == "cuda"
]
OF_DRIVERS = {"NVIDIA H100 SXM": "NVIDIA H100 80GB HBM3"}  # the names that drivers give; else as in the file


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
        # 5,000, 4,500 and 733; AMD gives 383 for both dies.
        ("NVIDIA GB200", 2500),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40S", 362),
        ("AMD Instinct MI250X", 191.5),
        ("AMD Instinct MI300X", 1307.4),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_a_part_has_its_own_peak(name: str, tflops: float | None) -> None:
    for precision in ("bfloat16", "float16"):
        assert peak_of(name, precision=precision) == (None if tflops is None else tflops * 1e12)
    assert peak_of(name, precision="float64") is None


def test_a_run_in_float32_is_judged_by_the_peak_of_float32() -> None:
    """With TF32: 989 in the data sheet of the H100 SXM with sparsity, so 494.5 without."""
    h100 = "NVIDIA H100 80GB HBM3"
    assert peak_of(h100, precision="float32") == 67e12
    assert peak_of(h100, precision="float32", tf32=True) == 494.5e12
    assert peak_of("NVIDIA GeForce RTX 4090", precision="float32") is None


def test_tf32_is_seen_however_a_users_module_has_set_it() -> None:
    """torch raises an error for `allow_tf32` after `fp32_precision` was set."""
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    kept = products.fp32_precision, convolutions.fp32_precision
    try:
        products.allow_tf32, convolutions.fp32_precision = True, "ieee"
        assert tf32() == {"matmul": True, "convolution": False}
        products.allow_tf32 = False
        assert tf32() == {"matmul": False, "convolution": False}
        products.fp32_precision = convolutions.fp32_precision = "tf32"
        assert tf32() == {"matmul": True, "convolution": True}
    finally:
        products.fp32_precision, convolutions.fp32_precision = kept


@pytest.mark.parametrize("name", GPUS)
def test_a_plan_and_a_run_have_the_same_peaks(name: str) -> None:
    """To the digits of the table: float32 on half a MI250X is 47.9 there, 47.85 (95.7 / 2) in the file."""
    device = read_hardware(name, folders=FOLDERS).device
    driver = OF_DRIVERS.get(device.name, device.name)
    for precision in ("float16", "bfloat16", "float32"):
        peak = pytest.approx(device.peak_flops[precision], rel=2e-3)
        assert peak_of(driver, precision=precision) == peak
