"""Check `model=huggingface` by the source of the library (`config/huggingface_source.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from hpc_parallel.config.checks.suggestions import near, without_axis
from hpc_parallel.config.huggingface_source import FAMILIES, FIXED, Source, read_source, roles_in
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.task_schema import GenerateConfig
from hpc_parallel.config.tasks import prompt_lengths
from hpc_parallel.layout.counts import sequence_length
from hpc_parallel.layout.layout import divisors, legal_layout
from hpc_parallel.problems import Problem, Problems, nearest, spell

# Sizes without a default, each with a legal value. A model type has defaults for the other sizes.
REQUIRED = {
    "vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 1,
    "max_position_embeddings": 1024,
}  # fmt: skip
SIZES = (*REQUIRED, "num_key_value_heads", "head_dim", "intermediate_size")


def find_problems(config: RunConfig) -> Problems:
    if find_spec("transformers") is None:
        yield "model = huggingface needs transformers, which is not installed (pip install transformers)."
        return
    given = config.model.get("config") or {}
    kind = given.get("model_type")
    if kind not in FAMILIES:
        legal = nearest(str(kind), FAMILIES) or ["llama"]
        yield Problem("model.config.model_type", kind, f"is not one of {', '.join(FAMILIES)}", tuple(legal))
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
            meant = common or nearest(key, source.names)
            rule = f"is not a key of {kind}'s configuration"
            rule += f" (model.config.{meant[0]} is)" if meant else ""
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
        rule = f"does not divide model.config.hidden_size = {width}"
        yield Problem("model.config.num_attention_heads", heads, rule, near(heads, divisors(width)))
    if heads % kv_heads:
        rule = f"does not divide model.config.num_attention_heads = {heads}"
        yield Problem("model.config.num_key_value_heads", kv_heads, rule, (heads,))
    if FAMILIES[kind].positions:
        yield from _positions(config, most=int(given["max_position_embeddings"]))


def _positions(config: RunConfig, *, most: int) -> Problems:
    """No sample and no text may be longer than the learned positions."""
    rule = f"is more than model.config.max_position_embeddings = {most}, the number of learned positions"
    length = sequence_length(config)
    if length is not None and length > most:
        yield Problem("data.sequence_length", length, rule, (most,))
    if isinstance(config.task, GenerateConfig):
        try:
            room = most + 1 - max(prompt_lengths(config))  # the model doesn't read the last token
        except (ValueError, OSError, KeyError, TypeError):  # task_checks reports the error
            return
        if config.task.new_tokens > room:
            legal = (room,) if room > 0 else ()
            yield Problem("task.new_tokens", config.task.new_tokens, f"with its prompt {rule}", legal)


def _plan(config: RunConfig, *, kind: str, source: Source) -> Problems:
    layout = legal_layout(config.strategy, devices=config.devices)
    if layout is not None and layout.tensor > 1 and not roles_in(source.plan):
        what = "a tensor plan that can't be followed here" if source.plan else "no tensor plan"
        rule = f"can't be used: transformers has {what} for {kind}"
        yield without_axis("tensor", rule, config=config, layout=layout)
