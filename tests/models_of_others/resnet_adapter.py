"""ResNet, cut into parts."""

from torch import Tensor, nn
from torch.nn import functional as F

from hpc_parallel.models.adapter import Adapter
from tests.models_of_others.resnet import ResNet


class Stem(nn.Sequential):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.to(self[0].weight.dtype) / 255)


class CutResNet(Adapter):
    def __init__(self, **config: int) -> None:
        net = ResNet(**config)
        layers = [*net.layer1, *net.layer2, *net.layer3, *net.layer4]
        stem = Stem(net.conv1, net.bn1, net.relu, net.maxpool)
        super().__init__(net, stem=stem, blocks=layers, head=nn.Sequential(net.avgpool, nn.Flatten(), net.fc))
        self.tensor_roles = {"stem": "alike", "blocks.*": "alike", "head.2": "classes"}

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="sum")
