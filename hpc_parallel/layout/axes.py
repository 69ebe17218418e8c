"""What every axis of the device mesh declares about itself. The other modules read these declarations.

An axis splits the model, the batch, or single samples over its ranks. To add an axis, add its key here, its
degree in `Layout`, its entries in `holdings.py` (what ranks keep) and `exchanges.py` (what they send), and,
if sizes must fit, a check in `checks/axis_checks.py` (`SIZE_CHECKS`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

from hpc_parallel.rules import RULE, Rule


class Splits(Enum):
    """What the ranks of an axis divide among them."""

    MODEL = "model"  # They work on the same samples, each with a part of the model.
    BATCH = "batch"  # Each has its own samples.
    SAMPLES = "samples"  # Each has a part of every sample.


@dataclass(frozen=True)
class Conflict:
    """A setting that can't be combined with an axis.

    key, value: the setting. reason: a clause. legal: values to suggest.
    """

    key: str
    value: Any
    reason: str
    legal: tuple[Any, ...]


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh.

    averaged: its ranks hold the same weights, so they average their gradients.
    reads: `text` or `images` if it can split only these.
    apart: axes that can't be combined with it, each with the reason.
    conflicts: other settings that can't be combined with it.
    name: the name of the axis's key.
    """

    splits: Splits
    averaged: bool = False
    reads: str | None = None
    apart: Mapping[str, str] = field(default_factory=dict)
    conflicts: tuple[Conflict, ...] = ()
    name: str = ""


MISSING = "???"  # omegaconf's value for a key that must be set; failure/ imports no omegaconf
_IMAGES_ONLY = "it splits sequences, and tiles split images"
_NOT_PROVEN = "this combination is not proven"

DEGREE = Rule(
    lambda degree: degree >= 1 or degree == -1, "must be at least 1, or -1 for what is left", legal=(1, -1)
)


def _degree(axis: Axis) -> Any:
    """The key of an axis, whose degree is 1 unless it is set."""
    return field(default=1, metadata={RULE: DEGREE, "axis": axis})


@dataclass
class DegreesConfig:
    """The degree of each axis, outermost first, with what the axis declares."""

    name: str = MISSING  # The name of the strategy, as reports show it.
    # The number of pipeline stages on different devices.
    pipeline: int = _degree(Axis(Splits.MODEL))
    # The number of replicas that average their gradients (DistributedDataParallel).
    replicate: int = _degree(Axis(Splits.BATCH, averaged=True))
    # The number of devices that share each weight with its gradient and state (fully_shard).
    shard: int = _degree(Axis(Splits.BATCH))
    # The number of devices that share the experts of each block.
    expert: int = _degree(
        Axis(
            Splits.BATCH,
            averaged=True,  # except the experts
            apart={"tile": _NOT_PROVEN},
            conflicts=(
                Conflict(
                    "strategy.gradient_compression", "bfloat16",
                    "DistributedDataParallel does not average the experts", ("none",),
                ),
            ),
        )
    )  # fmt: skip
    # The number of devices that share each sequence.
    context: int = _degree(
        Axis(
            Splits.SAMPLES,
            averaged=True,
            reads="text",
        )
    )
    # The number of devices that share each layer.
    tensor: int = _degree(Axis(Splits.MODEL))
    # The number of devices that share each image.
    tile: int = _degree(
        Axis(
            Splits.SAMPLES,
            averaged=True,
            reads="images",
            apart={"shard": _NOT_PROVEN, "context": _IMAGES_ONLY, "tensor": _NOT_PROVEN},
            conflicts=(Conflict("training.compile", True, "a block receives halos while it runs", (False,)),),
        )
    )


DECLARED = tuple(
    replace(item.metadata["axis"], name=item.name)
    for item in fields(DegreesConfig)
    if "axis" in item.metadata
)
AXES = tuple(axis.name for axis in DECLARED)
BATCH_AXES = tuple(axis.name for axis in DECLARED if axis.splits is Splits.BATCH)
SAMPLE_AXES = tuple(axis.name for axis in DECLARED if axis.splits is Splits.SAMPLES)
AVERAGED_AXES = tuple(axis.name for axis in DECLARED if axis.averaged)


def with_all_axes(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Add degree 1 for axes that did not exist when a run was recorded."""
    return {**dict.fromkeys(AXES, 1), **recorded}
