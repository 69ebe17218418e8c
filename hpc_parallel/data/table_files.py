"""The Parquet and Arrow files of a folder, and the types of their columns, without torch.

The login node reads the schema and, in parquet files, the statistics at the end of the file. pyarrow parses
both; no code of the file is executed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hpc_parallel.data.folder_files import list_files
from hpc_parallel.record.safe_read import open_regular

ENDINGS = (".parquet", ".arrow")


@dataclass(frozen=True)
class FileColumn:
    """A column of a file: its type, the depth of its lists, and its smallest and largest number if known.

    nulls: the rows that are null, for a Parquet column of numbers. Its value for lists is 0, because their
    statistics also count empty lists.
    """

    kind: str  # as pyarrow spells the type
    dims: int  # 0 for numbers, 1 for lists of numbers, ...
    is_numeric: bool
    is_integer: bool
    bounds: tuple[int, int] | None
    nulls: int


def find_files(path: str) -> list[Path]:
    """Returns the Parquet files or the Arrow files of a folder, sorted by name. `path` may also be one file.

    Raises ValueError if the folder has no such file, or files of both kinds.
    """
    root = Path(os.path.expanduser(path))
    found = list_files(root, matches=_is_table)
    found.require()
    files = sorted(file for file in found.matching.values() if _is_table(file))
    kinds = {file.suffix.lower() for file in files}
    if len(kinds) != 1:
        rule = "has both .parquet and .arrow files" if kinds else "has no .parquet or .arrow file"
        raise ValueError(f"{root} {rule}: data.path must be a folder of one of them")
    return files


def _is_table(file: Path) -> bool:
    return file.suffix.lower() in ENDINGS


def is_parquet(file: Path) -> bool:
    """Whether it is a Parquet file, by its name; otherwise it is an Arrow file."""
    return file.suffix.lower() == ".parquet"


def with_rows(files: Sequence[Path], *, most: int | None = None) -> list[Path]:
    """The files that have rows, at most `most` of them.

    A parquet file without rows has no column type, and datasets can't read it.

    Raises ValueError if a file can't be read, or if none has a row.
    """
    filled = list(islice((file for file in files if not is_parquet(file) or _opened(file)[0].num_rows), most))
    if not filled:
        raise ValueError(f"{files[0]} has no row, nor has any other file")
    return filled


def read_columns(file: Path, names: tuple[str, ...]) -> dict[str, FileColumn]:
    """The columns of `file` by name.

    Raises ValueError if a column is missing, or if the file can't be read.
    """
    metadata, schema = _opened(file)
    missing = [name for name in names if name not in schema.names]
    if missing:
        raise ValueError(f"{file} has no column {missing[0]!r}, but {', '.join(schema.names) or 'none'}")
    return {name: _column(schema.field(name).type, _statistics(metadata, name)) for name in names}


def row_count(file: Path) -> int:
    """The number of rows. Raises ValueError if the file can't be read."""
    import pyarrow as pa

    if is_parquet(file):
        return int(_opened(file)[0].num_rows)
    return sum(batch.num_rows for batch in pa.ipc.open_stream(pa.memory_map(str(file))))


def _opened(file: Path) -> tuple[Any, Any]:
    """The metadata (None for an Arrow file) and the schema. Raises ValueError if the file can't be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with open_regular(file, follow=True):  # pyarrow would block on a named pipe
        pass
    try:
        if is_parquet(file):
            metadata = pq.read_metadata(file)
            return metadata, metadata.schema.to_arrow_schema()
        return None, pa.ipc.open_stream(pa.memory_map(str(file))).schema
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{file} can't be read: {error}") from error


def _column(kind: Any, statistics: Sequence[Any]) -> FileColumn:
    import pyarrow as pa

    item, dims = kind, 0
    while pa.types.is_list(item) or pa.types.is_large_list(item) or pa.types.is_fixed_size_list(item):
        item, dims = item.value_type, dims + 1
    is_integer = pa.types.is_integer(item)
    is_numeric = is_integer or pa.types.is_floating(item) or pa.types.is_boolean(item)
    nulls = 0 if dims else sum(part.null_count or 0 for part in statistics if part is not None)
    return FileColumn(
        str(kind), dims=dims, is_numeric=is_numeric, is_integer=is_integer, bounds=_bounds(statistics),
        nulls=nulls,
    )  # fmt: skip


def _statistics(metadata: Any, name: str) -> list[Any]:
    """The statistics of a column in each row group; None in place of those that a group lacks."""
    statistics = []
    for group in range(0 if metadata is None else metadata.num_row_groups):
        row_group = metadata.row_group(group)
        columns = [row_group.column(index) for index in range(row_group.num_columns)]
        parts = [column for column in columns if column.path_in_schema.partition(".")[0] == name]
        statistics.append(parts[0].statistics if len(parts) == 1 else None)
    return statistics


def _bounds(statistics: Sequence[Any]) -> tuple[int, int] | None:
    """The smallest and the largest integer by the row groups' statistics; None if a group has none."""
    if not statistics or any(part is None or not part.has_min_max for part in statistics):
        return None
    bounds = min(part.min for part in statistics), max(part.max for part in statistics)
    return bounds if all(isinstance(value, int) for value in bounds) else None
