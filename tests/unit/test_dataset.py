"""A user's map-style dataset: every sample once, random numbers that any layout repeats, errors that help."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hpc_parallel.config.build import build
from hpc_parallel.data.dataset import DatasetData, as_data
from hpc_parallel.data.sampler import Batches
from hpc_parallel.problems import ConfigError
from tests.composed import prepared
from tests.datasets import Points, Sentences, Unseeded


def test_held_out_samples_are_chosen_on_the_command_line() -> None:
    words = ("data=dataset", "data.dataset._target_=tests.datasets.Sentences", "+data.dataset.count=9")
    assert prepared(*words).config.data["validation"] is None
    own = ("+data.validation._target_=tests.datasets.Sentences", "+data.validation.count=3")
    run = prepared(*words, *own)
    data = build(run.config.data, key="data")
    assert (len(data.train), len(data.validation)) == (9, 3)
    with pytest.raises(ConfigError, match=r"\{count:3\} has no _target_, the class of a dataset"):
        build(prepared(*words, own[1]).config.data, key="data")


@given(count=st.integers(2, 300), share=st.floats(0.01, 0.49))
@settings(max_examples=20)
def test_each_sample_is_in_one_part(count: int, share: float) -> None:
    data = DatasetData(dataset=Points(count), validation_share=share)
    parts = [part.indices(np.arange(len(part))) for part in (data.train, data.validation)]
    assert sorted(parts[0] + parts[1]) == list(range(count))
    assert len(parts[1]) == max(1, round(count * share))


def test_a_sorted_dataset_has_all_labels_in_both_parts() -> None:
    data = DatasetData(dataset=Points(1000), validation_share=0.1)
    held_out = data.validation.indices(np.arange(100))
    assert sorted({index // 100 for index in held_out}) == list(range(10))


def test_a_dataset_of_its_own_validates_in_its_own_order() -> None:
    data = DatasetData(dataset=Points(10), validation=Points(4))
    inputs, targets = data.validation.batch(np.arange(4))
    assert inputs.tolist() == [[float(index)] * 3 for index in range(4)]
    assert targets.tolist() == [0, 0.5, 1, 1.5]
    assert len(data.train) == 10


def test_numbers_with_a_fraction_get_the_dtype_of_the_weights() -> None:
    data = DatasetData(dataset=Points(20))
    inputs, targets = Batches(samples=data.train, global_batch_size=4, seed=0, floating=torch.float32).at(0)
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.float32)
    tokens = DatasetData(dataset=Sentences(20)).train
    inputs, _ = Batches(samples=tokens, global_batch_size=4, seed=0, floating=torch.float32).at(0)
    assert inputs.dtype == torch.int64


def _noisy(step: int, **layout: Any) -> torch.Tensor:
    samples = DatasetData(dataset=Sentences(50, noise=0.5)).train
    return Batches(samples=samples, global_batch_size=8, seed=3, **layout).at(step)[0]


def test_random_numbers_depend_on_the_seed_and_the_sample_only() -> None:
    torch.manual_seed(0)
    random.seed(0)
    whole = _noisy(5)
    torch.rand(7)  # the state of the generators plays no part
    for replica in range(2):
        half = _noisy(5, replica=replica, replicas=2, microbatches=2)
        rows = [row for m in range(2) for row in range(m * 4 + replica * 2, m * 4 + replica * 2 + 2)]
        assert torch.equal(half, whole[rows])


def test_each_epoch_draws_other_numbers() -> None:
    samples = DatasetData(dataset=Sentences(9, noise=0.5), validation=Sentences(2)).train
    batches = Batches(samples=samples, global_batch_size=9, seed=3)
    epochs = []
    for step in range(2):
        order = np.argsort(batches.positions(step))
        epochs.append(batches.at(step)[0][torch.from_numpy(order)])
    assert (epochs[0] != epochs[1]).float().mean() > 0.3


def test_a_batch_is_plain_and_needs_no_gradient() -> None:
    """A learnt table in a dataset gets no gradient, on one device as on several."""

    class Marked(Tensor):
        pass

    table = torch.rand(9, 3, requires_grad=True)
    inputs, targets = DatasetData(dataset=[(row.as_subclass(Marked), 1) for row in table]).train.batch(
        np.arange(2)
    )
    assert type(inputs) is type(targets) is Tensor
    assert not inputs.requires_grad
    assert all(any(torch.equal(row, one) for one in table) for row in inputs)


def test_reading_leaves_the_generators_alone() -> None:
    samples = DatasetData(dataset=Sentences(20, noise=0.5)).train
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    wanted = torch.rand(1).item(), np.random.rand(), random.random()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    samples.batch(np.arange(4))
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == wanted


class Drawn:
    """Rows of random numbers, from `generator` or torch's own. What is kept at `keys` is drawn only once."""

    def __init__(
        self, *, keys: Callable[[int], object], generator: Any = None, reseeds: bool = False
    ) -> None:
        self.keys, self.generator, self.reseeds = keys, generator, reseeds
        self.kept: dict[object, Tensor] = {}

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.reseeds:
            self.generator.manual_seed(index)
        if (key := self.keys(index)) is None:
            return self._draw(), index % 3
        if key not in self.kept:
            self.kept[key] = self._draw()
        return self.kept[key] * (index + 1), index % 3

    def _draw(self) -> Tensor:
        if isinstance(self.generator, random.Random | np.random.Generator):
            return torch.tensor([self.generator.random(), self.generator.random()])
        return torch.rand(2, generator=self.generator)


@pytest.mark.parametrize(
    "generator", [lambda: None, torch.Generator, np.random.default_rng, lambda: random.Random(0)]
)
def test_samples_may_not_depend_on_who_was_read_before(generator: Callable[[], Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"^Drawn \(training\) keeps random numbers that it drew at the first"
    ):
        DatasetData(dataset=Drawn(keys=lambda index: index, generator=generator()))


def test_what_all_samples_share_may_be_drawn_once() -> None:
    """It is drawn at the start, in the same order on every rank and at each start."""
    found = []
    for _ in range(2):
        torch.rand(3)  # the state of the generators plays no part
        found.append(DatasetData(dataset=Drawn(keys=lambda index: 0)).train.batch(np.arange(5))[0])
    assert found[0].equal(found[1])
    own = DatasetData(dataset=Drawn(keys=lambda index: None, generator=torch.Generator(), reseeds=True))
    alone = Drawn(keys=lambda index: None, generator=torch.Generator(), reseeds=True)
    assert own.train.batch(np.asarray([7]))[0][0].equal(alone[own.train.indices(np.asarray([7]))[0]][0])


class Stream(torch.utils.data.IterableDataset[Tensor]):
    def __len__(self) -> int:
        return 9

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.rand(9))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": Stream()}, "Stream has no __getitem__: samples are read by their index, in any order"),
        ({"dataset": Points(1, bad=0)}, "too few for two parts"),
        ({"dataset": Points(9, bad=5), "validation": Points(9)},
         r"^ValueError: a bad label: 5 \(datasets.py:\d+\), raised by sample 5 of Points \(training\)"),
        ({"dataset": Points(9), "validation": Points(9, odd=8)},
         r"^sample 8 of Points \(validation\) has the input \[4\] \(torch.float64\), but sample 0 has \[3\]"),
        ({"dataset": Unseeded(9)}, "returns other samples when it is read again"),
        ({"dataset": [(1, 2, 3)] * 9}, r"^sample \d of list \(training\) is a tuple of 3: __getitem__ must"),
        ({"dataset": [("one", 1)] * 9}, "has a builtins.str: return a tensor, an array or a number"),
        ({"dataset": [(torch.ones(2, device="meta"), 1)] * 9}, r"a tensor on meta \(torch.strided\): return"),
        ({"dataset": [(torch.eye(2).to_sparse(), 1)] * 9}, r"on cpu \(torch.sparse_coo\): return a dense"),
        ({"dataset": [(np.array([None, "a"]), 1)] * 9}, "has a numpy array of object: return a"),
        ({"dataset": iter(())}, "has no __len__ and no __getitem__"),
        ({"dataset": Sentences(9), "sequence_length": 31},
         r"data.sequence_length = 31 is not the length of a sample, whose input is \[32\]"),
        ({"dataset": Sentences(9), "vocab_size": 30}, r"has the token \d+, but data.vocab_size = 30"),
        ({"dataset": Points(9), "vocab_size": 30}, "has inputs of torch.float64, but data.vocab_size is for"),
    ],
)  # fmt: skip
def test_what_can_not_be_used_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DatasetData(**arguments)


class Turned:
    """Arrays as slices and files give them: against the direction of memory, of another machine's order."""

    turns = (
        lambda array: array[::-1, ::-1], lambda array: array.T, lambda array: array[::2, 1::3],
        lambda array: array.astype(array.dtype.newbyteorder()), np.asfortranarray,
        lambda array: np.broadcast_to(array[:1], array.shape),
    )  # fmt: skip

    def __init__(self, turn: int, dtype: str) -> None:
        self.turn, self.values = self.turns[turn], RANDOM.integers(0, 99, size=(20, 7, 9)).astype(dtype)

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        return self.turn(self.values[index]), self.values[index, 0, 0].reshape(()).astype(">i8")


RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "int64", "float32", "float64", "bool"])
@pytest.mark.parametrize("turn", range(len(Turned.turns)))
def test_any_array_of_numbers_is_a_sample(turn: int, dtype: str) -> None:
    dataset = Turned(turn, dtype)
    samples = DatasetData(dataset=dataset).train
    inputs, targets = samples.batch(np.arange(5))
    for index, found, target in zip(samples.indices(np.arange(5)), inputs, targets, strict=True):
        assert found.tolist() == dataset[index][0].tolist()
        assert target.tolist() == dataset[index][1].tolist()
    assert inputs.dtype == getattr(torch, dtype.replace("uint16", "int64"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool, torch.complex64])
def test_any_tensor_is_a_sample(dtype: torch.dtype) -> None:
    """Also of a dtype that numpy lacks."""
    sample = torch.tensor([[0, 1], [1, 0]], dtype=dtype), torch.tensor(1, dtype=dtype)
    inputs, targets = DatasetData(dataset=[sample] * 20).train.batch(np.arange(2))
    assert (inputs.dtype, targets.dtype) == (dtype, dtype)
    assert inputs.equal(torch.stack([sample[0]] * 2))
    assert targets.tolist() == [1, 1]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint16", "int32"])
def test_narrow_tokens_are_compared_and_fit_an_embedding(dtype: str) -> None:
    """255 is a token of 256, although 256 is none of uint8."""
    most = min(255, np.iinfo(dtype).max)
    tokens = np.array([0, 3, most], dtype=dtype)
    inputs, _ = DatasetData(dataset=[(tokens, 0)] * 9, vocab_size=most + 1).train.batch(np.arange(2))
    assert torch.nn.Embedding(most + 1, 2)(inputs).shape == (2, 3, 2)
    with pytest.raises(ConfigError, match=f"has the token {most}, but data.vocab_size = {most}"):
        DatasetData(dataset=[(tokens, 0)] * 9, vocab_size=most)


def test_other_data_has_another_digest() -> None:
    digests = {
        DatasetData(dataset=Points(count), validation_share=share).digest
        for count, share in ((20, 0.1), (21, 0.1), (20, 0.2), (20, 0.1))
    }
    assert len(digests) == 3


def test_a_dataset_needs_no_table_around_it() -> None:
    assert len(as_data(Points(100)).validation) == 5
    data = as_data(Points(100))
    assert as_data(data) is data


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"_target_": "tests.datasets.Points"}, "TypeError: Points.__init__() missing 1 required positional"),
        ({"_target_": "tests.datasets.Nothing"}, "No module named 'tests.datasets.Nothing'"),
        ({"_target_": "hpc_parallel.data.dataset.DatasetData",
          "dataset": {"_target_": "tests.datasets.Points"}},
         "raised by tests.datasets.Points (data)"),
    ],
)  # fmt: skip
def test_an_error_of_a_class_comes_first(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(table, key="data")
    assert message in str(caught.value)
    assert "Error " not in str(caught.value)
