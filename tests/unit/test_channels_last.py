"""Convolutions in channels_last order: the same numbers, and nothing else sees the order."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from hpc_parallel.models.convnet import ConvNet, Segmenter
from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.models.unet import UNet
from hpc_parallel.strategies import channels_last

MODELS = {
    "one channel": lambda: ConvNet(channels=[8, 12], classes=3),
    "three channels": lambda: ConvNet(channels=[8, 12], classes=3, in_channels=3),
    "segmenter": lambda: Segmenter(channels=[8, 12], classes=3),
    "unet": lambda: UNet(channels=[4, 6, 8], classes=3),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_same_output_and_gradients_in_the_other_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    plain = MODELS[name]().double()
    monkeypatch.setattr(channels_last, "gains", lambda *_: True)
    reordered = channels_last.apply(deepcopy(plain), precision="float64", device_type="cpu")
    orders: list[bool] = []

    def note(convolution: nn.Module, inputs: object, output: Tensor) -> None:
        orders.append(output.is_contiguous(memory_format=torch.channels_last))

    for module in reordered.modules():
        if isinstance(module, nn.Conv2d) and module.in_channels > 1:
            module.register_forward_hook(note)
    images = torch.randint(256, (2, getattr(plain, "in_channels", 1), 16, 16), dtype=torch.uint8)
    outputs = [backpropagated(model, images) for model in (plain, reordered)]

    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-12, atol=1e-12)
    assert orders
    assert all(orders)
    for (key, weight), (other, reordered_weight) in zip(
        plain.named_parameters(), reordered.named_parameters(), strict=True
    ):
        assert key == other
        assert reordered_weight.is_contiguous()
        assert reordered_weight.grad is not None
        assert reordered_weight.grad.stride() == weight.grad.stride()  # type: ignore[union-attr]
        torch.testing.assert_close(reordered_weight.grad, weight.grad, rtol=1e-10, atol=1e-12)
    assert "ChannelsLastConv2d" in repr(reordered)


def backpropagated(model: LayeredModel, images: Tensor) -> Tensor:
    output = model(images)
    assert isinstance(output, Tensor)
    (output * torch.arange(output.numel()).view_as(output).sin()).sum().backward()
    return output.detach()


@pytest.mark.parametrize(
    ("precision", "device_type", "gains"),
    [
        ("bfloat16", "cuda", True),
        ("float16", "cuda", True),
        ("float32", "cuda", False),  # no tensor cores: TF32 is off
        ("bfloat16", "cpu", False),  # faster for some networks, slower for others
    ],
)
def test_only_half_precision_on_gpus_is_reordered(precision: str, device_type: str, gains: bool) -> None:
    model = channels_last.apply(MODELS["unet"](), precision=precision, device_type=device_type)
    assert ("ChannelsLastConv2d" in repr(model)) is gains


def test_a_model_of_ones_own_may_view_its_outputs() -> None:
    """`view` fails in the other order, so only models that say so are reordered."""
    model = LayeredModel(stem=nn.Identity(), blocks=[nn.Conv2d(2, 4, 3)], head=nn.Flatten())
    channels_last.apply(model, precision="bfloat16", device_type="cuda")
    assert "ChannelsLast" not in repr(model)
