"""A GPU starts from the weights of a CPU, bit by bit."""

from __future__ import annotations

import pytest
import torch

from hpc_parallel.models.drawn_weights import BLOCK
from hpc_parallel.models.layered import LayeredModel, materialise
from hpc_parallel.models.transformer import Transformer
from tests.gpu.test_strategies import DEVICE, pytestmark  # noqa: F401


def weights(device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Of a model with one weight that is drawn in blocks."""
    with torch.device("meta"):
        model: LayeredModel = Transformer(
            layers=1, dim=64, heads=4, kv_heads=2, ffn_dim=96, vocab_size=BLOCK // 32, tied_head=False
        )
    return dict(materialise(model, seed=3, device=device, dtype=dtype).named_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_starts_from_the_weights_of_a_cpu(dtype: torch.dtype) -> None:
    of_cpu, of_device = weights("cpu", dtype), weights(DEVICE, dtype)
    assert of_cpu["stem.weight"].numel() > BLOCK
    for name, weight in of_cpu.items():
        assert of_device[name].device.type == DEVICE
        assert torch.equal(of_device[name].cpu(), weight), name
