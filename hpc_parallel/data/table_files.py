"""The Parquet and Arrow files of a folder, and the types of their columns, without torch.

The login node reads the schema and, in parquet files, the statistics at the end of the file. pyarrow parses
both; no code of the file is executed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_parallel.record.safe_read import is_foreign_link, open_regular

ENDINGS = (".parquet", ".arrow")


@dataclass(frozen=True)
class FileColumn:
    """A column of a file: its type, the depth of its lists, and its largest number if that is known."""

    kind: str  # as pyarrow spells the type
    dims: int  # 0 for numbers, 1 for lists of numbers, ...
    is_numeric: bool
    is_integer: bool
    largest: int | None


def find_files(path: str) -> list[Path]:
    """Returns the Parquet files or the Arrow files of a folder, sorted by name. `path` may also be one file.

    Raises ValueError if the folder has no such file, or files of both kinds.
    """
    root = Path(os.path.expanduser(path))
    files = [root] if root.is_file() else sorted(root.rglob("*"))
    files = [file for file in files if file.suffix in ENDINGS and os.path.isfile(file)]
    files = [file for file in files if not is_foreign_link(file)]
    kinds = {file.suffix for file in files}
    if len(kinds) != 1:
        rule = "has both .parquet and .arrow files" if kinds else "has no .parquet or .arrow file"
        raise ValueError(f"{root} {rule}: data.path must be a folder of one of them")
    return files


def with_rows(files: Iterable[Path]) -> list[Path]:
    """The files that have rows. A parquet file without rows has no column type, and datasets can't read it.

    Raises ValueError if a file can't be read, or if none has a row.
    """
    files = list(files)
    filled = [file for file in files if file.suffix != ".parquet" or _opened(file)[0].num_rows]
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
    return {name: _column(schema.field(name).type, _largest(metadata, name)) for name in names}


def _opened(file: Path) -> tuple[Any, Any]:
    """The metadata (None for an Arrow file) and the schema. Raises ValueError if the file can't be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with open_regular(file, follow=True):  # pyarrow would block on a named pipe
        pass
    try:
        if file.suffix == ".parquet":
            metadata = pq.read_metadata(file)
            return metadata, metadata.schema.to_arrow_schema()
        return None, pa.ipc.open_stream(pa.memory_map(str(file))).schema
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{file} can't be read: {error}") from error


def _column(kind: Any, largest: int | None) -> FileColumn:
    import pyarrow as pa

    item, dims = kind, 0
    while pa.types.is_list(item) or pa.types.is_large_list(item) or pa.types.is_fixed_size_list(item):
        item, dims = item.value_type, dims + 1
    is_integer = pa.types.is_integer(item)
    is_numeric = is_integer or pa.types.is_floating(item) or pa.types.is_boolean(item)
    return FileColumn(str(kind), dims=dims, is_numeric=is_numeric, is_integer=is_integer, largest=largest)


def _largest(metadata: Any, name: str) -> int | None:
    """The largest integer of a column by the statistics of its row groups; None if a group lacks them."""
    largest = []
    for group in range(0 if metadata is None else metadata.num_row_groups):
        row_group = metadata.row_group(group)
        columns = [row_group.column(index) for index in range(row_group.num_columns)]
        parts = [column for column in columns if column.path_in_schema.partition(".")[0] == name]
        if len(parts) != 1 or parts[0].statistics is None or not parts[0].statistics.has_min_max:
            return None
        largest.append(parts[0].statistics.max)
    return max(largest) if largest and all(isinstance(value, int) for value in largest) else None
