"""A causal language model of the library transformers, built from its configuration and trained as any other.

Nothing is fetched: the library gives the layers, which are handed on as stem, blocks and head. What its own
model does around the layers (positions, the causal mask) each attention does for itself here, by asking
`CausalAttention`; so techniques can change where positions are and where keys and values come from.
https://huggingface.co/docs/transformers/attention_interface
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_utils import AttentionInterface

from hpc_parallel.config.checks.huggingface_checks import FAMILIES, FIXED, read_source, roles_in
from hpc_parallel.models.attention import CausalAttention
from hpc_parallel.models.language import LanguageModel
from hpc_parallel.problems import ConfigError

INTERFACE = "hpc_parallel"


class HuggingFaceModel(LanguageModel):
    """Equals the library's own model without dropout and attention windows; its norms are exact in float64.

    Raises ConfigError for a configuration that the library refuses.
    """

    def __init__(self, *, config: Mapping[str, Any]) -> None:
        """`config`: `model_type` and keys of that type's configuration; null is as good as left out."""
        settings = configuration(config)
        family = FAMILIES[settings.model_type]
        whole = AutoModelForCausalLM.from_config(settings, attn_implementation=INTERFACE)
        norm_exactly(whole)
        base = whole.base_model
        layers = getattr(base, family.layers)
        for layer in layers:
            own_its_positions(getattr(layer, family.attention), rotary=rotation(base, settings))
        stem = getattr(base, family.embedding)
        if family.positions is not None:
            stem = Placed(stem, getattr(base, family.positions))
        super().__init__(
            stem=stem, blocks=layers, head=Head(getattr(base, family.norm), whole.get_output_embeddings())
        )
        self.settings = settings
        self.family = family
        self.attention_width = settings.num_attention_heads * head_dim(settings)
        self.tensor_roles = self._roles()
        tokens = "stem" if family.positions is None else "stem.tokens"
        self.places = {
            tokens: f"{whole.base_model_prefix}.{family.embedding}",
            "stem.positions": f"{whole.base_model_prefix}.{family.positions}",
            "blocks": f"{whole.base_model_prefix}.{family.layers}",
            "head.norm": f"{whole.base_model_prefix}.{family.norm}",
            "head.logits": "lm_head",
        }
        if settings.tie_word_embeddings:
            self.tied = {"head.logits.weight": f"{tokens}.weight"}

    def initialise(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """As the library does: normal of its `initializer_range`, in GPT-2 scaled by 1/sqrt(2 layers)
        where a weight writes into the residual stream; norms one, biases zero."""
        spread = self.settings.initializer_range
        if self.family.residual is not None and name.endswith(self.family.residual):
            spread /= math.sqrt(2 * self.settings.num_hidden_layers)
        if tensor.dim() > 1:
            tensor.normal_(std=spread, generator=generator)
        else:
            super().initialise(name, tensor, generator)

    def library_name(self, name: str) -> str:
        """What the library's state dict calls the parameter `name`: stem, blocks, head become its parts.

        Within a block the names are the library's own, and so are the shapes of all.
        """
        part = re.match("|".join(sorted(self.places, key=len, reverse=True)), name)
        assert part is not None, name
        return self.places[part[0]] + name[part.end() :]

    def _roles(self) -> dict[str, str]:
        """The library's tensor plan, and what it leaves whole: norms, embedding and logits."""
        planned = roles_in(self.settings.base_model_tp_plan or {})
        if not planned:
            return {}
        norms = [
            f"blocks.*.{name}"
            for name, module in self.blocks["0"].named_children()
            if next(module.children(), None) is None and next(module.parameters(), None) is not None
        ]
        ends = {"stem": "vocabulary", "head.norm": "position", "head.logits": "logits"}
        return {**planned, **dict.fromkeys(norms, "position"), **ends}


class Placed(nn.Module):
    """The embedding of a token plus that of its position."""

    def __init__(self, tokens: nn.Module, positions: nn.Module) -> None:
        super().__init__()
        self.tokens = tokens
        self.positions = positions
        self.mix = CausalAttention()  # asked where the positions are

    def forward(self, x: Tensor) -> Tensor:
        where = self.mix.positions(x.shape[1], device=x.device)
        return self.tokens(x) + self.positions(where)  # type: ignore[no-any-return]


class Head(nn.Module):
    """The last norm and the projection to logits."""

    def __init__(self, norm: nn.Module, logits: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.logits = logits

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))  # type: ignore[no-any-return]


class OwnPositions(nn.Module):
    """Put before a class of attention: asks `mix` for its positions, and takes nothing but its input.

    Positions are asked for inside of what a technique wraps round an attention, as only there the input
    is of all of them; and the input is handed on by place, where techniques look for it.
    """

    mix: CausalAttention
    rotary: nn.Module | None

    def __call__(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        return super().__call__(hidden_states)

    def forward(self, x: Tensor) -> Any:
        turned = {}
        if self.rotary is not None:
            where = self.mix.positions(x.shape[1], device=x.device)
            turned = {"position_embeddings": self.rotary(x, where[None])}
        return super().forward(x, attention_mask=None, **turned)


def norm_exactly(model: nn.Module) -> None:
    """Put torch's RMSNorm in the place of the library's, which is the same but rounds float64 to float32:
    a last bit that two layouts differ in would grow to 1e-7 there."""
    for module in list(model.modules()):
        for name, norm in list(module.named_children()):
            if type(norm).__name__.endswith("RMSNorm"):
                exact = nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon)  # type: ignore[arg-type]
                setattr(module, name, exact)


def own_its_positions(attention: nn.Module, *, rotary: nn.Module | None) -> None:
    """Make `attention` one with `OwnPositions`, in place.

    Its parameters keep their names, as no module is put round it (fully_shard changes classes so, too).
    """
    kind = type(attention)
    attention.__class__ = type(kind.__name__, (OwnPositions, kind), {})
    attention.mix = CausalAttention()
    attention.rotary = rotary  # type: ignore[assignment]


def rotation(base: nn.Module, settings: PreTrainedConfig) -> nn.Module | None:
    """Another module of the kind that turns queries and keys in `base`; None where positions are learnt."""
    if not hasattr(base, "rotary_emb"):
        return None
    with torch.device("cpu"):  # its tables are computed here and now: on meta they would stay empty
        another: nn.Module = type(base.rotary_emb)(settings)  # type: ignore[assignment]
    return another


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, *, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """What the library calls for attention: [batch, head, seq, head_dim] -> [batch, seq, head, head_dim]."""
    usual = query.shape[-1] ** -0.5
    if scaling != usual:
        query = query * (scaling / usual)
    # Rotation leaves autocast's precision, which all three must share.
    mixed = module.mix(query.to(value.dtype), key.to(value.dtype), value)  # type: ignore[operator]
    return mixed.transpose(1, 2), None


AttentionInterface.register(INTERFACE, attend)


def configuration(config: Mapping[str, Any]) -> PreTrainedConfig:
    """The library's own, without what it has no place for here (`FIXED`). Raises ConfigError."""
    given = {key: value for key, value in config.items() if value is not None}
    kind = given.pop("model_type")
    source = read_source(kind)
    if "num_key_value_heads" in source.keys:
        given.setdefault("num_key_value_heads", given["num_attention_heads"])
    given |= {key: value for key, (value, _) in FIXED.items() if key in source.keys}
    given = {"bos_token_id": None, "eos_token_id": None} | given  # a default may be beyond the vocabulary
    try:
        return AutoConfig.for_model(kind, **{source.aliases.get(key, key): v for key, v in given.items()})
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ConfigError([f"model.config: transformers refuses it: {error}"]) from error


def head_dim(settings: PreTrainedConfig) -> int:
    chosen: int | None = getattr(settings, "head_dim", None)
    return chosen or settings.hidden_size // settings.num_attention_heads
