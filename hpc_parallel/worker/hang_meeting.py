"""The ranks of a run that hangs learn through the start's store that all of them have reported.

Each rank writes one key. Only rank 0 reads these keys. When rank 0 has seen all of them, it writes one more
key. The other ranks wait for this key. So N ranks send 3 N requests, however long they wait, because the
store answers a request only when its key is set.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

from torch.distributed import DistStoreError

from hpc_parallel.machine.world import World

SERVE_S = 1.0  # rank 0's process is the store, so it goes on for this long after the last key is set
_ALL = "hang/all"
_LEAST_S = 0.01  # torch treats 0 as no time-out


class HangStore(Protocol):
    """The part of `SignedStore` that a meeting uses. Values carry no information, so none is parsed."""

    def set(self, key: str, value: str | bytes, /) -> None: ...

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None, /) -> None: ...


def meet_hang(store: HangStore | None, *, world: World, within_s: float) -> bool:
    """Say that this rank has reported, and wait for all ranks. Returns whether all have reported.

    If the store fails or does not answer, waits for `within_s` seconds, since the others may still report.
    """
    met = threading.Event()

    def meet() -> None:
        assert store is not None
        try:
            if all_reported(store, world=world, until_s=time.monotonic() + within_s):
                met.set()
        except RuntimeError as error:  # DistError or ForgedError
            print(f"the ranks can't meet through the store: {error}", flush=True)

    if store is not None:  # in a thread: a stopped rank 0 accepts connections but never answers
        threading.Thread(target=meet, name="hang meeting", daemon=True).start()
    met.wait(within_s)
    if met.is_set() and world.rank == 0 and world.world_size > 1:
        time.sleep(SERVE_S)
    return met.is_set()


def all_reported(store: HangStore, *, world: World, until_s: float) -> bool:
    """Write this rank's key and wait for the others until the time `until_s` of the monotonic clock."""
    store.set(_key(world.rank), "")
    keys = [_key(rank) for rank in range(world.world_size)] if world.rank == 0 else [_ALL]
    for key in keys:
        try:
            store.wait([key], timedelta(seconds=max(until_s - time.monotonic(), _LEAST_S)))
        except DistStoreError:
            return False
    if world.rank == 0:
        store.set(_ALL, "")
    return True


def _key(rank: int) -> str:
    return f"hang/reported/{rank}"
