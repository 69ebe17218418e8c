"""Samples of whole documents: which documents are in which sample, and what is left out."""

from __future__ import annotations

import json
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hpc_parallel.data.dataset import DatasetData
from hpc_parallel.data.packing import IGNORED, Packed, TokenDocuments, best_fit, document_ends
from hpc_parallel.data.tokens import TokensData
from hpc_parallel.problems import ConfigError
from tests.composed import prepared

END = 0  # the separator
LENGTH = 8


def documents(*sizes: int) -> list[list[int]]:
    """Documents of these numbers of tokens, each with tokens of its own and the separator at its end."""
    return [[*range(10 * n + 1, 10 * n + size), END] for n, size in enumerate(sizes, start=1)]


def packed(*sizes: int, length: int = LENGTH) -> Packed:
    texts = documents(*sizes)
    tokens = np.asarray(list(chain(*texts)))
    ends = np.cumsum([len(text) for text in texts])
    return Packed(TokenDocuments(tokens, ends, 1000, "training"), sequence_length=length)


def pairs_of(samples: Any) -> list[list[tuple[int, int]]]:
    """The pairs (input, target) of each document in `samples`, by where the samples say that it begins."""
    inputs, targets = (part.numpy() for part in samples.batch(np.arange(len(samples))))
    found = []
    for row, expected in zip(inputs, targets, strict=True):
        for start in np.unique(row[:, 1]):
            inside = np.flatnonzero((row[:, 1] == start) & (expected != IGNORED))
            if len(inside):
                assert inside[0] == start
                found.append(list(zip(row[inside, 0].tolist(), expected[inside].tolist(), strict=True)))
    return sorted(found)


def expected_pairs(*sizes: int, length: int = LENGTH) -> list[list[tuple[int, int]]]:
    """The same, from the documents one by one."""
    found = []
    for text in documents(*sizes):
        whole = list(pairwise(text))
        found += [whole[first : first + length] for first in range(0, len(whole), length)]
    return sorted(found)


def first_best_fit(sizes: NDArray[np.int64], room: int) -> list[int]:
    """The room that is left in each bin, item by item."""
    left: list[int] = []
    for size in sorted(sizes.tolist(), reverse=True):
        fits = [(free, place) for place, free in enumerate(left) if free >= size]
        place = min(fits)[1] if fits else len(left)
        left[place:] = [*left[place:], room][: max(1, len(left) - place)] if fits else [room]
        left[place] -= size
    return left


@pytest.mark.parametrize("seed", range(40))
def test_the_packing_is_best_fit_decreasing(seed: int) -> None:
    random = np.random.default_rng(seed)
    room = int(random.integers(1, 30))
    sizes = random.integers(1, room + 1, size=int(random.integers(1, 60)))
    bins = best_fit(sizes, room=room)
    left = room - np.bincount(bins, weights=sizes)
    assert sorted(left.tolist()) == sorted(first_best_fit(sizes, room))


@pytest.mark.parametrize("sizes", [(9, 5, 5, 3), (4,) * 7, (30, 2, 9, 10), (2, 1, 8)])
def test_each_pair_of_tokens_is_in_one_sample_and_none_crosses_a_boundary(sizes: tuple[int, ...]) -> None:
    samples = packed(*sizes)
    assert pairs_of(samples) == expected_pairs(*sizes)
    inputs, _ = samples.batch(np.arange(len(samples)))
    assert inputs.shape == (len(samples), LENGTH, 2)
    assert (inputs[..., 1].numpy() <= np.arange(LENGTH)).all()


def test_the_line_says_what_is_cut_and_left_out() -> None:
    assert str(packed(9, 1, 30, 2)) == (
        "packing: 4 training documents in 5 samples of 8, 95.0% full; 1 longer documents are cut into pieces "
        "that do not see each other; 1 documents of fewer than two tokens have no target and are left out"
    )


def write_tokens(folder: Path, *sizes: int) -> Path:
    file, tokens = folder / "tokens.npy", np.asarray(list(chain(*documents(*sizes))), dtype=np.uint16)
    np.save(file, tokens)
    description = {"vocab_size": 1000, "tokenizer": "bytes", "count": len(tokens)}
    file.with_suffix(".json").write_text(json.dumps(description))
    return file


def test_a_file_of_tokens_is_divided_between_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpc_parallel.data.packing.SCANNED", 3)
    file = write_tokens(tmp_path, 9, 4, 12, 6, 7)

    def opened(**arguments: Any) -> TokensData:
        return TokensData(path=str(file), sequence_length=LENGTH, packing=True, separator=END, **arguments)

    data = opened(validation_share=0.3)
    everything = expected_pairs(9, 4, 12, 6, 7)
    assert sorted(pairs_of(data.train) + pairs_of(data.validation)) == everything
    assert pairs_of(data.validation) == sorted(expected_pairs(9, 4, 12, 6, 7)[-2:])
    assert data.digest != opened(validation_share=0.1).digest
    with pytest.raises(ValueError, match=r"data\.separator = 999 is none of the 38 tokens"):
        document_ends(np.load(file), separator=999)


class Texts:
    """Documents of different lengths: input and target."""

    def __init__(self, *sizes: int, told: bool = False, noisy: bool = False) -> None:
        self.texts, self.reads, self.noisy = documents(*sizes), 0, noisy
        if told:
            self.lengths = [size - 1 for size in sizes]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
        self.reads += 1
        if self.noisy:
            np.random.rand()
        text = np.asarray(self.texts[index])
        return text[:-1], text[1:]


@pytest.mark.parametrize("told", [True, False])
def test_a_dataset_of_documents_is_packed(told: bool) -> None:
    sizes = (9, 4, 12, 6, 7, 3)
    texts = Texts(*sizes, told=told)
    arguments: dict[str, Any] = {"sequence_length": LENGTH, "vocab_size": 1000, "packing": True}
    data = DatasetData(dataset=texts, validation_share=0.3, **arguments)
    assert sorted(pairs_of(data.train) + pairs_of(data.validation)) == expected_pairs(*sizes)
    assert data.sample_shape == (LENGTH,)
    with pytest.raises(ConfigError, match="draws random numbers"):
        DatasetData(dataset=Texts(*sizes, noisy=True), **arguments)
    wrong = Texts(*sizes, told=True)
    wrong.lengths = [2] * 6
    with pytest.raises(ConfigError, match="but its length was 2 at the start"):
        DatasetData(dataset=wrong, **arguments)


def told(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        prepared("launcher=local", *words)
    return str(caught.value)


def test_problems_are_told_before_the_run_starts(tmp_path: Path) -> None:
    path = f"data.path={write_tokens(tmp_path, 9, 40, 9)}"
    words = ("data=tokens", path, "model.vocab_size=1000", "data.sequence_length=8")
    needed = (*words, "data.packing=true")
    assert "data.separator = null must be given with data.packing=true" in told(*needed)
    assert "Try data.separator=999." in told(*needed, "data.separator=1000")
    assert "data.separator = 3 is used with data.packing=true only" in told(*words, "data.separator=3")
    right = (*needed, "data.separator=999")
    assert prepared("launcher=local", *right).config.data["separator"] == 999
    assert "Try model.balance=0." in told(*right, "model=moe_tiny")
    assert "can't be used with task=generate" in told(*right, "task=generate")
    texts = ("data=dataset", "data.dataset._target_=tests.datasets.Texts", "data.packing=true")
    both = told(*texts)
    assert "data.sequence_length = null must be given with data.packing=true" in both
    assert "data.vocab_size = null must be given with data.packing=true" in both
