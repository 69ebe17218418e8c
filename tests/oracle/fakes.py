"""Private parts of torch with which one rank is assembled alone and without memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor


@contextmanager
def fake_world(rank: int, *, size: int) -> Iterator[None]:
    """A default process group of `size` ranks of which only this `rank` exists; collectives send nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def fake_tensors() -> AbstractContextManager[object]:
    """A context in which new tensors have shapes, types and storages, but no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def memory_key(tensor: Tensor) -> int:
    """A key that all tensors with the same memory share while one of them lives.

    Fake tensors have no address, so an address can't be the key.
    """
    key: int = tensor.untyped_storage()._cdata
    return key


@contextmanager
def replicas_in_buckets(size_bytes: int) -> Iterator[None]:
    """Let a DistributedDataParallel that is made inside have buckets of this size from the first step on.

    torch begins with one bucket for all gradients, in one piece of memory, and divides it in the second step.
    """
    assign = dist._compute_bucket_assignment_by_size

    def in_buckets(weights: list[Tensor], limits: list[int], *options: Any) -> Any:
        return assign(weights, [size_bytes], *options)

    with patch.object(dist, "_compute_bucket_assignment_by_size", in_buckets):
        yield
