"""Your own samples: any map-style dataset, an object with `__len__` and `__getitem__`.

    class Squares:
        def __len__(self): return 1000
        def __getitem__(self, index): return torch.tensor([float(index)]), torch.tensor([float(index**2)])

`__getitem__` returns (input, target), each a tensor, an array or a number. The datasets of torch and
torchvision are such objects.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpc_parallel.data.generators import generator_states, restored, seed_all
from hpc_parallel.data.packing import Packed, packed_data
from hpc_parallel.data.sampler import Data, Samples, sample_order
from hpc_parallel.problems import ConfigError, Problem, spell
from hpc_parallel.user_code import UserCodeError, described, hint

SPLIT_SEED = 0x5EED  # the seed that chooses the held-out samples, the same for every run
CHECKED = 4  # samples of each part that are read twice at the start
NARROW = (torch.uint8, torch.int8, torch.int16)  # torch has no embedding for them
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
UNSUITED = (torch.uint16, torch.uint32, torch.uint64)  # torch has no embedding and no sums for them


class Dataset(Protocol):
    """A map-style dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any:
        """Returns the input and the target of one sample."""
        ...


@dataclass(frozen=True, kw_only=True)
class DatasetSamples:
    """`count` samples from `first` on, in the order of `dataset` or of a fixed shuffle of it."""

    dataset: Dataset
    name: str  # "training" or "validation", for messages
    first: int
    count: int
    shuffled: bool
    vocab_size: int | None = None
    draws: bool = True  # whether samples drew random numbers at the start; True if not known

    def __len__(self) -> int:
        return self.count

    def batch(self, positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets, stacked along the first dim."""
        return self.random_batch(positions, keys=np.asarray(positions, dtype=np.uint64))

    def random_batch(
        self, positions: NDArray[np.int64], *, keys: NDArray[np.uint64]
    ) -> tuple[Tensor, Tensor]:
        """As `batch`; the random numbers that `__getitem__` draws depend on the sample's key only.

        This holds for the global generators of torch (on the CPU), numpy and Python. Their states are
        restored afterwards.

        Raises ConfigError with the index of the sample that can't be read or has another shape.
        """
        indices = self.indices(positions)
        samples = []
        with restored():
            for index, key in zip(indices, keys.tolist(), strict=True):
                seed_all(int(key))
                samples.append(self._read(index))
        return self._stacked(indices, samples)

    def unseeded_batch(self, positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """As `batch`, for samples that draw no random numbers: it leaves the global generators alone."""
        indices = self.indices(positions)
        return self._stacked(indices, [self._read(index) for index in indices])

    def draws_at(self, positions: NDArray[np.int64], *, own: bool = False) -> bool:
        """Whether any of these samples draws from a global generator; `own`: or from one of the dataset."""
        with restored():
            for position, index in zip(positions.tolist(), self.indices(positions), strict=True):
                seed_all(position)
                before = generator_states(), self._own_states() if own else []
                self._read(index)
                if (generator_states(), self._own_states() if own else []) != before:
                    return True
        return False

    def _own_states(self) -> list[str]:
        """The states of the generators that are attributes of the dataset. SystemRandom has none."""
        values = getattr(self.dataset, "__dict__", {}).values()
        return [repr(_state(one)) for one in values if isinstance(one, GENERATORS)]

    def _stacked(self, indices: list[int], samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        for index, sample in zip(indices, samples, strict=True):
            self._require_like(sample, samples[0], index=index, first=indices[0])
        inputs, targets = zip(*samples, strict=True)
        return torch.stack(inputs), torch.stack(targets)

    def indices(self, positions: NDArray[np.int64]) -> list[int]:
        """Returns the index in `dataset` of each position."""
        indices = self.first + np.asarray(positions, dtype=np.int64)
        if self.shuffled:
            indices = sample_order(indices, seed=SPLIT_SEED, population=len(self.dataset))
        return [int(index) for index in indices]

    def _read(self, index: int) -> tuple[Tensor, Tensor]:
        try:
            sample = self.dataset[index]
        except MemoryError:
            raise
        except Exception as error:
            place = f"{described(error)}, raised by {self._named(index)}"
            raise UserCodeError([place + hint(str(error))]) from error
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            kind = type(sample).__name__ + (f" of {len(sample)}" if isinstance(sample, tuple | list) else "")
            self.refuse(index, f"is a {kind}: __getitem__ must return (input, target)")
        tensors = [self._tensor(part, index) for part in sample]
        self._require_tokens(tensors[0], index)
        if self.vocab_size is not None and tensors[0].dtype in NARROW:
            tensors[0] = tensors[0].long()
        return tensors[0], tensors[1]

    def _tensor(self, part: Any, index: int) -> Tensor:
        try:
            if isinstance(part, np.ndarray):  # torch has no negative strides and no foreign byte order
                part = torch.from_numpy(np.array(part, dtype=part.dtype.newbyteorder("="), order="C"))
            tensor = torch.as_tensor(part)
        except (TypeError, ValueError, RuntimeError):
            kind = f"{type(part).__module__}.{type(part).__qualname__}"
            if isinstance(part, np.ndarray):
                kind = f"numpy array of {part.dtype}"
            self.refuse(index, f"has a {kind}: return a tensor, an array or a number")
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_nested:
            kind = f"tensor on {tensor.device} ({'nested' if tensor.is_nested else tensor.layout})"
            self.refuse(index, f"has a {kind}: return a dense tensor on the CPU; batches are copied ahead")
        tensor = tensor.detach().as_subclass(Tensor)
        return tensor.long() if tensor.dtype in UNSUITED else tensor

    def _require_tokens(self, tokens: Tensor, index: int) -> None:
        """Refuse tokens outside the vocabulary: an embedding on a GPU would crash."""
        if self.vocab_size is None or not tokens.numel():
            return
        if tokens.is_floating_point():
            self.refuse(index, f"has inputs of {tokens.dtype}, but data.vocab_size is for token ids")
        least, most = int(tokens.min()), int(tokens.max())  # as int, because 256 is 0 in uint8
        if least < 0 or most >= self.vocab_size:
            worst = least if least < 0 else most
            self.refuse(index, f"has the token {worst}, but data.vocab_size = {self.vocab_size}")

    def _require_like(
        self, sample: Sequence[Tensor], other: Sequence[Tensor], *, index: int, first: int
    ) -> None:
        for part, tensor, like in zip(("input", "target"), sample, other, strict=True):
            if tensor.shape != like.shape or tensor.dtype != like.dtype:
                shape, other_shape = (f"{list(one.shape)} ({one.dtype})" for one in (tensor, like))
                rule = f"has the {part} {shape}, but sample {first} has {other_shape}: all need one shape"
                self.refuse(index, rule)

    def refuse(self, index: int, rule: str) -> None:
        """Raises ConfigError with the name of the sample and `rule`."""
        raise ConfigError([f"{self._named(index)} {rule}."])

    def _named(self, index: int) -> str:
        return f"sample {index} of {type(self.dataset).__name__} ({self.name})"


class DatasetDocuments:
    """The samples of a dataset as documents for `Packed`: input and target are token ids [n], for any n.

    A dataset with an attribute `lengths` gives the number n of each sample there. Otherwise each sample is
    read once for it.

    Raises ConfigError for a sample that is no document, or that draws random numbers.
    """

    def __init__(self, samples: DatasetSamples) -> None:
        self.name, self._samples = samples.name, samples
        self.dataset = samples.dataset
        if samples.draws_at(_checked(samples)):
            name = f"{type(self.dataset).__name__} ({self.name})"
            rule = "draws random numbers, but a packed document must be the same each time"
            raise ConfigError([f"{name} {rule}. Set data.packing=false, or draw nothing in __getitem__."])
        indices = samples.indices(np.arange(len(samples)))
        if (lengths := getattr(self.dataset, "lengths", None)) is not None:
            self.pairs = np.asarray([int(lengths[index]) for index in indices], dtype=np.int64)
        else:
            self.pairs = np.asarray([len(self._read(number)[0]) for number in range(len(samples))])

    def read(self, document: int, *, first: int, count: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Raises ConfigError if the document has another length than at the start."""
        tokens, targets = self._read(document)
        if len(tokens) != self.pairs[document]:
            rule = f"has {len(tokens)} tokens, but its length was {self.pairs[document]} at the start"
            self._samples.refuse(self._index(document), rule)
        span = slice(first, first + count)
        return tokens[span].numpy(), targets[span].numpy()

    def _read(self, document: int) -> tuple[Tensor, Tensor]:
        tokens, targets = (part[0] for part in self._samples.unseeded_batch(np.asarray([document])))
        if tokens.dim() != 1 or tokens.shape != targets.shape or targets.is_floating_point():
            shapes = f"{list(tokens.shape)} and {list(targets.shape)} ({targets.dtype})"
            rule = f"has an input and a target of {shapes}: a document has token ids [n] and as many targets"
            self._samples.refuse(self._index(document), rule)
        return tokens, targets

    def _index(self, document: int) -> int:
        return self._samples.indices(np.asarray([document]))[0]


class DatasetData:
    """`dataset` for training, and `validation`. Without `validation`, a share of `dataset` is held out.

    The held-out samples are chosen by a fixed shuffle, so a dataset that is sorted by its labels has all
    labels in both parts. `sequence_length` and `vocab_size`: for token ids, checked if given. With `packing`,
    a sample is a document of any length, and samples of `sequence_length` have whole documents.

    Raises ConfigError if an object is no map-style dataset, a sample can't be used, or the samples do not
    depend on their index alone.
    """

    def __init__(
        self,
        *,
        dataset: Dataset,
        validation: Dataset | None = None,
        validation_share: float = 0.05,
        sequence_length: int | None = None,
        vocab_size: int | None = None,
        packing: bool = False,
    ) -> None:
        for part in (dataset, validation):
            if part is not None:
                _require_map_style(part)
        count = len(dataset)
        held_out = 0 if validation is not None else max(1, round(count * validation_share))
        if count - held_out < 1 or (validation is not None and len(validation) < 1):
            raise ConfigError([f"{type(dataset).__name__} has {count} samples: too few for two parts."])
        self.train = DatasetSamples(
            dataset=dataset, name="training", first=0, count=count - held_out,
            shuffled=validation is None, vocab_size=vocab_size,
        )  # fmt: skip
        self.validation = DatasetSamples(
            dataset=dataset if validation is None else validation, name="validation",
            first=count - held_out if validation is None else 0,
            count=held_out if validation is None else len(validation),
            shuffled=validation is None, vocab_size=vocab_size,
        )  # fmt: skip
        if packing:
            if sequence_length is None or vocab_size is None:
                raise ConfigError(["data.packing = true needs data.sequence_length and data.vocab_size."])
            packed = [
                Packed(DatasetDocuments(part), sequence_length=sequence_length)
                for part in (self.train, self.validation)
            ]
            _, digest = _look_at(*packed)
            self.sequence_length = sequence_length
            shape = {"sample_shape": (sequence_length,)}
            vars(self).update(shape | packed_data(*packed, digest=digest))
            return
        drew = [samples for samples in (self.train, self.validation) if _draws_first(samples)]
        self.sample_shape, self.digest = _look_at(self.train, self.validation)
        for samples in drew:
            if not samples.draws_at(_checked(samples), own=True):
                name = f"{type(samples.dataset).__name__} ({samples.name})"
                rule = "keeps random numbers that it drew at the first read of a sample, so that a resume or"
                advice = "another layout would get others. Draw at each read, or from a generator seeded by"
                raise ConfigError([f"{name} {rule} {advice} the index."])
        self.train = replace(self.train, draws=self.train.draws_at(_checked(self.train)))
        if sequence_length is not None:
            self.sequence_length = sequence_length
            if self.sample_shape[:1] != (sequence_length,):
                rule = f"is not the length of a sample, whose input is {list(self.sample_shape)}"
                raise ConfigError([Problem("data.sequence_length", sequence_length, rule)])


def as_data(built: Any) -> Data:
    """Returns `built` if it has training and validation samples; a map-style dataset is divided.

    Raises ConfigError if `built` is neither, and as DatasetData does.
    """
    if hasattr(built, "train") and hasattr(built, "validation"):
        data: Data = built
        return data
    return DatasetData(dataset=built)


def _require_map_style(dataset: object) -> None:
    if isinstance(dataset, dict):
        raise ConfigError([f"{spell(dataset)} has no _target_, the class of a dataset."])
    absent = (None, torch.utils.data.Dataset.__getitem__)  # an IterableDataset has torch's, which raises
    missing = [name for name in ("__len__", "__getitem__") if getattr(type(dataset), name, None) in absent]
    if missing:
        name = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
        rule = f"{name} has no {' and no '.join(missing)}: samples are read by their index, in any order."
        raise ConfigError([f"{rule} Add them, or `train` and `validation` (hpc_parallel/data/sampler.py)."])


def _state(generator: Any) -> object:
    """What tells two states apart by its `repr`."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, random.SystemRandom):
        return None
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _draws_first(part: DatasetSamples) -> bool:
    """Whether samples draw random numbers when they are read for the first time."""
    positions = _checked(part)
    part.batch(positions[:1])  # it may draw once, for all samples
    return part.draws_at(positions[1:], own=True)


def _checked(part: Samples) -> NDArray[np.int64]:
    return np.unique(np.linspace(0, len(part) - 1, CHECKED).astype(np.int64))


def bytes_of(tensor: Tensor) -> bytes:
    """The content of a tensor on the CPU, also of a dtype that numpy lacks."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _look_at(*parts: DatasetSamples | Packed) -> tuple[tuple[int, ...], str]:
    """The shape of an input, and a hash of the lengths and of a few samples of each part.

    Raises ConfigError if a sample differs when it is read again, because layouts would then train on
    different samples.
    """
    digest = hashlib.sha256(repr([len(part) for part in parts]).encode())
    shapes = []
    for part in parts:
        positions = _checked(part)
        batch, repeated = part.batch(positions), part.batch(positions)
        for tensor, other in zip(batch, repeated, strict=True):
            content = bytes_of(tensor)
            if content != bytes_of(other):
                name = type(getattr(part, "dataset", part)).__name__
                rule = "returns other samples when it is read again, so no layout could repeat another"
                advice = "Draw random numbers from the global generators of torch, numpy or Python, which are"
                raise ConfigError([f"{name} ({part.name}) {rule}. {advice} seeded for each sample."])
            digest.update(repr((tensor.shape, tensor.dtype)).encode() + content)
        shapes.append(tuple(batch[0].shape[1:]))
    if shapes[0] != shapes[1]:
        training_shape, held_out_shape = map(list, shapes)
        raise ConfigError(
            [f"training samples have the shape {training_shape}, but held-out samples have {held_out_shape}."]
        )
    return shapes[0], digest.hexdigest()
