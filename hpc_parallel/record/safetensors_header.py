"""The header of a safetensors file: names, shapes and metadata, read without torch.

A safetensors file has eight bytes for the length of the header, a header in JSON with the names, and the
numbers (https://huggingface.co/docs/safetensors). Reading it executes nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hpc_parallel.record.safe_read import MIB, open_regular, parse_json
from hpc_parallel.record.values import integer, table

LENGTH_BYTES = 8
MOST_HEADER_BYTES = 16 * MIB  # enough for 100,000 tensors; the parsed header takes up to 30 times as much


def read_header(path: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Returns the shapes of the tensors by name, and the metadata of the file.

    Raises ValueError if the file has another format or is incomplete, and OSError.
    """
    with open_regular(path, follow=True) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if length > MOST_HEADER_BYTES:
            raise ValueError("it is not a safetensors file")
        header = file.read(length)
    try:
        tensors = parse_json(header.decode())
        metadata = tensors.pop("__metadata__", {})
        shapes = {name: _numbers(entry["shape"]) for name, entry in tensors.items()}
        end = max((_numbers(entry["data_offsets"])[1] for entry in tensors.values()), default=0)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError):
        raise ValueError("it is not a safetensors file") from None
    expected = LENGTH_BYTES + length + end
    if size != expected:
        raise ValueError(f"it has {size} of {expected} bytes")
    return shapes, {key: value for key, value in table(metadata).items() if isinstance(value, str)}


def _numbers(values: Any) -> tuple[int, ...]:
    """Raises ValueError."""
    numbers = [integer(value) for value in values]
    if not all(number is not None and number >= 0 for number in numbers):
        raise ValueError("not a list of counts")
    return tuple(number for number in numbers if number is not None)
