"""U-Net, cut into parts that hand on their skip connections."""

from torch import Tensor, nn
from torch.nn import functional as F

from hpc_parallel.models.adapter import Adapter
from tests.models_of_others.unet import UNet


class Part(nn.Module):
    def __init__(self, layer: nn.Module, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = layer, kind

    def forward(self, x: Tensor, *skips: Tensor) -> tuple[Tensor, ...]:
        if self.kind == "first":
            return (self.layer(x.to(self.layer.double_conv[0].weight.dtype) / 255),)
        return (self.layer(x), *skips, x) if self.kind == "down" else (self.layer(x, skips[-1]), *skips[:-1])


class CutUNet(Adapter):
    pixelwise = True

    def __init__(self, **sizes: int) -> None:
        net = UNet(**sizes)
        blocks = [*(Part(layer, "down") for layer in net.down), *(Part(layer, "up") for layer in net.up)]
        super().__init__(net, stem=Part(net.inc, "first"), blocks=blocks, head=net.outc)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target.long(), reduction="sum")
