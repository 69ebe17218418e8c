"""Check the class of the model, and the sizes of our models."""

from __future__ import annotations

from hpc_parallel.config.checks.key_checks import sizes_are_legal
from hpc_parallel.config.checks.suggestions import near
from hpc_parallel.config.class_paths import target_problems
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.layout.counts import class_path
from hpc_parallel.layout.layout import divisors
from hpc_parallel.layout.model_data_schema import CellsDataConfig, DigitsDataConfig
from hpc_parallel.problems import Problem, Problems

CLASSES = {DigitsDataConfig._target_: 10, CellsDataConfig._target_: 2}


def class_problems(config: RunConfig) -> Problems:
    """The class of the model must exist."""
    if not isinstance(config.model, dict) or not config.model.get("_target_"):
        yield "model._target_ is missing: name the class of your model. Try model=tiny."
        return
    yield from target_problems("model._target_", config.model["_target_"])


def decoder_problems(config: RunConfig) -> Problems:
    """The heads of a reference decoder."""
    dim, heads, kv_heads = (config.model[name] for name in ("dim", "heads", "kv_heads"))
    if min(dim, heads, kv_heads) < 1:
        return
    if dim % heads or (dim // heads) % 2:
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
