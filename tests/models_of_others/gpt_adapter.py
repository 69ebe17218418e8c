"""GPT, cut into parts: enough for every strategy that leaves a sequence and a layer whole."""

from torch import Tensor, nn
from torch.nn import functional as F

from hpc_parallel.models.adapter import Adapter
from tests.models_of_others.gpt import GPT, GPTConfig


class Stem(nn.Module):
    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = parts.wte, parts.wpe, parts.drop

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.drop(self.wte(tokens) + self.wpe(positions))


class CutGPT(Adapter):
    def __init__(self, **config: int) -> None:
        gpt = GPT(GPTConfig(**config))
        head = nn.Sequential(gpt.transformer.ln_f, gpt.lm_head)
        super().__init__(gpt, stem=Stem(gpt.transformer), blocks=gpt.transformer.h, head=head)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
