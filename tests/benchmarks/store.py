"""What signing costs at a start: 8 ranks meet and open three groups, with SignedStore and without.

python tests/benchmarks/store.py [ranks] [starts]
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from hpc_parallel.config.site_schema import ClusterConfig
from hpc_parallel.machine import fabric
from hpc_parallel.machine.world import World
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.start import rendezvous
from hpc_parallel.start.signed_store import SignedStore

FORK = multiprocessing.get_context("fork")
METHODS = ("set", "get", "multi_set", "multi_get", "append", "add", "compare_set", "check", "wait")


class Timed:
    """A store that sums up the time inside of its methods."""

    def __init__(self, store: Any) -> None:
        self._store, self.spent_s = store, 0.0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._store, name)
        if name not in METHODS:
            return value

        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return value(*arguments)
            finally:
                self.spent_s += time.perf_counter() - began

        return timed


class TimedSigned(SignedStore):
    """`outside_s`: time inside of our methods; what torch's took of it, `server.spent_s` says."""

    def __init__(self, store: Any, *, secret: bytes) -> None:
        self.server, self.outside_s, self._depth = Timed(store), 0.0, 0
        super().__init__(self.server, secret=secret)


def _time(name: str) -> None:
    method = getattr(SignedStore, name)

    def timed(self: TimedSigned, *arguments: Any) -> Any:
        began = time.perf_counter()
        self._depth += 1
        try:
            return method(self, *arguments)
        finally:
            self._depth -= 1
            if self._depth == 0:  # `check` and `wait` call `multi_get`
                self.outside_s += time.perf_counter() - began

    setattr(TimedSigned, name, timed)


def rank(folder: RunFolder, number: int, size: int, signed: bool, pipe: Any, done: Any) -> None:
    if signed:
        rendezvous.SignedStore = TimedSigned  # type: ignore[misc]
    else:
        rendezvous.SignedStore = lambda store, secret: store  # type: ignore[assignment,misc]
    world = World(number, size, number, size, 0, 1, host="here", launcher="torchrun", attempt="start")
    began = time.perf_counter()
    store: Any = rendezvous.meet(folder, world=world, cluster=ClusterConfig(name="bench"))
    fabric.set_sockets(os.environ, world=world, hosts=rendezvous.hosts(store))
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=number, world_size=size)
    for _ in range(2):
        dist.all_reduce(torch.ones(1), group=dist.new_group(backend="gloo"))
    whole_s = time.perf_counter() - began
    pipe.send((whole_s, store.outside_s - store.server.spent_s if signed else 0.0))
    done.wait(30)
    os._exit(0)


def start(size: int, *, signed: bool) -> list[tuple[float, float]]:
    """Of each rank: seconds of the start, and of them what signing took."""
    with tempfile.TemporaryDirectory() as place:
        folder = RunFolder(Path(place) / "run")
        folder.create()
        done = FORK.Event()
        ends = [FORK.Pipe(duplex=False) for _ in range(size)]
        processes = [
            FORK.Process(target=rank, args=(folder, number, size, signed, send, done))
            for number, (_, send) in enumerate(ends)
        ]
        for process in processes:
            process.start()
        times = [receive.recv() for receive, _ in ends]
        done.set()
        for process in processes:
            process.join()
    return times


def main(size: int, starts: int) -> None:
    for name in METHODS:
        _time(name)
    found: dict[bool, list[list[tuple[float, float]]]] = {True: [], False: []}
    for _ in range(starts):
        for signed in found:  # alternating: this machine's speed drifts
            found[signed].append(start(size, signed=signed))
    for signed, label in ((False, "TCPStore"), (True, "SignedStore")):
        slowest = [max(whole for whole, _ in ranks) * 1e3 for ranks in found[signed]]
        print(f"{label}: start of {size} ranks, slowest rank: {median(slowest):.1f} ms, median of {starts}")
    costs = [[cost * 1e3 for _, cost in ranks] for ranks in found[True]]
    print(
        f"signing, Python included: {median(map(max, costs)):.2f} ms on the slowest rank, "
        f"{median(map(sum, costs)):.2f} ms on all together"
    )


if __name__ == "__main__":
    main(*(int(word) for word in (sys.argv[1:] + ["8", "9"][len(sys.argv) - 1 :])))
