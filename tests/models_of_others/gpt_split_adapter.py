"""GPT, cut with an attention whose sequence and heads can be split, and which can continue a text."""

from torch import Tensor, nn

from hpc_parallel.models.adapter import Adapter
from hpc_parallel.models.attention import CausalAttention
from hpc_parallel.models.layered import Column
from tests.models_of_others.gpt import GPT, CausalSelfAttention, GPTConfig
from tests.models_of_others.gpt_adapter import CutGPT, Stem


class Attention(nn.Module):
    """The original's projections around `CausalAttention`."""

    def __init__(self, original: CausalSelfAttention) -> None:
        super().__init__()
        self.c_attn, self.c_proj, self.drop = original.c_attn, original.c_proj, original.resid_dropout
        self.head_dim = original.n_embd // original.n_head
        self.mix = CausalAttention()

    def forward(self, x: Tensor) -> Tensor:
        heads = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in self.c_attn(x).chunk(3, dim=-1)
        )
        return self.drop(self.c_proj(self.mix(*heads).transpose(1, 2).flatten(2)))


class SplitGPT(CutGPT):
    def __init__(self, **config: int) -> None:
        gpt = GPT(GPTConfig(**config))
        for block in gpt.transformer.h:
            block.attn = Attention(block.attn)
        head = nn.Sequential(gpt.transformer.ln_f, gpt.lm_head)
        Adapter.__init__(self, gpt, stem=Stem(gpt.transformer), blocks=gpt.transformer.h, head=head)
        self.tensor_roles = {
            "stem.wte": "vocabulary",
            "stem.wpe": "position_table",
            "blocks.*.ln_1": "position",
            "blocks.*.attn": "whole",
            "blocks.*.attn.c_attn": Column(parts=3),
            "blocks.*.attn.c_proj": "row",
            "blocks.*.ln_2": "position",
            "blocks.*.mlp": "whole",
            "blocks.*.mlp.c_fc": "column",
            "blocks.*.mlp.c_proj": "row",
            "head.0": "position",
            "head.1": "logits",
        }

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"error": (output.argmax(-1) != target).sum()}
