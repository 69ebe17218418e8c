"""A checkpoint's weights as one safetensors file, written without ever being whole in memory.

The file gets its size and its table of names first; then each tensor is read into its place in a mapping
of the file (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate

from hpc_parallel.config.checks.starting_weights import LENGTH_BYTES
from hpc_parallel.problems import ConfigError
from hpc_parallel.record.checkpoint_index import Checkpoint, sync_folder
from hpc_parallel.record.credentials import public_part, without_credentials
from hpc_parallel.record.safe_write import replacing
from hpc_parallel.training.load_weights import CheckpointWeights

DTYPES = {  # as the format calls them
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip
ALIGNMENT = 8  # bytes; the widest number's


def write(checkpoint: Checkpoint, output: Path, *, library_names: bool = False) -> int:
    """Write `output` beside and rename it; returns its bytes.

    Raises ConfigError where the model's library has no names of its own; OSError.
    """
    manifest = checkpoint.manifest
    config: dict[str, Any] = manifest["config"]
    weights = CheckpointWeights(checkpoint)
    rename = _library_name(config["model"]) if library_names else str
    # Widest numbers first, so that each tensor is aligned to its own.
    names = sorted(weights.shapes, key=lambda name: (-weights.dtypes[name].itemsize, name))
    about = {
        "format": "pt",
        "step": str(checkpoint.step),
        "samples": str(checkpoint.step * config["training"]["global_batch_size"]),
        "model": json.dumps(without_credentials(config["model"])),
        "config": json.dumps(public_part(config)),  # the file is made to be passed on
    }
    table: dict[str, Any] = {"__metadata__": about}
    places: dict[str, slice] = {}
    end = 0
    for name in names:
        begin, end = end, end + torch.Size(weights.shapes[name]).numel() * weights.dtypes[name].itemsize
        places[name] = slice(begin, end)
        table[rename(name)] = {
            "dtype": DTYPES[weights.dtypes[name]],
            "shape": list(weights.shapes[name]),
            "data_offsets": [begin, end],
        }
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % ALIGNMENT)
    start = LENGTH_BYTES + len(header)
    with replacing(output, mode=0o666) as file:
        file.write(len(header).to_bytes(LENGTH_BYTES, "little") + header)
        file.flush()
        os.posix_fallocate(file.fileno(), 0, start + end)  # a full disk is told here
        opened = f"/proc/self/fd/{file.fileno()}"  # whatever others do to its name meanwhile
        mapped = torch.from_file(opened, shared=True, size=start + end, dtype=torch.uint8)[start:]
        weights.fill(
            {
                name: mapped[place].view(weights.dtypes[name]).view(weights.shapes[name])
                for name, place in places.items()
            }
        )
    sync_folder(output.parent)
    return start + end


def _library_name(model: dict[str, Any]) -> Callable[[str], str]:
    with torch.device("meta"):
        named = instantiate(model)
    if not hasattr(named, "library_name"):
        raise ConfigError([f"--library-names: {model['_target_']} is no library's. Try without it."])
    rename: Callable[[str], str] = named.library_name
    return rename
