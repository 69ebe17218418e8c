"""Whether a model has what the axes of a layout need. Nothing is split, and no process group is needed."""

from __future__ import annotations

import torch
from torch import nn

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.data.legal_samples import LegalSamples
from hpc_parallel.layout.layout import Layout
from hpc_parallel.layout.schedules import stages_per_rank
from hpc_parallel.layout.step_facts import packs
from hpc_parallel.models.convnet import Pixels
from hpc_parallel.models.language import LanguageModel
from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.models.plain import PlainModel
from hpc_parallel.problems import ConfigError, Problem, Problems
from hpc_parallel.strategies import cache, expert, float8, packed_documents, stages
from hpc_parallel.strategies.context import split_sequence
from hpc_parallel.strategies.dropout import dropout_shapes
from hpc_parallel.strategies.tensor import tensor_roles

PACKAGE = "hpc_parallel."
TRAINS = ("train", "proof")
NEEDS = {  # an axis that can't split a plain module -> what it needs
    "pipeline": "a LayeredModel, with a stem, blocks and a head",
    "context": "a LayeredModel, with positions mixed in CausalAttention or FullAttention only",
    "tensor": "a LayeredModel, with roles for its layers",
    "tile": "a LayeredModel, with a stem, blocks and a head",
    "expert": "a LayeredModel, with its experts in Experts",
}


class DifferenceError(ConfigError):
    """The layout computes other results than one device."""


def is_own(config: RunConfig) -> bool:
    return not config.model["_target_"].startswith(PACKAGE)


def is_compared(config: RunConfig) -> bool:
    """Whether results of the model of `config` are compared, on the model's weights of the run too."""
    mode = config.strategy.verify
    return mode == "always" or (is_own(config) and mode != "never")


def find_problems(
    model: LayeredModel,
    *,
    config: RunConfig,
    layout: Layout,
    sample_shape: tuple[int, ...] | None,
    dtype: torch.dtype | None = None,
) -> Problems:
    """Returns why the whole `model`, on meta, can't be split as `layout` says or can't do the task.

    `sample_shape`: None if only the job knows the data. The job then checks what depends on the shape.
    `dtype`: of the samples, if it is known.
    """
    yield from _sparse(model)
    if layout.by_fully_shard:
        yield from (
            f"{type(model).__name__}.{name} has no elements, and fully_shard can't reduce its gradient. "
            "Leave it out, or try strategy=data."
            for name, weight in model.named_parameters() if weight.requires_grad and not weight.numel()
        )  # fmt: skip
    yield from float8.find_problems(
        model, recipe=config.training.fp8, layout=layout, sample_shape=sample_shape
    )
    if packs(config):
        yield from packed_documents.find_problems(model)
    if isinstance(model, PlainModel) and (uncut := [axis for axis in NEEDS if layout.degrees[axis] > 1]):
        yield from (_uncut(model, axis, degree=layout.degrees[axis]) for axis in uncut)
        return
    if layout.pipeline > 1:
        count = layout.pipeline * stages_per_rank(config.strategy)
        yield from stages.find_problems(
            model, stages=count, sample_shape=sample_shape, options=config.strategy
        )
    if layout.context > 1:
        yield from split_sequence.find_problems(model, degree=layout.context, sample_shape=sample_shape)
    if layout.expert > 1:
        yield from expert.find_problems(model, layout=layout)
    if layout.tensor > 1:
        yield from tensor_roles.find_problems(model, degree=layout.tensor, options=config.strategy)
        if sample_shape is not None:
            yield from tensor_roles.find_fused_dropouts(
                model, degree=layout.tensor, sample_shape=sample_shape
            )
    if config.task.name == "generate":
        yield from cache.find_problems(model)
    verified = is_own(config) and config.strategy.verify != "never"
    if sample_shape is not None and config.devices > 1 and config.task.name in TRAINS and verified:
        yield from dropout_shapes.find_problems(model, sample_shape=sample_shape, dtype=dtype)


def legal_samples(model: LayeredModel, *, trains: bool) -> LegalSamples:
    """The samples that `model` takes. One with parts of the user's own may take any.

    trains: whether the loss is to be learnt from these samples.
    """
    own = [kind for kind in type(model).__mro__ if not kind.__module__.startswith((PACKAGE, "torch."))]
    if any({"__init__", "forward", "loss"} & vars(kind).keys() for kind in own if kind is not object):
        return LegalSamples(model.ignore_index)
    is_text = isinstance(model, LanguageModel)
    classes = getattr(model, "label_count", None)
    return LegalSamples(
        model.ignore_index, classes, tokens=classes if is_text else None, each_token=is_text,
        predicts=is_text and trains, pixels=isinstance(model.stem, Pixels),
    )  # fmt: skip


def _sparse(model: LayeredModel) -> Problems:
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            yield (
                f"{type(model).__name__}.{name} is {type(module).__name__} with sparse=True: clipping, the "
                "optimizers and the layouts need dense gradients. Try sparse=False."
            )


def _uncut(model: PlainModel, axis: str, *, degree: int) -> Problem:
    rule = (
        f"can't be used: {type(model).__name__} is a plain torch.nn.Module, and strategy.{axis} needs "
        f"{NEEDS[axis]} (docs/own-model.md). strategy=data, fsdp, hsdp and parameter_server take it as it is"
    )
    return Problem(f"strategy.{axis}", degree, rule, (1,))
