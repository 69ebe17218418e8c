"""Samples from parquet or Arrow files, through Hugging Face's library datasets (`pip install datasets`).

The library converts parquet files once to Arrow files in its cache, and maps these into memory. Nothing is
downloaded and no script is run, because only local files are named. Columns are read as plain numbers,
because the library's decoders may open other files.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"  # read when the library is imported

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hpc_parallel.data.dataset import DatasetData
from hpc_parallel.data.packing import packed_parts
from hpc_parallel.data.table_files import find_files, is_parquet, row_count, with_rows
from hpc_parallel.data.tokens import Description, sampled_digest
from hpc_parallel.data.windows import Windows
from hpc_parallel.user_code import causes

if TYPE_CHECKING:
    from hpc_parallel.data.sampler import Samples


class ParquetData:
    """The rows of a folder of files.

    With a `target`, each row is a sample: the columns `input` and `target`. They have numbers, or lists of
    numbers of the same length in all rows. Without a `target`, `input` has token ids. All rows in order are
    one text, which is cut into windows of `sequence_length` tokens. The end of the text is held out. With
    `packing`, each row is a document, and samples have whole documents (`packing.py`).

    Raises ValueError if the files or their columns can't be used.
    """

    train: Samples
    validation: Samples

    def __init__(
        self,
        *,
        path: str,
        input: str = "input_ids",
        target: str | None = None,
        sequence_length: int | None = None,
        vocab_size: int | None = None,
        validation_share: float = 0.05,
        packing: bool = False,
    ) -> None:
        files = with_rows(find_files(path))
        rows = open_rows(files, columns=[input] if target is None else [input, target])
        _require_numbers(rows, files)
        if target is not None:
            samples = Rows(rows, input=input, target=target)
            data = DatasetData(
                dataset=samples, validation_share=validation_share, sequence_length=sequence_length,
                vocab_size=vocab_size,
            )  # fmt: skip
            vars(self).update(vars(data))
            return
        if vocab_size is None or sequence_length is None:
            raise ValueError("data.vocab_size and data.sequence_length are needed to read token ids")
        tokens = TokenStream.of(rows.data.column(input))
        cut = round(len(tokens) * (1 - validation_share))
        self.sequence_length = sequence_length
        self.sample_shape = (sequence_length,)
        description = Description(vocab_size=vocab_size, tokenizer="", count=len(tokens))
        self.digest = sampled_digest(cast("NDArray[Any]", tokens), description=description)
        if packing:
            chunks = rows.data.column(input).chunks
            lengths = [pc.list_value_length(chunk).to_numpy(zero_copy_only=False) for chunk in chunks]
            ends = np.cumsum(np.concatenate(lengths), dtype=np.int64)
            packed = packed_parts(
                tokens, ends, sequence_length=sequence_length, vocab_size=vocab_size,
                validation_share=validation_share, digest=self.digest,
            )  # fmt: skip
            vars(self).update(packed)
            return
        parts = (("training", tokens.part(0, cut)), ("validation", tokens.part(cut, len(tokens))))
        self.train, self.validation = (
            Windows(cast("NDArray[Any]", part), sequence_length, vocab_size, name) for name, part in parts
        )


def open_rows(files: Sequence[Path], *, columns: Sequence[str]) -> datasets.Dataset:
    """The rows of the files, mapped into memory, with these columns only."""
    datasets.disable_progress_bars()
    names = [str(file) for file in files]
    if is_parquet(files[0]):
        try:
            rows = datasets.Dataset.from_parquet(names, columns=list(columns))
        except Exception as error:
            _raise_if_full(error)
            raise
    else:
        rows = datasets.concatenate_datasets([datasets.Dataset.from_file(name) for name in names])
    return rows.select_columns(list(columns)).with_format("arrow")


def _raise_if_full(error: Exception) -> None:
    """Raise OSError with the folder and a remedy if the library's cache is full, which it does not name."""
    for cause in (error, *causes(error)):
        number = cause.errno if isinstance(cause, OSError) else None
        if number is None and "Not enough disk space" in str(cause):  # it asks before it writes
            number = errno.ENOSPC
        if number in (errno.ENOSPC, errno.EDQUOT):
            cache = str(datasets.config.HF_DATASETS_CACHE)
            remedy = "Rows of parquet files are written there once. Try export HF_DATASETS_CACHE=FOLDER"
            raise OSError(number, f"{os.strerror(number)}. {remedy} on a larger disk", cache) from error


def _require_numbers(rows: datasets.Dataset, files: Sequence[Path]) -> None:
    """Raise ValueError if a row, or a number in its lists, is null."""
    for name in rows.column_names:
        before = 0
        for chunk in rows.data.column(name).chunks:
            if (row := _first_null(chunk)) is not None:
                file, number = _place(before + row, files)
                raise ValueError(
                    f"row {number} of {file} (counted from 0) is null or has a null in the column {name}. "
                    "Leave out such rows when you write the files"
                )
            before += len(chunk)


def _first_null(chunk: Any) -> int | None:
    """The first row that is null, or has a null in its lists."""
    if chunk.null_count:
        row: int = pc.index(pc.is_null(chunk), True).as_py()
        return row
    if pa.types.is_primitive(chunk.type):
        return None
    item = _first_null(chunk.flatten())
    return None if item is None else pc.list_parent_indices(chunk)[item].as_py()


def _place(row: int, files: Sequence[Path]) -> tuple[Path, int]:
    """The file of a row, and its number there."""
    for file in files:
        count = row_count(file)
        if row < count:
            return file, row
        row -= count
    raise ValueError(f"the files in {files[0].parent} have changed while they were read")


class Rows:
    """A map-style dataset of (input, target) arrays."""

    def __init__(self, rows: datasets.Dataset, *, input: str, target: str) -> None:
        self._rows, self._columns = rows, (input, target)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[NDArray[Any], ...]:
        row = self._rows[index]
        return tuple(as_array(row.column(name).combine_chunks(), name=name) for name in self._columns)


def as_array(values: Any, *, name: str) -> NDArray[Any]:
    """Convert the only value of an Arrow array, a number or nested lists of equal lengths, to a numpy array.

    Raises ValueError if lists have different lengths.
    """
    shape = []
    while not pa.types.is_primitive(values.type):
        inner = values.flatten()
        lengths = set(pc.list_value_length(values).to_pylist())
        if len(lengths) != 1:
            raise ValueError(f"the lists in the column {name} have different lengths")
        shape.append(lengths.pop())
        values = inner
    return np.array(values.to_numpy(zero_copy_only=False)).reshape(shape)


class TokenStream:
    """The tokens `start` to `stop` of consecutive chunks, which are mapped from files, not copied."""

    def __init__(self, chunks: Sequence[NDArray[Any]], *, start: int, stop: int) -> None:
        self._chunks, self._start, self._stop = chunks, start, stop
        self._ends = np.cumsum([len(chunk) for chunk in chunks])

    @classmethod
    def of(cls, column: Any) -> TokenStream:
        """The tokens of an Arrow column of numbers or lists of numbers, without nulls."""
        chunks = []
        for chunk in column.chunks:
            while not pa.types.is_primitive(chunk.type):
                chunk = chunk.flatten()
            if len(chunk):
                chunks.append(chunk.to_numpy())
        return cls(chunks, start=0, stop=sum(map(len, chunks)))

    def part(self, start: int, stop: int) -> TokenStream:
        """Returns the tokens `start` to `stop` of this stream."""
        return TokenStream(self._chunks, start=self._start + start, stop=self._start + stop)

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, places: slice | NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens at these places, of the same shape."""
        if isinstance(places, slice):
            places = np.arange(*places.indices(len(self)), dtype=np.int64)
        flat = places.ravel() + self._start
        chunk_indices = np.searchsorted(self._ends, flat, side="right")
        tokens = np.empty(len(flat), dtype=np.int64)
        for number in np.unique(chunk_indices):
            chunk, rows = self._chunks[number], chunk_indices == number
            tokens[rows] = chunk[flat[rows] - (self._ends[number] - len(chunk))]
        return tokens.reshape(places.shape)
