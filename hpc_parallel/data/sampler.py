"""The samples of each step: a pure function of (seed, global sample index), without stored state.

The protocols `Samples` and `Data` are the interface for your own data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from hpc_parallel.data.legal_samples import LegalSamples

ROUNDS = 8
GOLDEN = 0x9E3779B97F4A7C15


class Samples(Protocol):
    """A population of samples, accessed by position."""

    def __len__(self) -> int: ...

    def batch(self, positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets of these samples, stacked along the first dim."""
        ...


@runtime_checkable
class RandomSamples(Protocol):
    """Samples that draw random numbers when they are read, such as augmented images."""

    def random_batch(
        self, positions: NDArray[np.int64], *, keys: NDArray[np.uint64]
    ) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets; each sample's random numbers depend on its key only."""
        ...


@runtime_checkable
class QuietSamples(Protocol):
    """Random samples that may turn out to draw nothing."""

    @property
    def draws(self) -> bool:
        """Whether samples drew random numbers when they were checked at the start."""
        ...

    def unseeded_batch(self, positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """As `batch`, without seeding the global generators."""
        ...

    def draws_at(self, positions: NDArray[np.int64]) -> bool:
        """Whether any of these samples draws from a global generator."""
        ...


class Data(Protocol):
    """The training and validation samples."""

    @property
    def train(self) -> Samples:
        """The samples to train on."""
        ...

    @property
    def validation(self) -> Samples:
        """The held-out samples."""
        ...

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one input, without the batch dim."""
        ...

    @property
    def digest(self) -> str:
        """Hash of the content. If it differs between ranks, they read different files."""
        ...


class Batch(NamedTuple):
    """One data replica's part of a global batch: inputs and targets [samples, ...]."""

    inputs: Tensor
    targets: Tensor
    indices: NDArray[np.int64]
    """The indices of the samples in the training: [samples]."""

    def pinned(self, device: torch.device) -> Batch:
        """The batch in pinned memory, from which a copy to `device` does not block."""
        return Batch(*pinned((self.inputs, self.targets), device), self.indices)


@dataclass(frozen=True, kw_only=True)
class Batches:
    """One data replica's part of each global batch; the same on all ranks of a replica.

    A global batch of B samples is M consecutive microbatches. Replica r of R has the r-th part of each
    microbatch. The m-th microbatches of all replicas together are therefore the m-th microbatch of a run on
    one device, and operations over a microbatch (BatchNorm) give the same result on any number of replicas.

    The parts have equal numbers of samples, or the numbers in `sizes`, one for each replica. Without a seed,
    samples keep their order. A rank that is not a replica (None) gets empty batches. Floating-point tensors
    are cast to `floating`, the dtype of the weights, if it is given. `legal`: what the model takes.
    """

    samples: Samples
    global_batch_size: int
    seed: int | None
    replica: int | None = 0
    replicas: int = 1
    microbatches: int = 1
    sizes: Sequence[int] | None = None
    floating: torch.dtype | None = None
    legal: LegalSamples | None = None

    def __post_init__(self) -> None:
        if self.global_batch_size % (self.replicas * self.microbatches):
            parts = f"{self.replicas} replicas x {self.microbatches} microbatches"
            raise ValueError(f"{self.global_batch_size} samples don't divide over {parts}")
        if self.sizes is not None and self._sizes_problem(self.sizes):
            raise ValueError(f"the parts {self.sizes} are not a microbatch of {self.replicas} replicas")

    def _sizes_problem(self, sizes: Sequence[int]) -> bool:
        wrong_sum = sum(sizes) * self.microbatches != self.global_batch_size
        return wrong_sum or len(sizes) != self.replicas or min(sizes) < 1

    @property
    def draws(self) -> bool:
        """Whether a read seeds the global generators. If so, no other thread may use them meanwhile."""
        return self.is_random and getattr(self.samples, "draws", True)

    @property
    def is_random(self) -> bool:
        """Whether samples may draw random numbers when they are read."""
        return self.seed is not None and isinstance(self.samples, RandomSamples)

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets of the 0-based `step`, as `read` does."""
        return self.read(step)[:2]

    def read(self, step: int, *, seeded: bool = True) -> Batch:
        """Returns this replica's samples of the 0-based `step`.

        Raises ConfigError for samples that are not `legal`.

        seeded: False leaves the global generators alone, for samples that do not draw (`draws`).
        """
        indices = self.indices(step)
        if self.replica is None:
            return Batch(torch.empty(0), torch.empty(0), indices)
        inputs, targets = self._read(indices, seeded=seeded)
        if self.legal is not None:
            self.legal.require(inputs, targets)
        return Batch(self._cast(inputs), self._cast(targets), indices)

    def positions(self, step: int) -> NDArray[np.int64]:
        """Returns the positions in the data of this replica's samples of `step`: [samples]."""
        return self._positions(self.indices(step))

    def counted(self, step: int, *, count: int) -> list[int]:
        """How many samples of each of this replica's microbatches are among the first `count` of all steps.

        A microbatch has them before its other samples, which only fill the last global batch.
        """
        counts: list[int] = (self.indices(step) < count).reshape(self.microbatches, -1).sum(1).tolist()
        return counts

    def _positions(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        population = len(self.samples)
        if self.seed is None:
            return indices % population
        return sample_order(indices, seed=self.seed, population=population)

    def _read(self, indices: NDArray[np.int64], *, seeded: bool) -> tuple[Tensor, Tensor]:
        positions = self._positions(indices)
        if not self.is_random:
            return self.samples.batch(positions)
        if not seeded and isinstance(self.samples, QuietSamples):
            return self.samples.unseeded_batch(positions)
        unsigned = indices.astype(np.uint64)
        keys = _mix(_mix(np.full_like(unsigned, self.seed)) + unsigned * np.uint64(GOLDEN))
        return cast(RandomSamples, self.samples).random_batch(positions, keys=keys)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.floating) if self.floating and tensor.is_floating_point() else tensor

    def indices(self, step: int) -> NDArray[np.int64]:
        """This replica's samples of the 0-based `step`, by their indices in the whole training."""
        if self.replica is None:
            return np.empty(0, dtype=np.int64)
        microbatch = self.global_batch_size // self.microbatches
        size = microbatch // self.replicas
        before = self.replica * size
        if self.sizes is not None:
            size, before = self.sizes[self.replica], sum(self.sizes[: self.replica])
        offset = step * self.global_batch_size + before
        starts = offset + microbatch * np.arange(self.microbatches, dtype=np.int64)
        return (starts[:, None] + np.arange(size)).ravel()


def to_device(batch: tuple[Tensor, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Copy inputs and targets to `device` without blocking the host."""
    inputs, targets = pinned(batch, device)
    return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)


def pinned(batch: tuple[Tensor, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the batch in pinned memory, from which copies to a GPU do not block; on a CPU, returns `batch`.

    A tensor that is already pinned is not copied.
    """
    if device.type != "cuda":
        return batch
    torch.cuda.set_device(device)  # a new thread has GPU 0, and pinning would open a context there
    return batch[0].pin_memory(), batch[1].pin_memory()


def sample_order(
    indices: Sequence[int] | NDArray[np.integer[Any]], *, seed: int, population: int
) -> NDArray[np.int64]:
    """Returns the position in [0, population) of each global sample index.

    Epoch e = index // population shuffles by a keyed bijection: a Feistel network on two digits of base
    ceil(sqrt(population)), applied again until its result is in the range (Black & Rogaway 2002, "Ciphers
    with Arbitrary Finite Domains", generalised Feistel and cycle walking). Each epoch has every sample
    exactly once, in its own order, and any index costs O(1).

    Raises ValueError for an empty population or a negative index.
    """
    indices = np.asarray(indices, dtype=np.int64)
    if population < 1 or (indices < 0).any():
        raise ValueError(
            f"sample indices must not be negative, and a population of {population} must have samples"
        )
    epochs, offsets = (part.astype(np.uint64) for part in np.divmod(indices, population))
    base = np.uint64(math.isqrt(population - 1) + 1)
    keys = _mix(_mix(np.full_like(epochs, seed)) + epochs * np.uint64(GOLDEN))
    positions = _permute(offsets, keys=keys, base=base)
    while (outside := positions >= np.uint64(population)).any():
        positions[outside] = _permute(positions[outside], keys=keys[outside], base=base)
    return positions.astype(np.int64)


def _permute(values: NDArray[np.uint64], *, keys: NDArray[np.uint64], base: np.uint64) -> NDArray[np.uint64]:
    """A bijection of [0, base^2): each round adds a hash of one digit to the other."""
    left, right = np.divmod(values, base)
    for round_index in range(1, ROUNDS + 1):
        noise = _mix((keys + np.uint64(round_index * GOLDEN % 2**64)) ^ _mix(right))
        left, right = right, (left + noise % base) % base
    return left * base + right


def _mix(values: ArrayLike) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea & Flood 2014); arithmetic is modulo 2^64."""
    x = np.asarray(values, dtype=np.uint64) + np.uint64(GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
