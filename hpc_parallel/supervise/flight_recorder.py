"""Which collectives a rank has entered: torch's flight recorder, asked by a failing rank or read from a dump.

The recorder keeps the last ones of every process group in memory, for gloo and NCCL alike; the loop pays
nothing of ours. After a time-out NCCL's watchdog writes them beside the logs and ends the process.
Importing this imports no torch. Sends and receives of a pipeline over gloo are not in it.
"""

from __future__ import annotations

import io
import json
import pickle
from collections import defaultdict
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from hpc_parallel.record.run_folder import RunFolder

KEPT = 32  # collectives of a group in a rank's record
_DUMP_BYTES = 64 * 2**20  # a dump that is larger is none of ours
# Its present name -> the older one, which torch still reads.
_VARIABLES = {
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "TORCH_NCCL_DUMP_ON_TIMEOUT",
}


def set_variables(folder: RunFolder, environment: MutableMapping[str, str]) -> None:
    """Turn the recorder on where the user has not said otherwise; before the first process group."""
    prefix = str(folder.logs / "collectives-rank-")
    for (name, older), value in zip(_VARIABLES.items(), ("2000", prefix, "1"), strict=True):
        if older not in environment:
            environment.setdefault(name, value)


def dump_of(folder: RunFolder, *, rank: int) -> Path:
    """Where torch writes the rank's own after a time-out."""
    return folder.logs / f"collectives-rank-{rank}"


def entered() -> list[dict[str, Any]]:
    """The newest collectives of this process by group, as `by_group` has them; none if torch can't tell."""
    try:
        import torch.distributed as dist

        from hpc_parallel.torch_internals import process_groups

        return by_group(recorded(), members=process_groups()) if dist.is_initialized() else []
    except Exception as error:  # a failure is being recorded: this must not hide it
        print(f"no word from the flight recorder: {type(error).__name__}: {error}", flush=True)
        return []


def recorded() -> list[dict[str, Any]]:
    """torch's own entries of this process, in the order in which they began.

    Raises what torch raises where its recorder is off (TORCH_FR_BUFFER_SIZE=0).
    """
    from hpc_parallel.torch_internals import flight_recorder_entries

    return sorted(flight_recorder_entries(), key=lambda entry: int(entry["time_created_ns"]))


def read_dump(path: Path) -> list[dict[str, Any]]:
    """The same from what torch has written; nothing where there is no such file, or another content."""
    try:
        if path.stat().st_size > _DUMP_BYTES:
            return []
        dump = _Plain(io.BytesIO(path.read_bytes())).load()
        config = dump.get("pg_config", {})
        members = {
            str(group["name"]): json.loads(group["ranks"]) for group in config.values() if group.get("name")
        }
        return by_group(dump.get("entries", []), members=members)
    except (
        OSError,
        pickle.UnpicklingError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        EOFError,
        IndexError,
    ):
        return []


def by_group(
    entries: Iterable[Mapping[str, Any]], *, members: Mapping[str, Sequence[int]]
) -> list[dict[str, Any]]:
    """Of each group its name, its `ranks` (global), and its `calls` in order.

    A call is [number, name, input sizes, when it was entered in ns]. A group of two backends counts for
    each, and is two here.
    """
    calls: dict[tuple[str, str], list[list[Any]]] = defaultdict(list)
    for entry in entries:
        if not entry.get("is_p2p"):
            backend, _, name = str(entry["profiling_name"]).rpartition(":")
            call = [entry["collective_seq_id"], name, entry["input_sizes"], entry["time_created_ns"]]
            calls[str(entry["process_group"][0]), backend].append(call)
    return [
        {"group": f"{group} {backend}", "ranks": list(members.get(group, ())), "calls": found[-KEPT:]}
        for (group, backend), found in calls.items()
    ]


class _Plain(pickle.Unpickler):
    """Lists, tables, words and numbers, as torch makes its dump of; a pickle of anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a dump of collectives")
