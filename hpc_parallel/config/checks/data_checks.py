"""Check the data: its class, its files, whether the model can train on it, and whether its tokens fit.

The checks read only the schemas and statistics of Parquet files, and import no torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpc_parallel.config.checks.key_checks import sizes_are_legal
from hpc_parallel.config.checks.suggestions import multiples_near, paths_near
from hpc_parallel.config.class_paths import class_tables, target_problems
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.script import TASK
from hpc_parallel.data import text, tokens  # neither imports torch
from hpc_parallel.data.table_files import FileColumn, find_files, read_columns, with_rows
from hpc_parallel.layout.counts import class_path, count
from hpc_parallel.layout.model_data_schema import (
    CellsDataConfig,
    ConvNetConfig,
    DatasetDataConfig,
    DigitsDataConfig,
    HuggingFaceConfig,
    MoeTransformerConfig,
    ParquetDataConfig,
    SegmenterConfig,
    TextDataConfig,
    TokensDataConfig,
    TransformerConfig,
    UNetConfig,
)
from hpc_parallel.problems import Problem, Problems

TOKENS = {"text": TextDataConfig._target_, "tokens": TokensDataConfig._target_}
# The data that our models train on, by class path. A user's class may take any data.
FITTING = {
    TransformerConfig._target_: TOKENS,
    MoeTransformerConfig._target_: TOKENS,
    HuggingFaceConfig._target_: TOKENS,
    ConvNetConfig._target_: {"digits": DigitsDataConfig._target_},
    SegmenterConfig._target_: {"cells": CellsDataConfig._target_},
    UNetConfig._target_: {"cells": CellsDataConfig._target_},
}
# Our models that can't keep packed documents apart.
MOST_FILES = 256  # Parquet files whose schemas are read; the job reads all files


def find_problems(config: RunConfig) -> Problems:
    """The data must exist, and its tokens must fit the model's vocabulary."""
    if not isinstance(config.data, dict) or not config.data.get("_target_"):
        yield "data._target_ is missing: name the class of your data. Try data=text."
        return
    for key, table in class_tables("data", config.data):
        yield from target_problems(f"{key}._target_", table["_target_"])
    stated = config.data.get("vocab_size")
    vocab_size = 256 if config.data["_target_"].endswith("TextData") else stated
    if (path := config.data.get("path")) is not None:
        if not path or not os.path.exists(os.path.expanduser(path)):
            near = paths_near(Path(os.path.expanduser(path))) if path else ()
            yield Problem("data.path", path, "does not exist here", near)
        else:
            try:
                vocab_size = _stored_vocab_size(config.data) or vocab_size
            except (ValueError, OSError) as error:
                yield f"data.path = {path} can't be used: {error}"
    key, room = count(config, "vocabulary")
    if isinstance(vocab_size, int) and room and room < vocab_size:
        rule = f"is too small for the data, whose tokens run from 0 to {vocab_size - 1}"
        yield Problem(key, room, rule, (vocab_size,))


def packing_problems(config: RunConfig) -> Problems:
    """What samples of tokens need of data, and of our models (others: `strategies/packed_documents.py`)."""
    data, model = config.data, class_path(config.model)
    target = class_path(data)
    if target == TokensDataConfig._target_:
        yield from _of_tokens(data)
    elif target == DatasetDataConfig._target_ and data["packing"]:
        for key, legal in (("sequence_length", 1024), ("vocab_size", 50257)):
            if data[key] is None:
                yield Problem(f"data.{key}", None, "must be given with data.packing=true", (legal,))
    if not data.get("packing"):
        return
    if config.task.name == "generate":
        rule = "can't be used with task=generate, which continues samples without a mask of documents"
        yield Problem("data.packing", True, rule, (False,))
    if target == ParquetDataConfig._target_ and data["target"] is not None:
        rule = "can't be used with data.target: a packed document is a row of token ids (data.input)"
        yield Problem("data.packing", True, rule, (False,))
    if model == MoeTransformerConfig._target_ and config.model["balance"]:
        rule = (
            "can't be used with data.packing=true: this loss balances whole samples, which mixes documents "
            "and padding. model.balance_step balances without a loss"
        )
        yield Problem("model.balance", config.model["balance"], rule, (0.0,))


def _of_tokens(data: dict[str, Any]) -> Problems:
    """The token that ends a document must be one of the vocabulary, and is needed for packing only.

    Without packing, a sample must fit the smaller part of the tokens.
    """
    separator, length = data["separator"], data["sequence_length"]
    try:
        description = tokens.read_description(Path(os.path.expanduser(data["path"])))
    except (ValueError, OSError):  # find_problems reports it
        return
    most = description["vocab_size"] - 1
    least = min(tokens.parts_of(description["count"], data["validation_share"]))
    if 0 < least <= length and not data["packing"]:
        rule = f"needs {length + 1:,} tokens, and the smaller of training and validation has {least:,}"
        yield Problem("data.sequence_length", length, rule, (least - 1,) if least > 1 else ())
    if not data["packing"]:
        if separator is not None:
            yield Problem("data.separator", separator, "is used with data.packing=true only", (None,))
    elif separator is None:
        rule = (
            "must be given with data.packing=true: the id of the token that ends each document "
            "(`tokenize --end-of-text` prints it)"
        )
        yield Problem("data.separator", None, rule, (most,))
    elif separator > most:
        yield Problem("data.separator", separator, f"is no token: the file has tokens 0 to {most}", (most,))


def _stored_vocab_size(data: dict[str, Any]) -> int | None:
    """The vocabulary size of the tokens at `data.path`. Raises ValueError if the files are other data."""
    if data["_target_"] == TokensDataConfig._target_:
        return tokens.read_description(Path(os.path.expanduser(data["path"])))["vocab_size"]
    if data["_target_"] == TextDataConfig._target_:
        text.find_files(data["path"], pattern=data["pattern"])
    return None


def data_warnings(config: RunConfig) -> Sequence[str]:
    """Name what is left out of a folder of text files."""
    data = config.data
    if config.task.name == TASK or class_path(data) != TextDataConfig._target_ or data["path"] is None:
        return ()
    return _text_left_out(data["path"], data["pattern"], data["max_bytes"])


@cache  # all runs of a sweep have the same folder
def _text_left_out(path: str, pattern: str, most_bytes: int) -> Sequence[str]:
    found = text.find_files(path, pattern=pattern)
    lines = (
        [f"data.path={path}: {sentence}"] if (sentence := found.left_out(f"data.pattern={pattern}")) else []
    )
    size = sum(file.stat().st_size for file in found.matching.values())
    if most_bytes < size:
        read = f"only the first {most_bytes:,} of {size:,} bytes are read"
        lines.append(f"data.path={path}: {read}. For all, add data.max_bytes={size}.")
    return lines


def fit_problems(config: RunConfig) -> Problems:
    """Each of our models can train only on some of our data sets."""
    our_data = {path: name for fitting in FITTING.values() for name, path in fitting.items()}
    model, data = class_path(config.model), class_path(config.data)
    fitting = FITTING.get(model or "")
    if fitting and data in our_data and data not in fitting.values():
        kind = str(model).rpartition(".")[2]
        legal = next(iter(fitting))  # of others, data=tokens needs a file too
        yield Problem("data", our_data[data], f"is not data that a {kind} can train on", (legal,))


def digit_problems(config: RunConfig) -> Problems:
    """`data=digits` needs scikit-learn, and images of whole digits."""
    if find_spec("sklearn") is None:
        yield "data = digits needs scikit-learn, which is not installed here (pip install scikit-learn)."
    if not sizes_are_legal(config):
        return
    for side in ("height", "width"):
        size = config.data[side]
        if size % 8:
            rule = "is not a multiple of 8, the side of a digit"
            yield Problem(f"data.{side}", size, rule, multiples_near(size, 8))


def parquet_problems(config: RunConfig) -> Problems:
    """Columns, tokens and sizes of `data=parquet`."""
    data = config.data
    if find_spec("datasets") is None:
        yield "data = parquet needs the library datasets, which is not installed (pip install datasets)."
        return
    if data["target"] is None:
        yield from _sizes_of_tokens(data)
    if not os.path.exists(os.path.expanduser(data["path"] or "")):  # find_problems reports a missing path
        return
    names = {"data.input": data["input"]} | ({"data.target": data["target"]} if data["target"] else {})
    try:
        files = with_rows(find_files(data["path"]), most=MOST_FILES)
        columns = [read_columns(file, tuple(names.values())) for file in files]
    except (ValueError, OSError) as error:
        yield f"data.path = {data['path']} can't be used: {error}."
        return
    for key, name in names.items():
        yield from _column(key, name, [parts[name] for parts in columns], are_tokens=not data["target"])
        if data["packing"] and not data["target"] and columns[0][name].dims != 1:
            rule = "names a column without one list of token ids in each row, which is a packed document"
            yield Problem(key, name, rule)
        nulls = [(file, parts[name].nulls) for file, parts in zip(files, columns, strict=True)]
        yield from (
            Problem(key, name, f"names a column with {count} nulls in {file}: leave out such rows")
            for file, count in nulls if count
        )  # fmt: skip
    yield from _tokens(config, [parts[data["input"]] for parts in columns])


def _sizes_of_tokens(data: dict[str, Any]) -> Problems:
    rule = "must be given for token ids (data.target = null)"
    of_vocabulary = f"{rule}: the number of tokens that the tokenizer has"
    if data["vocab_size"] is None:
        yield Problem("data.vocab_size", None, of_vocabulary, (50257,))
    if data["sequence_length"] is None:
        yield Problem("data.sequence_length", None, rule, (1024,))


def _column(key: str, name: str, columns: list[FileColumn], *, are_tokens: bool) -> Problems:
    kinds = sorted({column.kind for column in columns})
    if len(kinds) > 1:
        yield Problem(key, name, f"names columns of different types: {', '.join(kinds)}")
    elif are_tokens and not columns[0].is_integer:
        rule = f"names a column of {kinds[0]}, but token ids are integers or lists of them"
        yield Problem(key, name, f"{rule} (for inputs of another kind, set data.target)")
    elif not columns[0].is_numeric:
        rule = f"names a column of {kinds[0]}, but numbers and lists of numbers can be read"
        yield Problem(key, name, f"{rule}; for others, write a dataset (data=dataset)")


def _tokens(config: RunConfig, columns: list[FileColumn]) -> Problems:
    """The vocabulary must hold all tokens, by the statistics of the files."""
    size, name = config.data["vocab_size"], config.data["input"]
    bounds = [column.bounds for column in columns if column.bounds is not None]
    if not isinstance(size, int) or size < 1 or not bounds or not columns[0].is_integer:
        return
    smallest, largest = min(low for low, _ in bounds), max(high for _, high in bounds)
    if smallest < 0:
        rule = (
            f"names a column with the token {smallest}, but token ids start at 0: cut padding off the texts"
        )
        yield Problem("data.input", name, rule)
    if largest >= size:
        rule = f"is too small: the files have the token {largest}"
        yield Problem("data.vocab_size", size, rule, (max(largest + 1, count(config, "vocabulary")[1] or 0),))
