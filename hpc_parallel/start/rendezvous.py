"""Rendezvous of the ranks of one start: rank 0 opens a store and publishes its address.

Rank 0 listens on a port that the system chooses, so no two runs collide. It writes its address and a new
secret to `rendezvous/<attempt>.json`, and waits until every rank has announced itself. Every value in the
store is signed with the secret, so only a process that can read this file counts as a rank; the folder is
closed to other users. If anything fails, all ranks end with the same message, within the time-out and a few
seconds.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import DistError, TCPStore

from hpc_parallel.config.site_schema import ClusterConfig
from hpc_parallel.machine import fabric
from hpc_parallel.machine.world import World
from hpc_parallel.problems import print_warning
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import DamagedError, parse_json
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.record.typed import read_record
from hpc_parallel.start.signed_store import SECRET_BYTES, ForgedError, SignedStore

LOOPBACK = "127.0.0.1"
BACKLOG = 4096  # ranks that connect at the same time
PROBE_S = 5.0  # for one attempt to connect; then the address is read again
GRACE_S = 3.0  # after the time-out, so that rank 0's message arrives first
MAX_NAMED = 8  # ranks in one message

_OPEN, _VERDICT, _ACKNOWLEDGED = "start/open", "start/verdict", "start/heard"

_KEPT: list[SignedStore] = []  # process groups keep only the C++ object, which calls the Python object


class StartError(RuntimeError):
    """Not all ranks arrived. The message names them, their hosts, and the logs to read."""


def meet(folder: RunFolder, *, world: World, cluster: ClusterConfig, device: str = "cpu") -> SignedStore:
    """Wait until every rank has arrived with the same kind of device; returns the store that all ranks share.

    The store lives as long as the process, because rank 0's store is also the server. Keys that begin with
    `start/` are reserved; use a PrefixStore. Raises StartError after `cluster.start_timeout_s` + GRACE_S
    seconds at the latest.
    """
    start = _Start(folder, world=world, cluster=cluster, device=device)
    store = start.host() if world.rank == 0 else start.join()
    _KEPT.append(store)
    return store


def hosts(store: SignedStore) -> tuple[str, ...]:
    """Returns the host that each rank announced, by rank."""
    return tuple(_parsed(store.get(_VERDICT))["hosts"])


@dataclass(frozen=True)
class Published:
    """What rank 0 has written for the other ranks: where its store listens, or why the start has ended."""

    host: str | None = None
    port: int | None = None
    secret: str | None = None  # hexadecimal
    pid: int | None = None
    error: str | None = None

    @classmethod
    def path(cls, folder: RunFolder, world: World) -> Path:
        """The file of this start."""
        return folder.rendezvous / f"{world.attempt}.json"

    def write(self, file: Path) -> None:
        """Replace the file; keys whose value is None are not written."""
        write_json(file, {key: value for key, value in vars(self).items() if value is not None})


class _Start:
    """One rank's part in one start, and its deadline."""

    def __init__(self, folder: RunFolder, *, world: World, cluster: ClusterConfig, device: str) -> None:
        self.folder, self.world, self.cluster = folder, world, cluster
        self.announcement = {"host": world.host, "pid": os.getpid(), "device": device.partition(":")[0]}
        self.began = time.monotonic()
        self.deadline = self.began + cluster.start_timeout_s
        self.file = Published.path(folder, world)
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
            Published(error=str(error)).write(self.file)  # for ranks that arrive after this process has ended
            raise
        store.set(_VERDICT, json.dumps({"hosts": [announcement["host"] for announcement in announcements]}))
        return store

    def _await_all(self, store: SignedStore) -> list[dict[str, Any]]:
        """Returns the announcements by rank. Raises StartError and ForgedError."""
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
            has_verdict = self._until(lambda: store.check([_VERDICT]), self.deadline + GRACE_S)
            verdict = _parsed(store.get(_VERDICT)) if has_verdict else {"error": self._missing(store)[1]}
            if "error" in verdict:
                store.add(_ACKNOWLEDGED, 1)
        except DistError:
            published = _published(self.file) or Published()
            raise StartError(
                published.error
                or f"rank 0 on {self.world.where(0)} ended while the ranks were arriving. "
                f"Look at {self.folder.log(0, 'err')}."
            ) from None
        except ForgedError as error:
            raise StartError(str(error)) from error
        if "error" in verdict:
            raise StartError(verdict["error"])
        return store

    def _open(self) -> SignedStore:
        address = LOOPBACK if self.world.one_machine else self._address()
        listener = self._listen(address)
        port = listener.getsockname()[1]
        secret = secrets.token_bytes(SECRET_BYTES)
        # The store gets a socket that already listens. So a port that is taken raises an OSError with its
        # reason here, and the store does not listen on other networks.
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
        Published(host, port, secret.hex(), os.getpid()).write(self.file)
        _require_own(self.file)
        return store

    def _address(self) -> str | None:
        """Returns the address on which the other hosts connect; None means all addresses."""
        address = fabric.listening_address(os.environ, world=self.world, suffix=self.cluster.master_suffix)
        if address is None:
            print_warning(
                f"the address by which other hosts reach {self.world.host} is unknown, so rank 0 "
                "listens on all addresses. The store still verifies signatures. Try "
                "cluster.environment.GLOO_SOCKET_IFNAME=<interface>."
            )
        return address

    def _listen(self, address: str | None) -> socket.socket:
        port = self.cluster.port or 0
        dual_stack = address is None and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual_stack or ":" in (address or "") else socket.AF_INET
        try:
            return socket.create_server(
                (address or "", port), family=family, dualstack_ipv6=dual_stack, backlog=BACKLOG
            )
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise StartError(
                f"rank 0 can't listen on port {port} of {self.world.host}: {reason}. cluster.port = {port} "
                f"comes from cluster={self.cluster.name} or the command line; another run or service of that "
                "host may use it. Choose another with cluster.port=..., or cluster.port=null for any free "
                "port. On a closed network, ask the site's administrators which ports are open."
            ) from None

    def _find(self) -> SignedStore:
        """Connect the store of a rank other than 0 to rank 0 of this start.

        If the launcher has no unique name for a start, the file may belong to an earlier start, and another
        run may use its port now. So the rank tries again after every problem until the deadline.
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

    def _reach(self, published: Published) -> SignedStore:
        """Connect to the store that rank 0 published. Raises StartError."""
        host, port, secret = published.host, published.port, published.secret
        if published.error is not None or host is None or port is None or secret is None:
            raise StartError(published.error or f"{self.file} does not say where rank 0 listens.")
        try:
            client = _connect(host, port, timeout_s=max(PROBE_S, self.deadline - time.monotonic()))
            store = SignedStore(client, secret=bytes.fromhex(secret))
            if store.check([_OPEN]):
                return store
            reason = "another program answers there"
        except ForgedError:
            reason = "another run answers there, or another process wrote to the store of this start"
        except (OSError, DistError) as error:
            reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise StartError(
            f"can't reach rank 0 at {host}:{port} from {self.world.host}: {reason}. If hosts have other "
            "names on the fast network, try cluster.master_suffix. If rank 0 listens on the wrong one, try "
            "cluster.environment.GLOO_SOCKET_IFNAME=<interface>. If a firewall blocks it, try cluster.port."
        )

    def _give_up(self, store: SignedStore) -> None:
        """End the start on rank 0 after the deadline, unless all ranks have arrived by now."""
        missing, text = self._missing(store)
        if not missing:
            return
        self._end_all(store, text, others=self.world.world_size - len(missing) - 1)

    def _require_one_kind(self, store: SignedStore, announcements: list[dict[str, Any]]) -> None:
        """Require one kind of device, because NCCL ranks would wait for a rank without a working GPU."""
        different = [
            f"rank {rank} on {announcement['host']} has {announcement['device']}"
            for rank, announcement in enumerate(announcements)
            if announcement["device"] != self.announcement["device"]
        ]
        if different:
            named = ", ".join(different[:MAX_NAMED])
            text = f"rank 0 on {self.world.host} has {self.announcement['device']}, but {named}"
            self._end_all(store, text, others=self.world.world_size - 1)

    def _end_all(self, store: SignedStore, text: str, *, others: int) -> NoReturn:
        """Send the reason and wait until `others` ranks have read it, or GRACE_S. Raises StartError."""
        store.set(_VERDICT, json.dumps({"error": text}))
        with suppress(ForgedError):
            self._until(lambda: store.add(_ACKNOWLEDGED, 0) >= others, time.monotonic() + GRACE_S)
        raise StartError(text)

    def _announce(self, store: SignedStore) -> None:
        store.set(_arrival(self.world.rank), json.dumps(self.announcement))

    def _missing(self, store: SignedStore) -> tuple[list[int], str]:
        """Returns the ranks that have not arrived, and the message about them."""
        missing = [rank for rank, arrival in enumerate(self.arrivals) if not store.check([arrival])]
        if not missing:
            rank_0 = f"rank 0 on {self.world.where(0)}"
            return [], f"all ranks arrived, but {rank_0} did not start the run. Look at {self._log(0)}."
        named = [f"rank {rank} on {self.world.where(rank)}" for rank in missing[:MAX_NAMED]]
        if len(missing) > MAX_NAMED:
            named.append(f"{len(missing) - MAX_NAMED} more")
        size = self.world.world_size
        return missing, (
            f"{size - len(missing)} of {size} ranks arrived within {self.cluster.start_timeout_s:g} s; "
            f"missing: {', '.join(named)}. Look at {self._log(missing[0])}."
        )

    def _log(self, rank: int) -> str:
        return f"{self.folder.log(rank, 'err')}, or at the launcher's output if that is empty"

    def _until(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Poll `condition` until it returns true; returns false at the deadline.

        Store.wait is not used: it blocks Python's signal handlers while it waits, and writes stack traces to
        the log at a time-out. The pause is 2 % of the time waited so far. It is short if all ranks are fast,
        and thousands of ranks do not overload the file system if one is slow.
        """
        while not condition():
            now = time.monotonic()
            if now >= deadline:
                return False
            pause_s = min(0.25, max(0.001, (now - self.began) / 50))
            time.sleep(min(pause_s, deadline - now))
        return True


def _published(file: Path) -> Published | None:
    try:
        # Listing the folder makes an NFS client ask its server. For a minute, the client may answer a
        # look-up of one name with "not found" from its cache.
        if file.name in os.listdir(file.parent):
            _require_own(file)
            published = read_record(Published, file)
            return published if published is not None and (published.secret or published.error) else None
    except (OSError, DamagedError):  # the folder does not exist yet, or the handle is stale
        pass
    return None


def _require_own(file: Path) -> None:
    """Raise StartError if another user could have written the file (as a false rank 0) or could read it."""
    status = file.lstat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise StartError(
            f"{file} belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):04o}, but only "
            "the user of this run may read and write it: it holds the secret of the start. Try a run folder "
            "of your own on a file system that supports file modes."
        )


def _parsed(text: bytes) -> dict[str, Any]:
    value: dict[str, Any] = parse_json(text.decode())
    return value


def _connect(host: str, port: int, *, timeout_s: float) -> TCPStore:
    # A plain connection comes first: its error has a reason, but torch's error is a stack trace with "timed
    # out". The connection also finds the address that answers if the host has several.
    with socket.create_connection((host, port), timeout=PROBE_S) as probe:
        address = probe.getpeername()[0]
    # The store's constructor looks up the peer's name for its log. If the name server does not answer, the
    # look-up takes the resolver's 5 s, so the constructor gets all the time that is left.
    return TCPStore(
        address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )


def _arrival(rank: int) -> str:
    return f"start/arrived/{rank}"
