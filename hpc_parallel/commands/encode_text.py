"""The token ids of a text of any length, as if it were encoded at once.

The library tokenizers takes 100 to 200 bytes of memory for each byte of a text. So the text is encoded in
windows, and each window overlaps the one before it. Two windows are joined inside their overlap if both have
the same tokens there. Otherwise they become one window, up to the whole text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

WINDOW = 1 << 20  # characters; a text of no more is encoded at once
OVERLAP = 1 << 14  # characters that two windows have in common
TOGETHER = 4  # windows that are encoded in parallel

Token = tuple[int, int, int, bool]  # its id, its begin and end, and whether a word begins with it


@dataclass(frozen=True)
class Middle:
    """The tokens in the middle half of an overlap; `first` is the number of the first one in its window.

    The tokens at the ends may depend on text outside the window.
    """

    first: int
    tokens: list[Token]


@dataclass(frozen=True)
class TextWindow:
    """A part of a text, and the library's encoding of it."""

    text: str
    encoding: Any

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        return np.asarray(self.encoding.ids, dtype=np.int64)

    @cached_property
    def head(self) -> Middle:
        """The overlap with the window before."""
        return self._middle(0)

    @cached_property
    def tail(self) -> Middle:
        """The overlap with the window after."""
        return self._middle(len(self.text) - OVERLAP)

    def _middle(self, begin: int) -> Middle:
        low, high = begin + OVERLAP // 4, begin + OVERLAP * 3 // 4
        places = self.encoding.offsets
        first, end = bisect_left(places, (low,)), bisect_left(places, (high,))
        words = [self.encoding.token_to_word(index) for index in range(first, end)]
        begins_word = [False, *(word != before for before, word in pairwise(words))]
        return Middle(first, [
            (token, start - low, stop - low, begins)
            for token, (start, stop), begins in zip(
                self.encoding.ids[first:end], places[first:end], begins_word, strict=False
            )
        ])  # fmt: skip


def encode_text(tokenizer: Any, text: TextIO) -> Iterator[NDArray[np.int64]]:
    """Yields arrays that together are the ids of the whole text, without special tokens.

    Raises ValueError if the tokenizer fails, or if windows of the text can't be joined.
    """
    windows = _encoded(tokenizer, text)
    left, begin, head = next(windows, None), 0, None
    while left is not None:
        right = next(windows, None)
        place = None if right is None else _joint(tokenizer, left.tail, right.head)
        if right is not None and place is None:
            left = _united(tokenizer, left, right, windows)
            if head is not None and left.head != head:
                raise ValueError(
                    f"its tokens depend on text that is {WINDOW:,} characters away: split the file"
                )
            continue
        end = len(left.ids) if place is None else left.tail.first + place
        yield left.ids[begin:end]
        if right is not None and place is not None:
            begin, head = right.head.first + place, right.head
        left = right


def _joint(tokenizer: Any, tail: Middle, head: Middle) -> int | None:
    """The number of the token in both middles at which the windows can be joined; None if there is none.

    A word that begins at the same place in both is encoded by itself, and the search for further words goes
    on from there. If all of a text is one word, only BPE can be joined inside it: a text has only one row of
    tokens in which BPE encodes each pair of neighbours to this pair
    (https://github.com/github/rust-gems/tree/main/crates/bpe), and one of the windows has each pair.
    """
    if tail.tokens != head.tokens or len(tail.tokens) < 2:
        return None
    begins = (number for number, (_, _, _, begins_word) in enumerate(tail.tokens) if begins_word)
    return next(begins, len(tail.tokens) // 2 if _is_bpe_of_one_word(tokenizer) else None)


def _is_bpe_of_one_word(tokenizer: Any) -> bool:
    """Whether the model is BPE and nothing splits a text into words, as in Llama 2."""
    splitter = tokenizer.pre_tokenizer
    switch = {"ByteLevel": "use_regex", "Metaspace": "split"}.get(type(splitter).__name__, "")
    splits = splitter is not None and getattr(splitter, switch, True)
    return type(tokenizer.model).__name__ == "BPE" and not splits


def _united(tokenizer: Any, left: TextWindow, right: TextWindow, windows: Iterator[TextWindow]) -> TextWindow:
    """One window of `left`, `right` and as many others as make it twice as long as `left`.

    Each time it doubles, so the time for a text that can't be split is proportional to its length.
    """
    parts = [left.text, right.text[OVERLAP:]]
    while sum(map(len, parts)) < 2 * len(left.text) and (more := next(windows, None)):
        parts.append(more.text[OVERLAP:])
    (window,) = _encode(tokenizer, ["".join(parts)])
    return window


def _encoded(tokenizer: Any, text: TextIO) -> Iterator[TextWindow]:
    parts = _overlapping(text)
    while texts := list(islice(parts, TOGETHER)):
        yield from _encode(tokenizer, texts)


def _encode(tokenizer: Any, texts: list[str]) -> list[TextWindow]:
    with tokenizer_failures():
        encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    return [TextWindow(text, encoding) for text, encoding in zip(texts, encodings, strict=True)]


def _overlapping(text: TextIO) -> Iterator[str]:
    tail = ""
    while piece := text.read(WINDOW):
        yield tail + piece
        tail = (tail + piece)[-OVERLAP:]


@contextmanager
def tokenizer_failures() -> Iterator[None]:
    """Raise ValueError for everything that the tokenizers library raises.

    It has no exceptions of its own, and a panic of its Rust code is not an Exception
    (https://pyo3.rs/main/doc/pyo3/panic/struct.panicexception).
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the tokenizer fails: {error}") from error
