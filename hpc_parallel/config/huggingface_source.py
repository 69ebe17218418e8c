"""The keys, aliases and tensor plan of a model type of transformers, read from its source code.

The library is not imported, because an import takes seconds and loads torch.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Family:
    """The names of a model type's parts in its base model and its layers."""

    embedding: str = "embed_tokens"
    positions: str | None = None  # learned positions, added to the embedding
    layers: str = "layers"
    attention: str = "self_attn"
    norm: str = "norm"
    residual: str | None = None  # weights into the residual stream, if their initial values are smaller
    columns: str = "intermediate_size"  # the key of the feed-forward width


# tests/unit/test_huggingface.py compares each family with the library's model.
FAMILIES = {
    "gpt2": Family("wte", "wpe", "h", "attn", "ln_f", residual="c_proj.weight", columns="n_inner"),
    **{kind: Family() for kind in ("llama", "mistral", "olmo2", "qwen2", "qwen3", "starcoder2")},
}
# Keys that may have only one value, if a model type has them: the value, and the reason.
DROPOUT = 0.0, "must be 0: the dropped values would depend on the layout"
WINDOW = "can't set a window: each position attends to all positions before it"
FIXED: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("attention_dropout", "residual_dropout", "embedding_dropout"), DROPOUT),
    **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), DROPOUT),
    "sliding_window": (None, WINDOW),
    "use_sliding_window": (False, WINDOW),
    "layer_types": (None, WINDOW),
    "add_cross_attention": (False, "has no other sequence to attend to in a language model"),
    "reorder_and_upcast_attn": (False, "can't be used: attention is torch's own"),
    "pad_token_id": (None, "can't be set: no token is padding"),
}
# The library's names in tensor plans -> the names in `LayeredModel.tensor_roles`.
STYLES = {"colwise": "column", "rowwise": "row", "replicated_with_grad_allreduce": "heads"}


@dataclass(frozen=True)
class Source:
    """The content of a type's configuration class."""

    keys: frozenset[str]
    aliases: Mapping[str, str]  # common name -> the type's name; users may give only the common name
    plan: Mapping[str, str]  # module of the base model -> how the library splits it

    @property
    def names(self) -> frozenset[str]:
        """The keys by their common names."""
        return (self.keys | set(self.aliases)) - set(self.aliases.values())


@cache
def read_source(kind: str) -> Source:
    """Read the source of a model type. Raises LookupError if the installed library doesn't have it."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        raise LookupError("transformers is not installed")
    file = Path(spec.origin).parent / "models" / kind / f"configuration_{kind}.py"
    if not file.exists():
        raise LookupError(f"transformers has no {kind}")
    values: dict[str, Any] = {}
    keys: set[str] = set()
    for definition in ast.parse(file.read_bytes()).body:
        for line in definition.body if isinstance(definition, ast.ClassDef) else ():
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                keys.add(line.target.id)
            elif isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
                values[line.targets[0].id] = line.value
    aliases, plan = (
        ast.literal_eval(values[name]) if name in values else {}
        for name in ("attribute_map", "base_model_tp_plan")
    )
    if (columns := FAMILIES[kind].columns) != Family.columns:
        aliases[Family.columns] = columns
    return Source(keys=frozenset(keys), aliases=aliases, plan=plan)


def roles_in(plan: Mapping[str, str]) -> dict[str, str]:
    """Convert a plan to `LayeredModel.tensor_roles`; empty if there is no plan or a style has no role."""
    roles: dict[str, str] = {}
    for pattern, style in plan.items():
        if style not in STYLES:
            return {}
        name = pattern.replace("layers.", "blocks.", 1)
        roles[name] = STYLES[style]
        if roles[name] == "column":
            roles[name.rpartition(".")[0]] = "whole"
    return roles
