"""The reference convnets by themselves: shapes, counts, statistics, and that they learn."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hpc_parallel.models.convnet import ConvNet, Segmenter
from hpc_parallel.models.layered import materialise


def built(kind: type[ConvNet], **options):
    with torch.device("meta"):
        model = kind(**options)
    return materialise(model, seed=0, device="cpu", dtype=torch.float32)


NETS = [
    (ConvNet, {"channels": [16, 32, 128, 256, 512], "classes": 10}, (1, 32, 32), (10,)),
    (ConvNet, {"channels": [3, 5], "classes": 4, "in_channels": 3, "kernel_size": 5}, (3, 13, 22), (4,)),
    (Segmenter, {"channels": [4, 6, 8], "classes": 2}, (1, 24, 40), (2, 24, 40)),
]


@pytest.mark.parametrize(("kind", "options", "sample", "output"), NETS)
def test_flops_are_those_of_torch_s_counter(kind, options, sample, output) -> None:
    model = built(kind, **options)
    images = torch.randint(0, 256, (2, *sample), dtype=torch.uint8)
    with FlopCounterMode(display=False) as counter:
        logits = model(images)
    assert logits.shape == (2, *output)
    flops = model.forward_flops(sample)
    assert 2 * flops.total == counter.get_total_flops()
    by_module = counter.get_flop_counts()
    name = type(model).__name__
    assert [2 * block for block in flops.blocks] == [
        sum(by_module[f"{name}.blocks.{index}"].values()) for index in model.blocks
    ]


def test_statistics_are_those_of_he() -> None:
    """Logits of a fresh network have about unit variance, and pixels lie in [-1, 1]."""
    model = built(ConvNet, channels=[64, 64], classes=10)
    weight = model.get_parameter("blocks.1.conv.weight")
    assert weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.02)
    assert model.stem is not None
    ends = model.stem(torch.tensor([0, 255], dtype=torch.uint8))
    assert ends.tolist() == [-1.0, 1.0]
    assert not any(name.endswith("conv.bias") for name, _ in model.named_parameters())


def test_an_even_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.kernel_size = 4"):
        ConvNet(channels=[4], classes=2, kernel_size=4)
