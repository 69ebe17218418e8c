"""Packed documents: which models can train on them, and what such a model is told (`data/packing.py`)."""

from __future__ import annotations

import inspect

from torch.nn import Module

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.data.packing import IGNORED
from hpc_parallel.layout.step_facts import packs
from hpc_parallel.models.attention import CausalAttention, FullAttention
from hpc_parallel.models.auxiliary_loss import auxiliary_losses
from hpc_parallel.models.language import LanguageModel
from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.problems import Problem, Problems


def apply(model: LayeredModel, *, config: RunConfig) -> LayeredModel:
    """Let the whole `model` take the packed samples of `config`, if they are packed; returns it."""
    if packs(config):
        model.packed_samples = True
        if model.ignore_index is None and type(model).loss is LanguageModel.loss:
            model.ignore_index = IGNORED
    return model


def _takes_documents(block: Module) -> bool:
    """Whether the last positional parameter of the forward pass is `documents`."""
    parameters = inspect.signature(block.forward).parameters.values()
    names = [item.name for item in parameters if item.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    return names[-1:] == ["documents"]


def find_problems(model: LayeredModel) -> Problems:
    """Returns why the whole `model` can't train on packed documents."""
    name, modules = type(model).__name__, list(model.modules())
    blind = [type(block).__name__ for block in model.blocks.values() if not _takes_documents(block)]
    rule = ""
    if blind:
        rule = (
            f"the forward pass of {blind[0]}, a block of {name}, does not end with a parameter `documents`, "
            "so its attention would see other documents of the sample (docs/own-model.md)"
        )
    elif any(isinstance(module, FullAttention) for module in modules):
        rule = f"{name} has FullAttention, and only causal attention keeps documents apart"
    elif not any(isinstance(module, CausalAttention) for module in modules):
        rule = f"{name} has no CausalAttention, which keeps documents apart"
    elif auxiliary_losses([model]):
        rule = f"{name} adds a loss of whole samples (AuxiliaryLoss), which would mix documents and padding"
    elif model.ignore_index != IGNORED:
        rule = f"{name} has a loss of its own and not ignore_index = {IGNORED}, the target without a document"
    if rule:
        yield Problem("data.packing", True, f"can't be used: {rule}", (False,))
