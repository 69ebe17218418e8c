"""Draws the weights of a model on the CPU, so that every kind of device starts from the same numbers.

The numbers of CUDA's generator depend on the number of multiprocessors of the GPU, so replicas on unequal
GPUs would differ. A large weight is drawn in blocks of rows, each from a generator of its own: a rank draws
only the blocks that its slice needs, and all its cores draw at the same time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

BLOCK = 2**20  # elements; another number here gives other weights for the same seed
_BY_ROWS = "draws_by_rows"
Initialise = TypeVar("Initialise", bound=Callable[..., None])


def by_rows(initialise: Initialise) -> Initialise:
    """Marks an `initialise` that may be called with some rows of a tensor, each time with another generator.

    The numbers of a row must not depend on other rows, as in draws from a normal distribution; an orthogonal
    matrix has to be drawn as a whole. An override without this mark always gets the whole tensor.
    """
    setattr(initialise, _BY_ROWS, True)
    return initialise


def tensor_seed(seed: int, name: str) -> int:
    """64 bits that depend on (seed, name) only; Python's `hash` differs between processes."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big")


@dataclass(frozen=True)
class Drawing:
    """The draw of one tensor, which depends only on (seed, name)."""

    initialise: Callable[[str, Tensor, torch.Generator], None]
    name: str
    seed: int

    def rows(self, first: int, count: int, *, like: Tensor) -> Tensor:
        """Draw rows in float32, so all precisions start from the same numbers; integers keep their type."""
        dtype = torch.float32 if like.is_floating_point() else like.dtype
        values = torch.empty((count, *like.shape[1:]) if like.dim() else (), dtype=dtype)
        name = f"{self.name}:{first}" if first else self.name
        # 63 bits: a user may seed a CUDA generator with the seed of this generator, and CUDA takes no more.
        self.initialise(self.name, values, torch.Generator().manual_seed(tensor_seed(self.seed, name) >> 1))
        return values

    def block_rows(self, like: Tensor) -> int:
        """The number of rows that are drawn at once."""
        if like.dim() == 0 or not getattr(self.initialise, _BY_ROWS, False):
            return max(1, like.shape[0] if like.dim() else 1)
        return max(1, BLOCK // max(1, like.shape[1:].numel()))


def draw(drawing: Drawing, *, like: Tensor, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """Returns a tensor on `device`, placed as `like`; this rank draws and keeps its slice of the tensor."""
    dtype = dtype if like.is_floating_point() else like.dtype
    step, total = drawing.block_rows(like), like.shape[0] if like.dim() else 1
    if step >= total:
        values = drawing.rows(0, total, like=like)
        if not isinstance(like, DTensor):
            return values.to(device, dtype)
        return placed(cut(values, like=like).to(device, dtype, copy=True), like=like)

    kept = kept_rows(like)
    local = torch.empty(local_of(like).shape, dtype=dtype, device=device)

    def block(first: int) -> Tensor:
        values = drawing.rows(first, min(step, total - first), like=like)
        values = values[max(0, kept.start - first) : kept.stop - first]
        return (
            cut(values, like=like, dims=range(1, like.dim())) if isinstance(like, DTensor) else values
        ).to(dtype)

    row = 0
    for values in in_parallel(block, range(kept.start // step * step, kept.stop, step)):
        local[row : row + len(values)] = values
        row += len(values)
    return placed(local, like=like) if isinstance(like, DTensor) else local


def in_parallel(work: Callable[[int], Tensor], firsts: Iterable[int]) -> Iterator[Tensor]:
    """The results of `work` in order. At most one result for each core of this rank exists at a time.

    The caller copies them to the device: a new thread would use the first GPU of the node.
    """
    remaining, threads = iter(firsts), torch.get_num_threads()
    with ThreadPoolExecutor(threads) as pool:
        while group := list(islice(remaining, threads)):
            yield from pool.map(work, group)


def kept_rows(like: Tensor) -> range:
    """The rows that this rank holds in full or in part."""
    if not isinstance(like, DTensor):
        return range(like.shape[0])
    rows = cut(torch.arange(like.shape[0]), like=like, dims=(0,))
    return range(int(rows[0]), int(rows[-1]) + 1) if len(rows) else range(0)


def cut(full: Tensor, *, like: DTensor, dims: Sequence[int] | None = None) -> Tensor:
    """Returns this rank's slice of `full`, as a view. `dims`: the only dims to cut.

    Inner mesh axes cut first: if two axes cut the same dim, fully_shard slices the part that tensor
    parallelism has cut.
    """
    mesh, part = like.device_mesh, full
    for axis in reversed(range(mesh.ndim)):
        placement = like.placements[axis]
        if placement.is_replicate():
            continue
        dim: int = placement.dim  # type: ignore[attr-defined]  # of Shard and of a private class of torch
        if dims is None or dim in dims:
            chunks = part.chunk(mesh.size(axis), dim=dim)
            rank = mesh.get_local_rank(axis)
            part = chunks[rank] if rank < len(chunks) else part.narrow(dim, 0, 0)
    return part


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a distributed tensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_slice(full: Tensor, *, like: DTensor) -> DTensor:
    """Returns this rank's slice of `full`, placed as `like`, without communication."""
    return placed(cut(full, like=like).clone(), like=like)


def placed(local: Tensor, *, like: DTensor) -> DTensor:
    """The distributed tensor whose part on this rank is `local`."""
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
