"""A causal language model of the transformers library, built from its configuration.

Nothing is downloaded: the library's layers become stem, blocks and head. The library's model computes
positions and the causal mask once, around the layers. Here each attention gets them from `CausalAttention`,
so techniques can change position indices and where keys and values come from.
https://huggingface.co/docs/transformers/attention_interface
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_utils import AttentionInterface

from hpc_parallel.config.huggingface_source import FAMILIES, FIXED, read_source, roles_in
from hpc_parallel.models.attention import CausalAttention, PositionTables
from hpc_parallel.models.drawn_weights import by_rows
from hpc_parallel.models.language import LanguageHead, LanguageModel
from hpc_parallel.problems import ConfigError

INTERFACE = "hpc_parallel"


class HuggingFaceModel(LanguageModel):
    """The library's model without dropout and attention windows. Its norms are exact in float64.

    Raises ConfigError for a configuration that the library rejects.
    """

    def __init__(self, *, config: Mapping[str, Any]) -> None:
        """`config` has `model_type` and keys of that type's configuration; null means the default."""
        settings = configuration(config)
        family = FAMILIES[settings.model_type]
        library_model = AutoModelForCausalLM.from_config(settings, attn_implementation=INTERFACE)
        use_exact_norms(library_model)
        base = library_model.base_model
        layers = getattr(base, family.layers)
        tables: PositionTables[Any] = PositionTables()
        for layer in layers:
            attention = getattr(layer, family.attention)
            compute_own_positions(attention, rotary=rotation(base, settings), tables=tables)
            add_mixin(layer, TakesDocuments)
        stem = getattr(base, family.embedding)
        if family.positions is not None:
            stem = PositionedEmbedding(stem, getattr(base, family.positions))
        super().__init__(
            stem=stem,
            blocks=layers,
            head=Head(getattr(base, family.norm), library_model.get_output_embeddings()),
        )
        self.settings = settings
        self.family = family
        self.label_count = settings.vocab_size
        self.attention_width = settings.num_attention_heads * head_dim(settings)
        self.tensor_roles = self._roles()
        tokens = "stem" if family.positions is None else "stem.tokens"
        prefix = library_model.base_model_prefix
        self.library_prefixes = {
            tokens: f"{prefix}.{family.embedding}",
            "stem.positions": f"{prefix}.{family.positions}",
            "blocks": f"{prefix}.{family.layers}",
            "head.norm": f"{prefix}.{family.norm}",
            "head.logits": "lm_head",
        }
        if settings.tie_word_embeddings:
            self.tied = {"head.logits.weight": f"{tokens}.weight"}

    @by_rows
    def initialise(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Initialise as the library does: normal with std `initializer_range`, norms one, biases zero.

        GPT-2 scales the std of projections into the residual stream by 1/sqrt(2 layers).
        """
        std = self.settings.initializer_range
        if self.family.residual is not None and name.endswith(self.family.residual):
            std /= math.sqrt(2 * self.settings.num_hidden_layers)
        if tensor.dim() > 1:
            tensor.normal_(std=std, generator=generator)
        else:
            super().initialise(name, tensor, generator)

    def library_name(self, name: str) -> str:
        """The name of the parameter `name` in the library's state dict.

        Only the prefixes of stem, blocks and head differ. Shapes are equal.
        """
        part = re.match("|".join(sorted(self.library_prefixes, key=len, reverse=True)), name)
        assert part is not None, name
        return self.library_prefixes[part[0]] + name[part.end() :]

    def _roles(self) -> dict[str, str]:
        """The library's tensor parallel plan, plus norms, embedding and logits, which it leaves out."""
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


class PositionedEmbedding(nn.Module):
    """The embedding of a token plus the embedding of its position."""

    def __init__(self, tokens: nn.Module, positions: nn.Module) -> None:
        super().__init__()
        self.tokens = tokens
        self.positions = positions

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.tokens(x) + self.positions(positions)  # type: ignore[no-any-return]


class Head(LanguageHead):
    """The last norm and the projection to logits."""

    projection = "logits"

    def __init__(self, norm: nn.Module, logits: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.logits = logits


class OwnPositions(nn.Module):
    """A mixin for attention classes: the module takes only its input and gets positions from `mix`.

    The module computes positions inside any wrapper of a technique, because its input has all positions only
    there. The input is a positional argument, because techniques expect this.
    """

    mix: CausalAttention
    rotary: nn.Module | None
    tables: PositionTables[Any]

    def __call__(self, hidden_states: Tensor, *_: Any, attention_mask: Any = None, **__: Any) -> Any:
        return super().__call__(hidden_states, **documents_in(attention_mask))

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Any:
        embeddings = {}
        if self.rotary is not None:
            key = self.mix.positions.key(x.shape[1])
            key = None if key is None else (key, x.dtype)
            embeddings = {
                "position_embeddings": self.tables(key, partial(self._rotation, x), device=x.device)
            }
        return super().forward(x, attention_mask=documents, **embeddings)

    def _rotation(self, x: Tensor) -> Any:
        assert self.rotary is not None
        return self.rotary(x, self.mix.positions(x.shape[1], device=x.device)[None])


class TakesDocuments(nn.Module):
    """A mixin for the library's layers, which hand a mask on to their attention."""

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Any:
        return super().forward(x, attention_mask=documents)


def documents_in(mask: Tensor | None) -> dict[str, Tensor]:
    """The argument of packed documents, if there are any: wrappers of techniques expect no other one."""
    return {} if mask is None else {"documents": mask}


def add_mixin(module: nn.Module, mixin: type) -> None:
    """Add `mixin` to the class of `module`, in place.

    Its parameters keep their names, because no module wraps it. fully_shard changes classes the same way.
    """
    kind = type(module)
    module.__class__ = type(kind.__name__, (mixin, kind), {})


def use_exact_norms(model: nn.Module) -> None:
    """Replace the library's RMSNorm by torch's, which does not round float64 to float32.

    The rounding turns a difference in the last bit between two layouts into 1e-7.
    """
    for module in list(model.modules()):
        for name, norm in list(module.named_children()):
            if type(norm).__name__.endswith("RMSNorm"):
                exact = nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon)  # type: ignore[arg-type]
                setattr(module, name, exact)


def compute_own_positions(
    attention: nn.Module, *, rotary: nn.Module | None, tables: PositionTables[Any]
) -> None:
    """Let `attention` take its positions and its mask from a `CausalAttention`."""
    add_mixin(attention, OwnPositions)
    attention.mix = CausalAttention()
    attention.rotary = rotary  # type: ignore[assignment]
    attention.tables = tables  # type: ignore[assignment]


def rotation(base: nn.Module, settings: PreTrainedConfig) -> nn.Module | None:
    """A new rotary embedding like the one of `base`; None if positions are learnt."""
    if not hasattr(base, "rotary_emb"):
        return None
    with torch.device("cpu"):  # the constructor computes tables, which would stay empty on meta
        rotary: nn.Module = type(base.rotary_emb)(settings)  # type: ignore[assignment]
    return rotary


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """The library's attention function: [batch, head, seq, head_dim] -> [batch, seq, head, head_dim]."""
    default = query.shape[-1] ** -0.5
    if scaling != default:
        query = query * (scaling / default)
    # Under autocast, rotation returns float32 queries and keys; all three must share a dtype.
    parts = query.to(value.dtype), key.to(value.dtype), value
    mixed = module.mix(*parts, **documents_in(mask))  # type: ignore[operator]
    return mixed.transpose(1, 2), None


AttentionInterface.register(INTERFACE, attend)


def configuration(config: Mapping[str, Any]) -> PreTrainedConfig:
    """Build the library's configuration; options that are not supported here get their `FIXED` values.

    Raises ConfigError if the library rejects it.
    """
    settings = {key: value for key, value in config.items() if value is not None}
    kind = settings.pop("model_type")
    source = read_source(kind)
    if "num_key_value_heads" in source.keys:
        settings.setdefault("num_key_value_heads", settings["num_attention_heads"])
    settings |= {key: value for key, (value, _) in FIXED.items() if key in source.keys}
    # A default may be beyond the vocabulary.
    settings = {"bos_token_id": None, "eos_token_id": None} | settings
    try:
        return AutoConfig.for_model(kind, **{source.aliases.get(key, key): v for key, v in settings.items()})
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ConfigError([f"model.config: transformers rejects it: {error}"]) from error


def head_dim(settings: PreTrainedConfig) -> int:
    chosen: int | None = getattr(settings, "head_dim", None)
    return chosen or settings.hidden_size // settings.num_attention_heads
