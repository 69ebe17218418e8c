"""What a training step casts and computes in chunks: the trainer does it, and the planner counts it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_parallel.layout.layout import DATAPARALLEL, Layout
from hpc_parallel.layout.schedules import schedule_of

if TYPE_CHECKING:
    from hpc_parallel.config.schema import RunConfig

HALF = ("bfloat16", "float16")


def packs(config: RunConfig) -> bool:
    """Whether samples are packed documents (`data/packing.py`)."""
    return bool(config.data.get("packing"))


def number_bytes(config: RunConfig) -> int:
    """Bytes of one number of the weights, their gradients and the loss."""
    return 8 if config.training.precision == "float64" else 4


def product_bytes(config: RunConfig) -> int:
    """Bytes of one number in matrix products, and of the weights that fully_shard gathers for them."""
    return 2 if config.training.precision in HALF else number_bytes(config)


@dataclass(frozen=True)
class Types:
    """Bytes of a number: in matrix products, in norms and the loss (precise), between blocks (stream).

    cast: weights are cast once a step or gathered in the type of the products. If false, autocast casts them.
    """

    product: int
    precise: int
    stream: int
    cast: bool


def types_of(config: RunConfig, layout: Layout) -> Types:
    """The types that `strategies/precision.py`, `working_weights.py` and `shard.py` choose."""
    precise, product = number_bytes(config), product_bytes(config)
    cast = product == precise or layout.by_fully_shard or casts_once(config)
    return Types(product, precise, product if cast else precise, cast)


def casts_once(config: RunConfig) -> bool:
    """Whether `strategies/working_weights.py` casts the weights of a step once. Not for fully_shard.

    fully_shard casts weights itself. A schedule that splits the backward pass does not use cast weights,
    because it computes gradients of the weights that a module holds. nn.DataParallel does not use them
    either, because its replicas hold their own weights.
    """
    strategy = config.strategy
    outside = strategy.execution == DATAPARALLEL or schedule_of(strategy).splits_backward
    return config.training.precision == "bfloat16" and not outside


def chunks_loss(config: RunConfig, *, tensor: int) -> bool:
    """Whether the loss of a model of ours is computed in chunks. tensor: the degree of the tensor axis.

    It can't be if the task chooses tokens. It can't with nn.DataParallel either, because its replicas return
    logits.
    """
    outside = config.task.name == "generate" or config.strategy.execution == DATAPARALLEL
    whole = tensor == 1 or config.strategy.loss_parallel
    return config.training.chunked_loss and not outside and whole
