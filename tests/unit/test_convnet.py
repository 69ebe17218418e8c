"""The reference convnets: shapes, counts, that they learn, and that channels_last changes no number."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from hpc_parallel.models.convnet import ConvNet, Segmenter
from hpc_parallel.models.layered import LayeredModel, materialise
from hpc_parallel.models.unet import UNet
from hpc_parallel.strategies import channels_last


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
