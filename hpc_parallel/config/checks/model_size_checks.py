"""Check the class of the model, the sizes of ours and Hugging Face's, and the weights that it starts from."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from hpc_parallel.config.checks.key_checks import sizes_are_legal
from hpc_parallel.config.checks.suggestions import near, without_axis
from hpc_parallel.config.class_paths import target_problems
from hpc_parallel.config.huggingface_source import FAMILIES, FIXED, Source, read_source, roles_in
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.task_schema import GenerateConfig
from hpc_parallel.config.tasks import prompt_lengths
from hpc_parallel.layout.counts import class_path, sequence_length
from hpc_parallel.layout.layout import divisors, legal_layout
from hpc_parallel.layout.model_data_schema import CellsDataConfig, DigitsDataConfig
from hpc_parallel.problems import Problem, Problems, as_override, nearest, spell

CLASSES = {DigitsDataConfig._target_: 10, CellsDataConfig._target_: 2}
# Sizes without a default, each with a legal value. A model type has defaults for the other sizes.
REQUIRED = {
    "vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 1,
    "max_position_embeddings": 1024,
}  # fmt: skip
SIZES = (*REQUIRED, "num_key_value_heads", "head_dim", "intermediate_size")


def class_problems(config: RunConfig) -> Problems:
    if not isinstance(config.model, dict) or not config.model.get("_target_"):
        yield "model._target_ is missing: name the class of your model. Try model=tiny."
        return
    yield from target_problems("model._target_", config.model["_target_"])


def decoder_problems(config: RunConfig) -> Problems:
    """The heads of a reference decoder."""
    dim, heads, kv_heads = (config.model[name] for name in ("dim", "heads", "kv_heads"))
    if min(dim, heads, kv_heads) < 1:
        return
    width = config.model.get("head_dim")
    if width is not None and (not isinstance(width, int) or width % 2):
        rule = "must be an even number (rotary positions rotate pairs)"
        yield Problem("model.head_dim", width, rule, (width + width % 2,) if isinstance(width, int) else ())
    elif width is None and (dim % heads or (dim // heads) % 2):
        even = [d for d in divisors(dim) if (dim // d) % 2 == 0]
        legal, along = near(heads, (d for d in even if d % kv_heads == 0)), list[str]()
        if even and not legal:
            legal = (min(even, key=lambda number: abs(number - heads)),)
            along.append(f"model.kv_heads={max(d for d in divisors(legal[0]) if d <= kv_heads)}")
        rule = f"does not split model.dim = {dim} into heads of an even width (rotary positions rotate pairs)"
        yield Problem("model.heads", heads, rule, legal, tuple(along))
    elif heads % kv_heads:
        rule = f"does not divide model.heads = {heads}: each key-value head serves the same number of heads"
        yield Problem("model.kv_heads", kv_heads, rule, near(kv_heads, divisors(heads)))


def convnet_problems(config: RunConfig) -> Problems:
    """A convnet needs odd kernels. For our images, it needs one input channel and enough classes."""
    if not sizes_are_legal(config):
        return
    model, kernel_size = config.model, config.model["kernel_size"]
    if kernel_size % 2 == 0:
        rule = "must be odd, or each block would shift the image"
        yield Problem("model.kernel_size", kernel_size, rule, (kernel_size - 1, kernel_size + 1))
    least = CLASSES.get(class_path(config.data) or "")
    if least is None:
        return
    if model["in_channels"] != 1:
        yield Problem("model.in_channels", model["in_channels"], "does not fit grey images", (1,))
    if model["classes"] < least:
        yield Problem("model.classes", model["classes"], f"is less than the {least} of the data", (least,))


def huggingface_problems(config: RunConfig) -> Problems:
    """Check by the source of the library (`config/huggingface_source.py`)."""
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
    yield from _huggingface_keys(given, kind=kind, source=source)
    yield from _huggingface_sizes(config, given, kind=kind)
    yield from _huggingface_plan(config, kind=kind, source=source)


def _huggingface_keys(given: Mapping[str, Any], *, kind: str, source: Source) -> Problems:
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
    return f"model.config.{key} = {spell(value)} {rule}. Try {as_override(f'++model.config.{key}', legal)}."


def _huggingface_sizes(config: RunConfig, given: Mapping[str, Any], *, kind: str) -> Problems:
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


def _huggingface_plan(config: RunConfig, *, kind: str, source: Source) -> Problems:
    layout = legal_layout(config.strategy, devices=config.devices)
    if layout is not None and layout.tensor > 1 and not roles_in(source.plan):
        what = "a tensor plan that can't be followed here" if source.plan else "no tensor plan"
        rule = f"can't be used: transformers has {what} for {kind}"
        yield without_axis("tensor", rule, config=config, layout=layout)
