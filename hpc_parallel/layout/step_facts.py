"""What a training step casts and computes in chunks: the trainer does it, and the planner counts it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_parallel.layout.layout import DATAPARALLEL, Layout
from hpc_parallel.layout.schedules import schedule_of, too_old
from hpc_parallel.problems import Problem

if TYPE_CHECKING:
    from hpc_parallel.config.schema import RunConfig

# Steps before those of `training.measure_steps`. Two are for warm-up, because a validation follows the first
# step and a pipeline then infers its shapes again. One counts bytes.
UNMEASURED = 3
OF_NVIDIA = ("nsys", "ncu")  # profile.kind
OFF, BY_ROWS = "off", "rowwise"  # training.fp8
EXPERTS_BY_ROWS = (
    "has one scale for the tokens of a device's microbatch, but an expert multiplies tokens of several "
    "devices at once"
)
ALIGNED = 16  # cuBLAS needs every size of a product in float8 to be a multiple of it
MULTIPLES = f"multiples of {ALIGNED}"
HALF = ("bfloat16", "float16")
BFLOAT16 = "bfloat16"
UPDATED_AT_ONCE = {"cpu": 2**18, "cuda": 2**24}
"""The most numbers of a weight that are widened at the same time for an update that is rounded afterwards."""

MEMORY_STEPS = 2  # in `training.memory_checkpoint_every`: one is complete while the next one is written


def memory_copies(config: RunConfig) -> int:
    """How often the memory of a host holds the state of one rank: own copies, and those of a partner."""
    return MEMORY_STEPS * min(2, config.nodes)


def measured_steps(config: RunConfig) -> int:
    """`training.measure_steps`; 0 with Nsight, because CUPTI serves only one profiler in a process."""
    return 0 if config.profile.kind in OF_NVIDIA else config.training.measure_steps


def is_cut(size: int, degree: int) -> bool:
    """Whether one device multiplies a size in float8, and its parts on `degree` devices are too small."""
    return size % ALIGNED == 0 and size % (degree * ALIGNED) != 0


def selective_problem() -> Problem | None:
    """Before torch 2.12, a block that overwrites a kept result could not be noticed."""
    rule = too_old((2, 12))
    key, legal = "training.activation_checkpointing", ("full", "none")
    return None if rule is None else Problem(key, "selective", rule, legal)


def packs(config: RunConfig) -> bool:
    """Whether samples are packed documents (`data/packing.py`)."""
    return bool(config.data.get("packing"))


def number_bytes(config: RunConfig) -> int:
    """Bytes of one number of the loss, of sums of gradients, and of weights that are not rounded."""
    return 8 if config.training.precision == "float64" else 4


def weight_bytes(config: RunConfig) -> int:
    """Bytes of one number of the weights and of their gradients between passes."""
    rounded = config.training.weights == BFLOAT16 and config.training.precision != "float64"
    return 2 if rounded else number_bytes(config)


def state_bytes(config: RunConfig) -> int:
    """Bytes of one number of the optimizer's state."""
    return 2 if config.optimizer.state == BFLOAT16 else number_bytes(config)


def rounded_parts(config: RunConfig) -> str | None:
    """What a training keeps in bfloat16, for people; None if it keeps nothing in bfloat16."""
    parts = {"weights": config.training.weights, "optimizer state": config.optimizer.state}
    return " and ".join(name for name, kept in parts.items() if kept == BFLOAT16) or None


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
    cast = product in (precise, weight_bytes(config)) or layout.by_fully_shard or casts_once(config)
    return Types(product, precise, product if cast else precise, cast)


def casts_once(config: RunConfig) -> bool:
    """Whether `strategies/working_weights.py` casts the weights of a step once. Not for fully_shard.

    fully_shard casts weights itself. A schedule that splits the backward pass does not use cast weights,
    because it computes gradients of the weights that a module holds. Weights that are kept in bfloat16 need
    no cast. nn.DataParallel does not use them
    either, because its replicas hold their own weights.
    """
    strategy = config.strategy
    outside = strategy.execution == DATAPARALLEL or schedule_of(strategy).splits_backward
    return config.training.precision == BFLOAT16 != config.training.weights and not outside


def chunks_loss(config: RunConfig, *, tensor: int) -> bool:
    """Whether the loss of a model of ours is computed in chunks. tensor: the degree of the tensor axis.

    It can't be if the task chooses tokens. It can't with nn.DataParallel either, because its replicas return
    logits.
    """
    outside = config.task.name == "generate" or config.strategy.execution == DATAPARALLEL
    whole = tensor == 1 or config.strategy.loss_parallel
    return config.training.chunked_loss and not outside and whole
