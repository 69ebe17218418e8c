"""How the ranks of one start find each other: rank 0 opens a store and publishes where it is.

Rank 0 takes a port that the system gives it (nothing is guessed, so nothing collides), writes its
address and a new secret to `rendezvous/<attempt>.json`, and waits until every rank has announced itself.
Only a process that can read this file, in a folder that is closed to other users, counts as a rank: every
value in the store is signed with the secret. Whatever goes wrong, all ranks end with the same words, within
the time-out and a few seconds.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import DistError, TCPStore

from hpc_parallel.config.schema import ClusterConfig
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import DamagedError, parse_json, read_json
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.supervise import fabric
from hpc_parallel.supervise.world import World
from hpc_parallel.worker.signed_store import SECRET_BYTES, ForgedError, SignedStore

LOOPBACK = "127.0.0.1"
BACKLOG = 4096  # ranks that connect in the same instant
PROBE_S = 5.0  # one attempt to connect, before the address is read again
GRACE_S = 3.0  # beyond the time-out: rank 0's words come first
NAMED = 8  # missing ranks in one message

_OPEN, _VERDICT, _HEARD = "start/open", "start/verdict", "start/heard"

_KEPT: list[SignedStore] = []  # process groups hold the C++ half alone, which calls the Python half


class StartError(RuntimeError):
    """The ranks could not all meet; the message says which and where, and what to look at."""


def meet(folder: RunFolder, *, world: World, cluster: ClusterConfig, device: str = "cpu") -> SignedStore:
    """A store that all ranks of this start share, once every rank has arrived with the same kind of device.

    It is kept as long as the process lives: rank 0's is also the server. Its own keys begin with
    `start/`; use a PrefixStore. Raises StartError at the latest `cluster.start_timeout_s` seconds
    (and GRACE_S) from now.
    """
    start = _Start(folder, world=world, cluster=cluster, device=device)
    store = start.host() if world.rank == 0 else start.join()
    _KEPT.append(store)
    return store


def hosts(store: SignedStore) -> tuple[str, ...]:
    """The host of every rank, as the ranks themselves announced it, by rank."""
    return tuple(_parsed(store.get(_VERDICT))["hosts"])


class _Start:
    """One rank's part in one start, and the time that it has."""

    def __init__(self, folder: RunFolder, *, world: World, cluster: ClusterConfig, device: str) -> None:
        self.folder, self.world, self.cluster = folder, world, cluster
        self.announcement = {"host": world.host, "pid": os.getpid(), "device": device.partition(":")[0]}
        self.began = time.monotonic()
        self.deadline = self.began + cluster.start_timeout_s
        self.file = folder.rendezvous / f"{world.attempt}.json"
        self.arrivals = [_arrival(rank) for rank in range(world.world_size)]

    def host(self) -> SignedStore:
        self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            store = self._open()
            try:
                announcements = self._await_all(store)
            except ForgedError as error:
                self._end_all(store, str(error), others=self.world.world_size - 1)
        except StartError as error:
            write_json(self.file, {"error": str(error)})  # for those who come when this process is gone
            raise
        store.set(_VERDICT, json.dumps({"hosts": [announcement["host"] for announcement in announcements]}))
        return store

    def _await_all(self, store: SignedStore) -> list[dict[str, Any]]:
        """What every rank announced, by rank. Raises StartError and ForgedError."""
        self._announce(store)
        if not self._until(lambda: store.check(self.arrivals), self.deadline):
            self._give_up(store)
        announcements = [_parsed(text) for text in store.multi_get(self.arrivals)]
        self._require_one_kind(store, announcements)
        return announcements

    def join(self) -> SignedStore:
        store = self._find()
        try:
            self._announce(store)
            heard = self._until(lambda: store.check([_VERDICT]), self.deadline + GRACE_S)
            verdict = _parsed(store.get(_VERDICT)) if heard else {"error": self._missing(store)[1]}
            if "error" in verdict:
                store.add(_HEARD, 1)
        except DistError:
            last_words = _published(self.file) or {}
            raise StartError(
                last_words.get("error")
                or f"rank 0 on {self.world.where(0)} went away while the ranks were arriving. "
                f"Look at {self.folder.log(0, 'err')}."
            ) from None
        except ForgedError as error:
            raise StartError(str(error)) from error
        if "error" in verdict:
            raise StartError(verdict["error"])
        return store

    def _open(self) -> SignedStore:
        """Rank 0's store: bound, listening and published."""
        address = LOOPBACK if self.world.one_machine else self._address()
        listener = self._listen(address)
        port = listener.getsockname()[1]
        secret = secrets.token_bytes(SECRET_BYTES)
        # The store is given a socket that listens already: a port that is taken is an OSError here, with
        # its reason, and the store can be kept from networks that it does not need.
        server = TCPStore(
            address or LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=self.cluster.collective_timeout_s),
            master_listen_fd=listener.detach(),
        )
        store = SignedStore(server, secret=secret)
        store.set(_OPEN, "")
        host = address or self.world.host + self.cluster.master_suffix
        write_json(self.file, {"host": host, "port": port, "secret": secret.hex(), "pid": os.getpid()})
        _require_own(self.file)
        return store

    def _address(self) -> str | None:
        """The one address to listen on for the other hosts; None for all."""
        address = fabric.listening_address(os.environ, world=self.world, suffix=self.cluster.master_suffix)
        if address is None:
            print(
                f"WARNING: nothing tells by which address other hosts reach {self.world.host}, so rank 0 "
                "listens on all of them. The store verifies a signature all the same. Try "
                "cluster.environment.GLOO_SOCKET_IFNAME=<interface>.",
                file=sys.stderr,
                flush=True,
            )
        return address

    def _listen(self, address: str | None) -> socket.socket:
        port = self.cluster.port or 0
        every = address is None and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if every or ":" in (address or "") else socket.AF_INET
        try:
            return socket.create_server(
                (address or "", port), family=family, dualstack_ipv6=every, backlog=BACKLOG
            )
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise StartError(
                f"rank 0 can't listen on port {port} of {self.world.host}: {reason}. cluster.port = {port} "
                f"comes from cluster={self.cluster.name} or the command line; another run or service of that "
                "host may have it. Choose another with cluster.port=..., or cluster.port=null for any that "
                "is free; on a closed network the site's administrators know which ports are open."
            ) from None

    def _find(self) -> SignedStore:
        """Another rank's store, connected to the rank 0 of this very start.

        A launcher without a unique name for a start may show an earlier one's file, and its port may be
        another run's by now. So no problem is the end before the time is out.
        """
        problem = (
            f"rank 0 on {self.world.where(0)} never published its address in {self.file.parent}. "
            f"Look at {self._log(0)}."
        )
        stores: list[SignedStore] = []

        def connected() -> bool:
            nonlocal problem
            try:
                if (published := _published(self.file)) is not None:
                    stores.append(self._reach(published))
            except StartError as error:
                problem = str(error)
            return bool(stores)

        if not self._until(connected, self.deadline):
            raise StartError(problem)
        stores[0].set_timeout(timedelta(seconds=self.cluster.collective_timeout_s))
        return stores[0]

    def _reach(self, published: dict[str, Any]) -> SignedStore:
        """The store that rank 0 published. Raises StartError."""
        if "error" in published:
            raise StartError(published["error"])
        host, port = published["host"], published["port"]
        try:
            client = _connect(host, port, timeout_s=max(PROBE_S, self._left_s()))
            store = SignedStore(client, secret=bytes.fromhex(published["secret"]))
            if store.check([_OPEN]):
                return store
            reason = "another program answers there"
        except ForgedError:
            reason = "another run answers there, or another process wrote to the store of this start"
        except (OSError, DistError) as error:
            reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise StartError(
            f"can't reach rank 0 at {host}:{port} from {self.world.host}: {reason}. Where a fast network "
            "has names of its own, try cluster.master_suffix; where rank 0 listens on the wrong network, "
            "cluster.environment.GLOO_SOCKET_IFNAME=<interface>; where a firewall stands, cluster.port."
        )

    def _give_up(self, store: SignedStore) -> None:
        """Rank 0, out of time: tell those who are there, let them read it, and end."""
        missing, text = self._missing(store)
        if not missing:  # the last one came just now
            return
        self._end_all(store, text, others=self.world.world_size - len(missing) - 1)

    def _require_one_kind(self, store: SignedStore, announcements: list[dict[str, Any]]) -> None:
        """A host with a broken GPU driver would leave the others waiting in NCCL for a rank on gloo."""
        odd = [
            f"rank {rank} on {found['host']} has {found['device']}"
            for rank, found in enumerate(announcements)
            if found["device"] != self.announcement["device"]
        ]
        if odd:
            named = ", ".join(odd[:NAMED])
            text = f"rank 0 on {self.world.host} has {self.announcement['device']}, but {named}"
            self._end_all(store, text, others=self.world.world_size - 1)

    def _end_all(self, store: SignedStore, text: str, *, others: int) -> NoReturn:
        """Give `others` the reason and a moment to read it. Raises StartError."""
        store.set(_VERDICT, json.dumps({"error": text}))
        with suppress(ForgedError):
            self._until(lambda: store.add(_HEARD, 0) >= others, time.monotonic() + GRACE_S)
        raise StartError(text)

    def _announce(self, store: SignedStore) -> None:
        store.set(_arrival(self.world.rank), json.dumps(self.announcement))

    def _missing(self, store: SignedStore) -> tuple[list[int], str]:
        """The ranks that have not arrived, and what to say of them."""
        missing = [rank for rank, arrival in enumerate(self.arrivals) if not store.check([arrival])]
        if not missing:
            rank_0 = f"rank 0 on {self.world.where(0)}"
            return [], f"{rank_0} never gave the sign to begin. Look at {self._log(0)}."
        named = [f"rank {rank} on {self.world.where(rank)}" for rank in missing[:NAMED]]
        if len(missing) > NAMED:
            named.append(f"{len(missing) - NAMED} more")
        size = self.world.world_size
        return missing, (
            f"{size - len(missing)} of {size} ranks arrived within {self.cluster.start_timeout_s:g} s; "
            f"missing: {', '.join(named)}. Look at {self._log(missing[0])}."
        )

    def _log(self, rank: int) -> str:
        return f"{self.folder.log(rank, 'err')}, or at the launcher's own output where that is empty"

    def _left_s(self) -> float:
        return self.deadline - time.monotonic()

    def _until(self, done: Callable[[], bool], deadline: float) -> bool:
        """Ask until it is so; false when the time is out.

        Not Store.wait: it keeps signals from Python for as long as it waits, and writes stack traces
        into the log when time is out. The pause is 2 % of the time waited so far: little is lost
        when all are quick, and thousands of ranks do not storm the file system when one is slow.
        """
        while not done():
            now = time.monotonic()
            if now >= deadline:
                return False
            pause_s = min(0.25, max(0.001, (now - self.began) / 50))
            time.sleep(min(pause_s, deadline - now))
        return True


def _published(file: Path) -> dict[str, Any] | None:
    try:
        # Opening the folder makes an NFS client ask its server again; a look-up of the one name
        # may be answered "not there" from its cache for a minute.
        if file.name in os.listdir(file.parent):
            _require_own(file)
            published = read_json(file)
            return published if published and published.keys() & {"secret", "error"} else None
    except (OSError, DamagedError):  # the folder is not there yet, or the handle is stale
        pass
    return None


def _require_own(file: Path) -> None:
    """Raise StartError if another user could have written the file, as a false rank 0, or could read it."""
    status = file.lstat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise StartError(
            f"{file} belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):04o}, but only "
            "the user of this run may read and write it: it holds the secret of the start. Try a run folder "
            "of your own on a file system that keeps modes."
        )


def _parsed(text: bytes) -> dict[str, Any]:
    value: dict[str, Any] = parse_json(text.decode())
    return value


def _connect(host: str, port: int, *, timeout_s: float) -> TCPStore:
    # First a plain connection: its error has a reason, torch's is a stack trace that says "timed out".
    # It also finds the one address of several that answers.
    with socket.create_connection((host, port), timeout=PROBE_S) as probe:
        address = probe.getpeername()[0]
    # The store's constructor looks the other side's name up, for its log; where the name server does
    # not answer that takes the resolver's 5 s, so this waits as long as there is time.
    return TCPStore(
        address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )


def _arrival(rank: int) -> str:
    return f"start/arrived/{rank}"
