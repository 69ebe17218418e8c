"""Check the files of `data=parquet` by their schemas and statistics, without torch."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

from hpc_parallel.config.counts import count
from hpc_parallel.config.model_data_schema import ParquetDataConfig
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.data.table_files import FileColumn, find_files, read_columns, with_rows
from hpc_parallel.problems import Problem, Problems

MOST_FILES = 256  # whose schemas are read; the job reads all


def find_problems(config: RunConfig) -> Problems:
    data = config.data
    if not isinstance(data, dict) or data.get("_target_") != ParquetDataConfig._target_:
        return
    if find_spec("datasets") is None:
        yield "data = parquet needs the library datasets, which is not installed (pip install datasets)."
        return
    yield from _sizes(data)
    if not os.path.exists(os.path.expanduser(data["path"] or "")):  # all_checks._data reports it
        return
    names = {"data.input": data["input"]} | ({"data.target": data["target"]} if data["target"] else {})
    try:
        files = with_rows(find_files(data["path"])[:MOST_FILES])
        columns = [read_columns(file, tuple(names.values())) for file in files]
    except (ValueError, OSError) as error:
        yield f"data.path = {data['path']} can't be used: {error}."
        return
    for key, name in names.items():
        yield from _column(key, name, [parts[name] for parts in columns], are_tokens=not data["target"])
    yield from _vocabulary(config, [parts[data["input"]] for parts in columns])


def _sizes(data: dict[str, Any]) -> Problems:
    if data["target"] is not None:
        return
    rule = "must be given for token ids (data.target = null)"
    if data["vocab_size"] is None:
        yield Problem(
            "data.vocab_size", None, f"{rule}: the number of tokens that the tokenizer has", (50257,)
        )
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


def _vocabulary(config: RunConfig, columns: list[FileColumn]) -> Problems:
    """The vocabulary must hold the largest token that the statistics of the files name."""
    size = config.data["vocab_size"]
    largest = max((column.largest for column in columns if column.largest is not None), default=None)
    if not isinstance(size, int) or size < 1 or largest is None or not columns[0].is_integer:
        return
    if largest >= size:
        rule = f"is too small: the files have the token {largest}"
        yield Problem("data.vocab_size", size, rule, (max(largest + 1, count(config, "vocabulary")[1] or 0),))
