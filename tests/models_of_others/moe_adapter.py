"""Mixtral, cut into parts."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpc_parallel.models.adapter import Adapter
from tests.models_of_others.moe import Mixtral, MixtralArgs, TransformerBlock, rotations


class Block(nn.Module):
    def __init__(self, layer: TransformerBlock, args: MixtralArgs) -> None:
        super().__init__()
        self.layer, self.angles = layer, (args.head_dim, args.rope_theta)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, *rotations(torch.arange(x.shape[1], device=x.device), *self.angles))


class CutMixtral(Adapter):
    def __init__(self, **config: int) -> None:
        model = Mixtral(MixtralArgs(**config))
        blocks = [Block(layer, model.args) for layer in model.layers]
        head = nn.Sequential(model.norm, model.output)
        super().__init__(model, stem=model.tok_embeddings, blocks=blocks, head=head)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
