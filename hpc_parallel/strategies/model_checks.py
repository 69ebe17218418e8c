"""Whether a model has what the axes of a layout need. Nothing is split, and no process group is needed."""

from __future__ import annotations

from torch import nn

from hpc_parallel.config.layout import Layout
from hpc_parallel.config.schedules import stages_per_rank
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.problems import ConfigError, Problems
from hpc_parallel.strategies import cache, context, expert, stages, tensor_roles

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
TRAINS = ("train", "proof")


def find_problems(
    model: LayeredModel, *, config: RunConfig, layout: Layout, sample_shape: tuple[int, ...]
) -> Problems:
    """Returns why the whole `model`, on meta, can't be split as `layout` says or can't do the task."""
    if layout.pipeline > 1:
        count = layout.pipeline * stages_per_rank(config.strategy)
        yield from stages.find_problems(
            model, stages=count, sample_shape=sample_shape, options=config.strategy
        )
    if layout.context > 1:
        yield from context.find_problems(model, degree=layout.context, sample_shape=sample_shape)
    if layout.expert > 1:
        yield from expert.find_problems(model, degree=layout.expert)
    if layout.tensor > 1:
        yield from tensor_roles.find_problems(model, degree=layout.tensor, options=config.strategy)
    if config.task.name == "generate":
        yield from cache.find_problems(model)
    if config.devices > 1 and config.task.name in TRAINS and config.strategy.verify != "never":
        yield from _dropout(model)


def require(model: LayeredModel, *, config: RunConfig, layout: Layout, sample_shape: tuple[int, ...]) -> None:
    """Raises ConfigError with what `find_problems` returns."""
    problems = list(find_problems(model, config=config, layout=layout, sample_shape=sample_shape))
    if problems:
        raise ConfigError(problems)


def _dropout(model: LayeredModel) -> Problems:
    """The random numbers of a layer depend on which samples and layers a device has."""
    for name, module in model.named_modules():
        if isinstance(module, DROPOUTS) and module.p > 0:
            yield (
                f"{type(model).__name__}.{name} is {module}, which would draw other random numbers than on "
                "one device. Set its probability to 0, or strategy.verify=never."
            )
            return
