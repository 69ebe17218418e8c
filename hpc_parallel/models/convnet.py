"""The reference convnets: Conv-BatchNorm-ReLU-MaxPool blocks, with a head for the image or for each pixel."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpc_parallel.models.drawn_weights import by_rows
from hpc_parallel.models.layered import LayeredModel, PartFlops


class ImageModel(LayeredModel):
    """The base class of the reference image models: the loss and the initial weights."""

    channels_last = True
    label_count: int
    """The number of logits of an image or a pixel."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy in nats, summed over images [batch] or pixels [batch, height, width]."""
        logits = output if output.dtype == torch.float64 else output.float()
        return F.cross_entropy(logits, target.long(), reduction="sum")

    def metrics(self, output: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        """The share of images or pixels with the right label."""
        return {"accuracy": (output.argmax(1) == target).sum()}

    @by_rows
    def initialise(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Matrices and kernels are normal with variance 2 / fan-in (He et al. 2015)."""
        if name == "stem.middle":
            tensor.fill_(127.5)
        elif tensor.dim() > 1:
            tensor.normal_(std=math.sqrt(2 / tensor[0].numel()), generator=generator)
        else:
            super().initialise(name, tensor, generator)


class ConvNet(ImageModel):
    """Images uint8 [batch, channel, height, width] -> logits [batch, classes].

    Block i halves height and width (rounded down) and has `channels[i]` output channels.

    Raises ValueError if `kernel_size` is even.
    """

    tensor_roles = MappingProxyType({"blocks.*": "alike", "head.output": "classes"})

    def __init__(
        self,
        *,
        channels: Sequence[int],
        classes: int,
        in_channels: int = 1,
        kernel_size: int = 3,
        head: nn.Module | None = None,
    ) -> None:
        """`head` replaces the classifier; it takes `channels[-1]` features at each position."""
        if kernel_size % 2 == 0:
            raise ValueError(f"model.kernel_size = {kernel_size} must be odd: an even kernel has no centre")
        widths = [in_channels, *channels]
        super().__init__(
            stem=Pixels(),
            blocks=(
                Block(before, after, kernel_size=kernel_size)
                for before, after in zip(widths, channels, strict=False)
            ),
            head=Classifier(channels[-1], classes=classes) if head is None else head,
        )
        self.in_channels, self.label_count = in_channels, classes

    def forward_flops(self, sample_shape: tuple[int, ...]) -> PartFlops:
        """2 FLOPs for each weight and each position where the model uses the weight.

        Norms and pooling do not count, as in torch's FLOP counter.
        """
        _, height, width = sample_shape
        blocks = []
        for block in self.blocks.values():
            blocks.append(2 * block.conv.weight.numel() * height * width)  # type: ignore[union-attr, operator]
            height, width = height // 2, width // 2
        positions = height * width if self.pixelwise else 1
        weights = [p.numel() for p in self.head.parameters() if p.dim() > 1] if self.head else []
        return PartFlops(stem=0, blocks=tuple(blocks), head=2 * positions * sum(weights))


class Segmenter(ConvNet):
    """Images uint8 [batch, channel, height, width] -> logits of each pixel [batch, classes, height, width].

    Height and width must be multiples of 2^blocks. Each output depends on a neighbourhood only, so tiles can
    split an image that is too large for one device.
    """

    pixelwise = True
    tensor_roles = MappingProxyType({})  # no layer is linear

    def __init__(self, *, channels: Sequence[int], classes: int, **options: int) -> None:
        head = PixelHead(channels[-1], classes=classes, factor=2 ** len(channels))
        super().__init__(channels=channels, classes=classes, head=head, **options)


class Pixels(nn.Module):
    """Convert bytes to numbers in [-1, 1], in the precision of the weights."""

    middle: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("middle", torch.tensor(127.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x / self.middle - 1


class Block(nn.Module):
    """MaxPool(ReLU(BatchNorm(Conv(x)))): [batch, before, h, w] -> [batch, after, h // 2, w // 2].

    The convolution has no bias: the norm would subtract the bias, whose gradient would be rounding noise.
    """

    def __init__(self, before: int, after: int, *, kernel_size: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, kernel_size, padding=kernel_size // 2, bias=False)
        self.norm = nn.BatchNorm2d(after)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(F.relu(self.norm(self.conv(x))))  # type: ignore[no-any-return]


class Classifier(nn.Module):
    """Mean over the image, then logits: [batch, width, h, w] -> [batch, classes]."""

    def __init__(self, width: int, *, classes: int) -> None:
        super().__init__()
        self.output = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(x.mean(dim=(2, 3)))  # type: ignore[no-any-return]


class PixelHead(nn.Module):
    """Logits of `factor`^2 pixels from each position (sub-pixel convolution, Shi et al. 2016)."""

    def __init__(self, width: int, *, classes: int, factor: int) -> None:
        super().__init__()
        self.output = nn.Conv2d(width, classes * factor * factor, 1)
        self.spread = nn.PixelShuffle(factor)

    def forward(self, x: Tensor) -> Tensor:
        return self.spread(self.output(x))  # type: ignore[no-any-return]
