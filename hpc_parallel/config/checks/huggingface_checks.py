"""Check `model=huggingface` without importing transformers, which takes seconds and loads torch.

The keys, aliases and tensor plan of a model type are read from the source of its configuration class.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpc_parallel.config.checks.suggestions import along_with_less_of
from hpc_parallel.config.layout import divisors, layout_of
from hpc_parallel.config.model_data_schema import HuggingFaceConfig
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.task_schema import GenerateConfig
from hpc_parallel.config.tasks import prompt_lengths
from hpc_parallel.problems import Problem, Problems, nearest, spell


@dataclass(frozen=True)
class Family:
    """The names of a model type's parts in its base model and its layers."""

    embedding: str = "embed_tokens"
    positions: str | None = None  # learned ones, added to the embedding
    layers: str = "layers"
    attention: str = "self_attn"
    norm: str = "norm"
    residual: str | None = None  # weights that write to the residual stream, if they start smaller
    columns: str = "intermediate_size"  # the key of the feed-forward width


# tests/unit/test_huggingface.py compares each of them with the library's model.
FAMILIES = {
    "gpt2": Family("wte", "wpe", "h", "attn", "ln_f", residual="c_proj.weight", columns="n_inner"),
    **{kind: Family() for kind in ("llama", "mistral", "olmo2", "qwen2", "qwen3", "starcoder2")},
}
# Keys that the adapter fixes, if a type has them: the value, and why it can't be another.
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
# Sizes without a default, each with a legal value. A type has defaults for the other sizes.
REQUIRED = {
    "vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 1,
    "max_position_embeddings": 1024,
}  # fmt: skip
SIZES = (*REQUIRED, "num_key_value_heads", "head_dim", "intermediate_size")


@dataclass(frozen=True)
class Source:
    """The content of a type's configuration class."""

    keys: frozenset[str]
    aliases: Mapping[str, str]  # common name -> the type's name; only the common one may be given
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


def find_problems(config: RunConfig) -> Problems:
    model = config.model
    if not isinstance(model, dict) or model.get("_target_") != HuggingFaceConfig._target_:
        return
    if find_spec("transformers") is None:
        yield "model = huggingface needs transformers, which is not installed (pip install transformers)."
        return
    given = model.get("config") or {}
    kind = given.get("model_type")
    if kind not in FAMILIES:
        near = nearest(str(kind), FAMILIES) or ["llama"]
        yield Problem("model.config.model_type", kind, f"is not one of {', '.join(FAMILIES)}", tuple(near))
        return
    try:
        source = read_source(kind)
    except LookupError as error:
        yield Problem("model.config.model_type", kind, f"can't be: {error}", ("llama",))
        return
    yield from _keys(given, kind=kind, source=source)
    yield from _sizes(config, given, kind=kind)
    yield from _plan(config, kind=kind, source=source)


def _keys(given: Mapping[str, Any], *, kind: str, source: Source) -> Problems:
    for key, value in given.items():
        if value is None or key == "model_type":
            continue
        if key not in source.names:
            common = [name for name, alias in source.aliases.items() if alias == key]
            near = common or nearest(key, source.names)
            rule = f"is not a key of {kind}'s configuration" + (
                f" (model.config.{near[0]} is)" if near else ""
            )
            yield _refused(key, value, rule, legal=None)
        elif key in FIXED and value != FIXED[key][0]:
            yield _refused(key, value, FIXED[key][1], legal=FIXED[key][0])


def _refused(key: str, value: Any, rule: str, *, legal: Any) -> str:
    """The suggestion has two pluses: they work whether or not the model's file has the key."""
    return f"model.config.{key} = {spell(value)} {rule}. Try ++model.config.{key}={spell(legal)}."


def _sizes(config: RunConfig, given: Mapping[str, Any], *, kind: str) -> Problems:
    wrong = False
    for key in SIZES:
        value = given.get(key)
        missing = value is None and key in REQUIRED
        if missing or (value is not None and (not isinstance(value, int) or value < 1)):
            wrong = True
            rule = "must be given" if missing else "must be a whole number of at least 1"
            yield Problem(f"model.config.{key}", value, rule, (REQUIRED.get(key),))
    if wrong:
        return
    width, heads = int(given["hidden_size"]), int(given["num_attention_heads"])
    kv_heads = given.get("num_key_value_heads") or heads
    if width % heads:
        near = sorted(divisors(width), key=lambda d: abs(d - heads))[:2]
        rule = f"does not divide model.config.hidden_size = {width}"
        yield Problem("model.config.num_attention_heads", heads, rule, tuple(sorted(near)))
    if heads % kv_heads:
        rule = f"does not divide model.config.num_attention_heads = {heads}"
        yield Problem("model.config.num_key_value_heads", kv_heads, rule, (heads,))
    if FAMILIES[kind].positions:
        yield from _positions(config, most=int(given["max_position_embeddings"]))


def _positions(config: RunConfig, *, most: int) -> Problems:
    """No sample and no text may be longer than the learned positions."""
    rule = f"is more than model.config.max_position_embeddings = {most}, the number of learned positions"
    length = config.data.get("sequence_length") if isinstance(config.data, dict) else None
    if isinstance(length, int) and length > most:
        yield Problem("data.sequence_length", length, rule, (most,))
    if isinstance(config.task, GenerateConfig):
        try:
            room = most + 1 - max(prompt_lengths(config))  # the model doesn't read the last token
        except (ValueError, OSError, KeyError, TypeError):  # task_checks reports it
            return
        if config.task.new_tokens > room:
            legal = (room,) if room > 0 else ()
            yield Problem("task.new_tokens", config.task.new_tokens, f"with its prompt {rule}", legal)


def _plan(config: RunConfig, *, kind: str, source: Source) -> Problems:
    try:
        layout = layout_of(config.strategy, devices=config.devices)
    except (ValueError, ZeroDivisionError):
        return
    if layout.tensor > 1 and not roles_in(source.plan):
        what = "a tensor plan that can't be followed here" if source.plan else "no tensor plan"
        along = along_with_less_of("tensor", config.strategy)
        rule = f"can't be used: transformers has {what} for {kind}"
        yield Problem("strategy.tensor", layout.tensor, rule, (1,), along)
