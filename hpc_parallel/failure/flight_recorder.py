"""The collectives that a rank has entered, from torch's flight recorder or from its dump.

The recorder keeps the last collectives of every process group in memory, for gloo and NCCL. We add
nothing to the training loop. After a time-out NCCL's watchdog writes the dump beside the logs and ends
the process. NCCL also writes it when asked by its pipe, and the process goes on (`DumpRequest`). This
module imports torch only when needed. gloo's sends and receives of a pipeline are not recorded.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hpc_parallel.machine.fabric import set_unset
from hpc_parallel.record.run_folder import RunFolder

MAX_CALLS = 32  # collectives per group in a rank's record
BEFORE_STEPS = ""  # the phase of what a rank entered before its first step
_DUMP_BYTES = 64 * 2**20  # a larger file is not a dump of ours
# The current name -> the older name, which torch 2.11 to 2.14 still read; some have one name only.
_VARIABLES = {
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "TORCH_NCCL_DUMP_ON_TIMEOUT",
    # Without it NCCL's collectives have no event at their start, so no record says which devices have begun.
    "TORCH_NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
}
_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"  # torch adds the rank and `.pipe`
# What a damaged dump, or one that is not complete yet, can raise.
_DAMAGED = (OSError, pickle.UnpicklingError, ValueError, TypeError, LookupError, AttributeError, EOFError)


class Call(NamedTuple):
    """A collective that a rank has entered."""

    number: int  # in its group
    name: str
    sizes: str  # of its inputs
    time_ns: int
    phase: str | None  # of the training, such as `step 3`; None if it is not known


@dataclass(frozen=True)
class Entered:
    """The newest collectives of a rank in one group, in order. Each backend of a group counts its own."""

    group: str  # its name and the backend
    ranks: list[int]  # global ranks of the members; empty if they are not known
    calls: list[Call]


@dataclass(frozen=True)
class Collective:
    """The last collective that a rank began, from torch's flight recorder."""

    name: str
    group: str  # torch's name and description of the group, which all its ranks share
    sequence: int  # number in its group
    complete: bool = False
    is_p2p: bool = False  # a send or receive, which each rank counts for itself

    def __str__(self) -> str:
        name, _, description = self.group.partition(" ")
        group = f"group {name}" if description == "undefined" else description or name
        return f"{self.name} {self.sequence} of {group}"


@dataclass(frozen=True)
class DeviceProgress:
    """How far a rank's GPU is in the collectives that the host has queued on it."""

    waits_in: Collective | None  # the first that it has begun and not completed: it waits for other GPUs
    next: Collective | None  # the first that it has not begun
    completed: dict[str, int]  # group -> number of the last completed collective
    queued: dict[str, int] = field(default_factory=dict)  # group -> number of the last one of the host


def set_variables(folder: RunFolder, environment: MutableMapping[str, str]) -> dict[str, str]:
    """Turn the recorder on unless the user has set it; call this before the first process group.

    Returns the reason for each variable that was set.
    """
    prefix = str(folder.logs / "collectives-rank-")
    values = zip(_VARIABLES.items(), ("2000", prefix, "1", "1"), strict=True)
    variables = {name: value for (name, older), value in values if older not in environment}
    return set_unset(environment, variables, reason="the last collectives, for failure.json")


def dump_of(folder: RunFolder, *, rank: int) -> Path:
    """The file to which torch writes the rank's collectives after a time-out."""
    return folder.logs / f"collectives-rank-{rank}"


def entered(phases: Sequence[tuple[int, str]] = ()) -> list[Entered]:
    """The newest collectives of this process, as `by_group` returns them; empty if torch has no record."""
    try:
        import torch.distributed as dist

        from hpc_parallel.torch_internals import process_groups

        known = dist.is_initialized()
        return by_group(recorded(), members=process_groups(), phases=phases) if known else []
    except Exception as error:  # must not hide the failure that is being recorded
        print(f"the flight recorder can't be read: {type(error).__name__}: {error}", flush=True)
        return []


def recorded() -> list[dict[str, Any]]:
    """Torch's entries of this process, in the order in which they began.

    Raises torch's exception if the recorder is off (TORCH_FR_BUFFER_SIZE=0).
    """
    from hpc_parallel.torch_internals import flight_recorder_entries

    return sorted(flight_recorder_entries(), key=lambda entry: int(entry["time_created_ns"]))


@dataclass(frozen=True)
class DumpRequest:
    """Asks NCCL in another process of this host for a dump. The thread that answers looks once a second.

    Before it looks at the pipe, it asks rank 0's store. So no rank may be stopped before all have answered.
    """

    pipe: Path
    dump: Path

    @classmethod
    def of(cls, folder: RunFolder, *, rank: int, environment: Mapping[str, str]) -> DumpRequest | None:
        """environment: that of the process; None if its dumps do not come to the run folder."""
        dump = dump_of(folder, rank=rank)
        prefixes = {
            environment.get(name)
            for name in ("TORCH_FR_DUMP_TEMP_FILE", _VARIABLES["TORCH_FR_DUMP_TEMP_FILE"])
        }
        if _PIPE not in environment or str(dump).removesuffix(str(rank)) not in prefixes:
            return None
        return cls(Path(f"{environment[_PIPE]}{rank}.pipe"), dump)

    def send(self) -> bool:
        """Ask for a new dump; False if no NCCL listens in the process."""
        try:
            pipe = os.open(self.pipe, os.O_WRONLY | os.O_NONBLOCK)
            with open(pipe, "wb", buffering=0) as file:
                self.dump.unlink(missing_ok=True)
                file.write(b"dump")
        except OSError:  # ENXIO: nobody has opened the pipe to read
            return False
        return True

    def ranks_without_answer(self, world_size: int) -> set[int]:
        """The ranks whose dump is not in the run folder."""
        prefix = self.dump.name.rstrip("0123456789")
        names = set(os.listdir(self.dump.parent))  # NFS caches for long that a single file does not exist
        return {rank for rank in range(world_size) if f"{prefix}{rank}" not in names}

    def answer(self) -> DeviceProgress | None:
        """What the dump says; None while it is not complete, and without a collective of NCCL."""
        try:
            dump = _load(self.dump)
            groups = [f"{group['name']} {group['desc']}" for group in dump["pg_config"].values()]
            return device_progress(dump["entries"], groups=groups)
        except _DAMAGED:
            return None


def add_pipe(environment: MutableMapping[str, str], *, folder: str, rank: int) -> None:
    """Let NCCL in a process with this environment answer a `DumpRequest`. folder: on a disk of the host.

    Raises OSError if the disk has no pipes, because torch would end the process then.
    """
    stem = os.path.join(folder, "rank-")
    os.mkfifo(f"{stem}{rank}.pipe")  # torch replaces it
    set_unset(environment, {_PIPE: stem}, reason="")


def device_progress(
    entries: Sequence[Mapping[str, Any]], *, groups: Iterable[str] = ()
) -> DeviceProgress | None:
    """How far this rank's GPU is in NCCL's collectives, in the order in which the host queued them.

    groups: those of this rank, also without an entry. None without NCCL. gloo's collectives run on the host.
    """
    queued = [entry for entry in entries if str(entry["profiling_name"]).startswith("nccl:")]
    enqueued = dict.fromkeys(groups, 0)
    if not queued and not enqueued:
        return None
    by_state: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for entry in queued:
        state = "completed" if entry["retired"] else entry["state"]
        if state == "completed":
            # The sends of a batch stay "scheduled" for ever: only the entry of the whole batch has events.
            group, waiting = entry["process_group"], by_state["scheduled"]
            by_state["scheduled"] = [other for other in waiting if other["process_group"] != group]
        by_state[state].append(entry)
    begun, waiting = by_state["started"], by_state["scheduled"]
    return DeviceProgress(
        waits_in=collective_of(begun[0]) if begun else None,
        next=collective_of(waiting[0]) if waiting else None,
        completed={
            " ".join(entry["process_group"]): entry["collective_seq_id"]
            for entry in by_state["completed"] if not entry["is_p2p"]
        },
        queued=enqueued | {
            " ".join(entry["process_group"]): entry["collective_seq_id"]
            for entry in queued if not entry["is_p2p"]
        },
    )  # fmt: skip


def collective_of(entry: Mapping[str, Any]) -> Collective:
    """The name, group and number of an entry of the recorder."""
    return Collective(
        name=entry["profiling_name"].rpartition(":")[2],
        group=" ".join(entry["process_group"]),
        sequence=entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"],
        complete=entry["retired"],
        is_p2p=entry["is_p2p"],
    )


def read_dump(path: Path) -> list[Entered]:
    """The collectives in a dump that torch has written; empty if there is no valid dump."""
    try:
        dump = _load(path)
        config = dump.get("pg_config", {})
        members = {
            str(group["name"]): json.loads(group["ranks"]) for group in config.values() if group.get("name")
        }
        return by_group(dump.get("entries", []), members=members)
    except _DAMAGED:
        return []


def _load(path: Path) -> Any:
    """The content of a dump. Raises one of _DAMAGED."""
    if path.stat().st_size > _DUMP_BYTES:
        raise ValueError("a dump of ours is smaller")
    return _Plain(io.BytesIO(path.read_bytes())).load()


def by_group(
    entries: Iterable[Mapping[str, Any]],
    *,
    members: Mapping[str, Sequence[int]],
    phases: Sequence[tuple[int, str]] = (),
) -> list[Entered]:
    """Sort the entries by process group and backend.

    members: group -> its global ranks. phases: `Progress.begun`; if it is empty, as for a dump, the phases of
    calls are None.
    """
    begins = [time for time, _ in phases]
    names: list[str | None] = [BEFORE_STEPS, *(phase for _, phase in phases)] if phases else [None]
    calls: dict[tuple[str, str], list[Call]] = defaultdict(list)
    for entry in entries:
        if not entry.get("is_p2p"):
            backend, _, name = str(entry["profiling_name"]).rpartition(":")
            began_ns = int(entry["time_created_ns"])
            phase = names[bisect_right(begins, began_ns)]
            call = Call(int(entry["collective_seq_id"]), name, str(entry["input_sizes"]), began_ns, phase)
            calls[str(entry["process_group"][0]), backend].append(call)
    return [
        Entered(f"{group} {backend}", list(members.get(group, ())), newest[-MAX_CALLS:])
        for (group, backend), newest in calls.items()
    ]


class _Plain(pickle.Unpickler):
    """Unpickles only lists, tables, texts and numbers, which are all that torch's dump contains."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a dump of collectives")
