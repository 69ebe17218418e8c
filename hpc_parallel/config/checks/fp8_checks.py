"""Check that products in float8 can be combined with the rest: what is not proven is refused."""

from __future__ import annotations

from typing import Any

from hpc_parallel.config.checks.image_checks import is_convnet
from hpc_parallel.config.checks.suggestions import along_with_less_of
from hpc_parallel.config.layout import SPMD, Layout, layout_of
from hpc_parallel.config.model_data_schema import MoeTransformerConfig
from hpc_parallel.config.schedules import schedule_of
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.problems import Problem, Problems

OFF = "off"
APART = ("expert", "context", "tensor", "tile")


def find_problems(config: RunConfig) -> Problems:
    recipe = config.training.fp8
    if recipe == OFF:
        return
    if config.training.precision != "bfloat16":
        rule = f"can't be combined with training.fp8 = {recipe}, whose other products are in bfloat16"
        yield Problem("training.precision", config.training.precision, rule, ("bfloat16",))
    try:
        layout = layout_of(config.strategy, devices=config.devices)
    except (ValueError, ZeroDivisionError):  # layout_checks reports it
        layout = Layout()
    yield from (Problem("training.fp8", recipe, rule, (OFF,)) for rule in _rules(config))
    for axis in APART:
        if (degree := layout.degrees[axis]) > 1:
            rule = f"can't be combined with training.fp8 = {recipe}: that is not proven"
            yield Problem(f"strategy.{axis}", degree, rule, (1,), along_with_less_of(axis, config.strategy))
    if layout.pipeline > 1 and schedule_of(config.strategy).splits_backward:
        rule = f"can't be combined with training.fp8 = {recipe}, whose backward pass is one operation"
        yield Problem("strategy.schedule", config.strategy.schedule, rule, ("1f1b",))
    if config.training.activation_checkpointing == "selective":
        rule = f"keeps no product of training.fp8 = {recipe}"
        yield Problem("training.activation_checkpointing", "selective", rule, ("full", "none"))


def _rules(config: RunConfig) -> list[str]:
    """What the model, the execution or the task does not allow."""
    model: dict[str, Any] = config.model if isinstance(config.model, dict) else {}
    rules = []
    if is_convnet(model):
        rules.append("multiplies in linear layers inside blocks, and this model has convolutions")
    if model.get("_target_") == MoeTransformerConfig._target_:
        rules.append("is not proven for a mixture of experts")
    if config.strategy.execution != SPMD:
        rules.append(f"can't be combined with strategy.execution = {config.strategy.execution}")
    if config.task.name == "generate":
        rules.append("can't be used with task=generate, which decodes one token at a time")
    return rules
