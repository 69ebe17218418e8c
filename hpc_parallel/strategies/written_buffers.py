"""Finds the buffers that a forward pass writes. A recomputation in backward would read the new values."""

from __future__ import annotations

from collections.abc import Mapping

from torch.nn import Module

from hpc_parallel.models.layered import STATISTICS
from hpc_parallel.torch_internals import version_of

TECHNIQUES = ("FSDP", "Compiled", "Checkpointed")


def versions_of(block: Module) -> dict[str, int]:
    """The versions of the buffers of `block`, by name."""
    return {name: version_of(buffer) for name, buffer in block.named_buffers()}


def written_since(block: Module, versions: Mapping[str, int]) -> str | None:
    """Returns a clause about the first buffer that was written since `versions` was taken, or None.

    The statistics of BatchNorm are left out: a training pass writes them and does not read them.
    """
    for name, version in versions_of(block).items():
        if version != versions.get(name, version) and not name.endswith(STATISTICS):
            return f"the forward pass of {_class_of(block)} writes the buffer {name}"
    return None


def _class_of(block: Module) -> str:
    """The name of the user's class. Techniques derive classes from it, with a prefix in their names."""
    return next(kind.__name__ for kind in type(block).__mro__ if not kind.__name__.startswith(TECHNIQUES))
