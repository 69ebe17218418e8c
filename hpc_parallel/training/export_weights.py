"""Exports a checkpoint's weights as one safetensors file that may be larger than the memory.

The header is written and the file gets its size first. Then each tensor is read into its byte_range in a
mapping of the file (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hpc_parallel.config.class_paths import target_problems
from hpc_parallel.problems import ConfigError, raise_if_any
from hpc_parallel.record.checkpoint_index import Checkpoint, sync_folder
from hpc_parallel.record.credentials import public_part, without_credentials
from hpc_parallel.record.safe_write import replacing
from hpc_parallel.record.safetensors_header import LENGTH_BYTES
from hpc_parallel.strategies.whole_model import build_whole
from hpc_parallel.training.load_weights import CheckpointWeights

DTYPES = {  # names of the format
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip
ALIGNMENT = 8  # bytes; the size of the widest dtype


def write(checkpoint: Checkpoint, output: Path, *, library_names: bool = False) -> int:
    """Write the weights to a temporary file and rename it to `output`; returns its size in bytes.

    `library_names`: use the names of the model's library. Raises ConfigError if the model has none, and
    OSError.
    """
    config: dict[str, Any] = checkpoint.manifest["config"]
    weights = CheckpointWeights(checkpoint)
    rename = library_name(config["model"]) if library_names else str
    ranges = _byte_ranges(weights)
    table: dict[str, Any] = {"__metadata__": _metadata(checkpoint, config)}
    for name, byte_range in ranges.items():
        table[rename(name)] = {
            "dtype": DTYPES[weights.dtypes[name]],
            "shape": list(weights.shapes[name]),
            "data_offsets": [byte_range.start, byte_range.stop],
        }
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % ALIGNMENT)
    start = LENGTH_BYTES + len(header)
    size = start + max((byte_range.stop for byte_range in ranges.values()), default=0)
    with replacing(output, mode=0o666) as file:
        file.write(len(header).to_bytes(LENGTH_BYTES, "little") + header)
        file.flush()
        os.posix_fallocate(file.fileno(), 0, size)  # raises OSError now if the disk is full
        path = f"/proc/self/fd/{file.fileno()}"  # valid even if another process renames the file
        mapped = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)[start:]
        tensors = {
            name: mapped[byte_range].view(weights.dtypes[name]).view(weights.shapes[name])
            for name, byte_range in ranges.items()
        }
        weights.fill(tensors)
    sync_folder(output.parent)
    return size


def _byte_ranges(weights: CheckpointWeights) -> dict[str, slice]:
    """The bytes of each tensor after the header; widest dtypes first, so that each tensor is aligned."""
    ranges: dict[str, slice] = {}
    end = 0
    for name in sorted(weights.shapes, key=lambda name: (-weights.dtypes[name].itemsize, name)):
        begin, end = end, end + torch.Size(weights.shapes[name]).numel() * weights.dtypes[name].itemsize
        ranges[name] = slice(begin, end)
    return ranges


def _metadata(checkpoint: Checkpoint, config: dict[str, Any]) -> dict[str, str]:
    return {
        "format": "pt",
        "step": str(checkpoint.step),
        "samples": str(checkpoint.step * config["training"]["global_batch_size"]),
        "model": json.dumps(without_credentials(config["model"])),
        "config": json.dumps(public_part(config)),  # users share the file
    }


def library_name(model: dict[str, Any]) -> Callable[[str], str]:
    """Full name -> the name in the model's own code or library. Raises ConfigError if the model has none."""
    raise_if_any(target_problems("model._target_", model["_target_"]))
    layered_model: Any = build_whole(model, seed=0)  # for its names only
    if not hasattr(layered_model, "library_name"):
        raise ConfigError([f"--library-names: {model['_target_']} is not from a library. Try without it."])
    rename: Callable[[str], str] = layered_model.library_name
    return rename
