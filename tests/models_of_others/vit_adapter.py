"""SimpleViT, cut into parts."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpc_parallel.models.adapter import Adapter
from tests.models_of_others.vit import SimpleViT


class Stem(nn.Sequential):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.to(self[2].weight.dtype) / 255) + self.positions


class Block(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = x + layer(x)
        return x


class Head(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[1](self[0](x).mean(dim=1))


class CutViT(Adapter):
    def __init__(self, **config: int) -> None:
        vit = SimpleViT(**config)
        stem, head = Stem(*vit.to_patch_embedding), Head(vit.transformer.norm, vit.linear_head)
        with torch.device("cpu"):  # the model is built without memory, on meta
            stem.register_buffer("positions", vit.positions(), persistent=False)
        super().__init__(vit, stem=stem, blocks=(Block(*pair) for pair in vit.transformer.layers), head=head)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="sum")
