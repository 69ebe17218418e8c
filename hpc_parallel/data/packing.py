"""Samples of `sequence_length` that are filled with whole documents.

A document of n tokens is n - 1 pairs of an input and its target, so no target is in another document. The
packing is best-fit decreasing (Johnson 1974; Ding et al. 2024, "Fewer Truncations Improve Language
Modeling"): each document, the longest first, goes into the sample with the least room that holds it. It
depends on the lengths only, so it is the same on each rank, in each layout and after a restart. Each rank
computes it when the data is opened and keeps it in memory, about 50 bytes for each document.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from hpc_parallel.data.dataset import DatasetDocuments

IGNORED = -100  # the target of a position without a document; torch's cross_entropy leaves it out
COST = (
    "packing: attention computes all pairs of positions of a sample under a mask, twice as many as without "
    "packing, and without FlashAttention"
)
SCANNED = 1 << 24  # tokens that are compared with the separator at once


@dataclass(frozen=True)
class TokenDocuments:
    """The documents of a row of `tokens` from number `begin` on; document i ends before token `ends[i]`."""

    tokens: NDArray[Any]
    ends: NDArray[np.int64]
    vocab_size: int
    name: str  # "training" or "validation", for messages
    begin: int = 0

    @cached_property
    def pairs(self) -> NDArray[np.int64]:
        """The number of pairs of an input and its target in each document, one fewer than its tokens."""
        lengths: NDArray[np.int64] = np.diff(self.ends, prepend=self.begin)
        return np.maximum(lengths - 1, 0)

    def read(self, document: int, *, first: int, count: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Returns inputs and targets [count] of a document, from its pair number `first` on.

        Raises ValueError for a token outside of the vocabulary; an embedding on a GPU would crash.
        """
        start = (int(self.ends[document - 1]) if document else self.begin) + first
        tokens = self.tokens[start : start + count + 1].astype(np.int64)
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            raise ValueError(
                f"document {document} of the {self.name} part has tokens from {tokens.min()} to "
                f"{tokens.max()}, but vocab_size = {self.vocab_size}"
            )
        return tokens[:-1], tokens[1:]


@dataclass(frozen=True)
class Pieces:
    """The pieces of all samples, one sample after another: whole documents, and parts of long ones.

    Piece i is the pairs `first[i]` to `first[i] + count[i]` of `document[i]`. Sample j has the pieces
    `ends[j - 1]` to `ends[j]`.
    """

    document: NDArray[np.int64]
    first: NDArray[np.int64]
    count: NDArray[np.int64]
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, pairs: NDArray[np.int64], *, length: int) -> Pieces:
        """Pack documents with these `pairs` into samples of `length`.

        A longer document is cut into pieces of `length` pairs and the rest.
        """
        parts = -(-pairs // length)
        document = np.repeat(np.arange(len(pairs)), parts)
        number = np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts)
        first = number * length
        count = np.minimum(pairs[document] - first, length)
        sample = best_fit(count, room=length)
        order = np.argsort(sample, kind="stable")
        ends = np.cumsum(np.bincount(sample, minlength=1))
        return cls(document[order], first[order], count[order], ends)


class Packed:
    """Samples of packed documents.

    An input is [seq, 2]: the token, and the index in the sample at which its document begins. Positions
    after the last document have the token 0 and the target IGNORED, and are a document of their own.

    Raises ValueError if no document has a target.
    """

    def __init__(self, documents: TokenDocuments | DatasetDocuments, *, sequence_length: int) -> None:
        if not documents.pairs.any():
            raise ValueError(
                f"the {documents.name} part has {len(documents.pairs)} documents and none of two tokens. "
                "Try more text or another data.validation_share."
            )
        self.documents, self.name = documents, documents.name
        self.sequence_length = sequence_length
        self._pieces = Pieces.of(documents.pairs, length=sequence_length)

    def __len__(self) -> int:
        return len(self._pieces.ends)

    def batch(self, positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Returns inputs, int64 [batch, seq, 2], and targets, int64 [batch, seq]."""
        inputs = np.zeros((len(positions), self.sequence_length, 2), dtype=np.int64)
        targets = np.full(inputs.shape[:2], IGNORED, dtype=np.int64)
        for row, position in enumerate(np.asarray(positions).tolist()):
            place = 0
            for document, first, count in self._of_sample(position):
                span = row, slice(place, place + count)
                inputs[(*span, 0)], targets[span] = self.documents.read(document, first=first, count=count)
                inputs[(*span, 1)] = place
                place += count
            inputs[row, place:, 1] = place
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def _of_sample(self, position: int) -> Iterator[tuple[int, int, int]]:
        """The document, the first pair and the number of pairs of each piece of a sample."""
        pieces = self._pieces
        span = slice(pieces.ends[position - 1] if position else 0, pieces.ends[position])
        return zip(
            *(part[span].tolist() for part in (pieces.document, pieces.first, pieces.count)), strict=True
        )

    def digest(self, content: str) -> str:
        """A hash of `content` and of the lengths of all documents, which decide the packing."""
        return hashlib.sha256(content.encode() + self.documents.pairs.astype("<i8").tobytes()).hexdigest()

    def __str__(self) -> str:
        """One line: how full the samples are, what is cut and what is left out."""
        pairs, length = self.documents.pairs, self.sequence_length
        line = (
            f"packing: {len(pairs):,} {self.name} documents in {len(self):,} samples of {length:,}, "
            f"{pairs.sum() / (len(self) * length):.1%} full"
        )
        if cut := int((pairs > length).sum()):
            line += f"; {cut:,} longer documents are cut into pieces that do not see each other"
        if empty := int((pairs == 0).sum()):
            line += f"; {empty:,} documents of fewer than two tokens have no target and are left out"
        return line


def packed_parts(
    tokens: Any,
    ends: NDArray[np.int64],
    *,
    sequence_length: int,
    vocab_size: int,
    validation_share: float,
    digest: str,
) -> dict[str, Any]:
    """The attributes `train`, `validation`, `digest` and `notes` of data; the last documents are held out.

    `ends`: the end of each document among the `tokens`. `digest`: of the tokens.

    Raises ValueError if there are too few documents.
    """
    if len(ends) < 2:
        raise ValueError(f"{len(ends)} documents can't be divided into training and held-out documents")
    last = round(int(ends[-1]) * (1 - validation_share))
    cut = min(max(1, int(np.searchsorted(ends, last, side="right"))), len(ends) - 1)
    parts = (
        TokenDocuments(tokens, ends[:cut], vocab_size, "training"),
        TokenDocuments(tokens, ends[cut:], vocab_size, "validation", begin=int(ends[cut - 1])),
    )
    return packed_data(*(Packed(part, sequence_length=sequence_length) for part in parts), digest=digest)


def packed_data(train: Packed, validation: Packed, *, digest: str) -> dict[str, Any]:
    """The attributes of data with these samples; `digest`: of the content of the documents."""
    digest = validation.digest(train.digest(digest))
    notes = (str(train), str(validation), COST)
    return {"train": train, "validation": validation, "digest": digest, "notes": notes}


def document_ends(tokens: NDArray[Any], *, separator: int) -> NDArray[np.int64]:
    """The end of each document, after its `separator`; the last document may lack one.

    Raises ValueError if no token is the separator.
    """
    spans = [(start, tokens[start : start + SCANNED]) for start in range(0, len(tokens), SCANNED)]
    ends = np.concatenate([start + 1 + np.flatnonzero(span == separator) for start, span in spans])
    if not len(ends):
        raise ValueError(f"data.separator = {separator} is none of the {len(tokens):,} tokens")
    return ends if ends[-1] == len(tokens) else np.append(ends, len(tokens))


def best_fit(sizes: NDArray[np.int64], *, room: int) -> NDArray[np.int64]:
    """The bin of each item, by best-fit decreasing into bins of `room`; no size is above `room`.

    Items of one size are placed together: a bin with the least room takes as many of them as fit before
    another bin is used. So the time depends on the number of different sizes and rooms, not of items.
    """
    bins = np.empty(len(sizes), dtype=np.int64)
    by_room: dict[int, list[NDArray[np.int64]]] = {}  # bins with this room left
    rooms: list[int] = []  # the keys of by_room, sorted
    opened = 0

    def put_back(left: int, some: NDArray[np.int64]) -> None:
        if left and len(some):
            if left not in by_room:
                insort(rooms, left)
            by_room.setdefault(left, []).append(some)

    order = np.argsort(-sizes, kind="stable")
    for items in np.split(order, np.flatnonzero(np.diff(sizes[order])) + 1) if len(order) else ():
        size = int(sizes[items[0]])
        while len(items):
            place = bisect_left(rooms, size)
            space = rooms.pop(place) if place < len(rooms) else room
            fits = space // size
            needed = -(-len(items) // fits)
            if space in by_room:
                some = np.concatenate(by_room.pop(space))
            else:
                some, opened = np.arange(opened, opened + needed), opened + needed
            used = some[:needed]
            put_back(space, some[needed:])
            placed = min(len(items), fits * len(used))
            bins[items[:placed]] = np.repeat(used, fits)[:placed]
            full, rest = divmod(placed, fits)
            put_back(space - fits * size, used[:full])
            put_back(space - rest * size, used[full:])
            items = items[placed:]
    return bins
