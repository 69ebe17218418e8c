"""Real processes, forked from this one so that torch is imported once."""

import json
import multiprocessing
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpc_parallel.config.site_schema import ClusterConfig
from hpc_parallel.machine.world import World
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.start import rendezvous
from hpc_parallel.start.rendezvous import StartError, hosts, meet
from tests.marks import in_full

pytestmark = pytest.mark.processes

FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Outcome:
    """What one rank got: the hosts that it met, or the words that it ended with, and how long it took."""

    hosts: tuple[str, ...] | None
    error: str | None
    seconds: float
    shared: int | None = None


def world(rank: int, *, size: int = 4, one_machine: bool = True, attempt: str = "test-1") -> World:
    if one_machine:
        return World(rank, size, rank, size, 0, 1, host="here", launcher="torchrun", attempt=attempt)
    names = tuple(f"n{node + 1}" for node in range(size))
    here, tasks = names[rank], (1,) * size
    return World(rank, size, 0, 1, rank, size, here, "slurm", attempt, hosts=names, tasks=tasks)


def cluster(**values: Any) -> ClusterConfig:
    defaults: dict[str, Any] = {"name": "test", "start_timeout_s": 240.0}
    return ClusterConfig(**(defaults | values))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    run.create()
    return run


def _rank(folder: RunFolder, world: World, cluster: ClusterConfig, pipe: Any, done: Any) -> None:
    began = time.perf_counter()
    try:
        store = meet(folder, world=world, cluster=cluster)
        seconds = time.perf_counter() - began
        outcome = Outcome(hosts(store), None, seconds, store.add("used", 1))
    except StartError as error:
        outcome = Outcome(None, str(error), time.perf_counter() - began)
    pipe.send(outcome)
    if outcome.error is None:
        done.wait(250)  # rank 0 is the server


def start(folder: RunFolder, worlds: list[World], cluster: ClusterConfig) -> Callable[[], list[Outcome]]:
    done = FORK.Event()
    pipes, processes = [], []
    for place in worlds:
        receive, send = FORK.Pipe(duplex=False)
        process = FORK.Process(target=_rank, args=(folder, place, cluster, send, done), daemon=True)
        process.start()
        pipes.append(receive)
        processes.append(process)

    def finish() -> list[Outcome]:
        outcomes = [pipe.recv() if pipe.poll(250) else Outcome(None, "HANGS", 250.0) for pipe in pipes]
        done.set()
        for process in processes:
            process.join(250)
            assert process.exitcode == 0
        return outcomes

    return finish


def test_four_ranks_meet(folder: RunFolder) -> None:
    outcomes = start(folder, [world(rank) for rank in range(4)], cluster())()
    assert [outcome.error for outcome in outcomes] == [None] * 4
    assert {outcome.hosts for outcome in outcomes} == {("here",) * 4}
    assert sorted(outcome.shared or 0 for outcome in outcomes) == [1, 2, 3, 4]  # one store for all
    published = json.loads((folder.rendezvous / "test-1.json").read_text())
    assert published["host"] == "127.0.0.1"
    print("slowest rank:", max(outcome.seconds for outcome in outcomes), "s")


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts' names lead to this machine, in the forked ranks too."""
    connect = socket.create_connection

    def towards(address: tuple[str, int], **options: Any) -> socket.socket:
        assert address[0] in ("n1", "n1-fast")
        return connect(("127.0.0.1", address[1]), **options)

    monkeypatch.setattr(socket, "create_connection", towards)


def test_rank_0_publishes_its_node_and_the_suffix(folder: RunFolder, resolved: None) -> None:
    worlds = [world(rank, one_machine=False) for rank in range(4)]
    outcomes = start(folder, worlds, cluster(master_suffix="-fast"))()
    assert [outcome.hosts for outcome in outcomes] == [("n1", "n2", "n3", "n4")] * 4
    assert json.loads((folder.rendezvous / "test-1.json").read_text())["host"] == "n1-fast"


@pytest.mark.timing
def test_a_rank_that_never_arrives_is_named_by_all(folder: RunFolder, resolved: None) -> None:
    worlds = [world(rank, one_machine=False) for rank in (0, 1)]
    outcomes = start(folder, worlds, cluster(start_timeout_s=2.0))()
    for outcome in outcomes:
        assert outcome.error.startswith(
            "2 of 4 ranks arrived within 2 s; missing: rank 2 on n3, rank 3 on n4. "
            f"Look at {folder.log(2, 'err')}"
        )
        assert outcome.seconds < 2 + rendezvous.GRACE_S + 1
    assert outcomes[0].error == outcomes[1].error


@pytest.mark.timing
def test_without_rank_0_waiting_times_out(folder: RunFolder) -> None:
    (outcome,) = start(folder, [world(1)], cluster(start_timeout_s=1.0))()
    assert outcome.error.startswith(f"rank 0 on here never published its address in {folder.rendezvous}")
    assert outcome.seconds < 2


def test_an_address_that_does_not_answer_is_named(folder: RunFolder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    write_json(folder.rendezvous / "test-1.json", {"host": "127.0.0.1", "port": port, "secret": "00"})
    (outcome,) = start(folder, [world(3)], cluster(start_timeout_s=1.0))()
    assert outcome.error is not None
    assert f"can't reach rank 0 at 127.0.0.1:{port} from here: Connection refused" in outcome.error


def test_a_fixed_port_that_is_taken_is_named(folder: RunFolder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        outcomes = start(folder, [world(0), world(1)], cluster(port=port, start_timeout_s=5.0))()
    for outcome in outcomes:
        assert outcome.error.startswith(
            f"rank 0 can't listen on port {port} of here: Address already in use. cluster.port = {port} "
            "comes from cluster=test"
        )
        assert "cluster.port=null" in outcome.error


def test_a_fixed_port_that_is_free_is_used(folder: RunFolder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    outcomes = start(folder, [world(rank, size=2) for rank in range(2)], cluster(port=port))()
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert json.loads((folder.rendezvous / "test-1.json").read_text())["port"] == port


def test_the_last_record_of_rank_0_is_kept_for_late_readers(folder: RunFolder) -> None:
    slow = cluster(start_timeout_s=0.5)
    (first,) = start(folder, [world(0)], slow)()
    (late,) = start(folder, [world(3)], slow)()
    assert first.error == late.error
    assert first.error.startswith("1 of 4 ranks arrived within 0.5 s; missing: rank 1 on here, rank 2 on")


def test_an_earlier_attempts_file_is_not_read(folder: RunFolder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = {"host": "127.0.0.1", "port": other.getsockname()[1], "secret": "00"}
        write_json(folder.rendezvous / "test-0.json", address)
        outcomes = start(folder, [world(rank) for rank in range(4)], cluster())()
        other.settimeout(0)
        with pytest.raises(BlockingIOError):
            other.accept()
    assert [outcome.error for outcome in outcomes] == [None] * 4


@pytest.mark.parametrize("before", ["a dead port", *in_full([("another run's store",)]), "last words"])
def test_a_file_of_the_same_name_but_another_start_is_seen_through(folder: RunFolder, before: str) -> None:
    """MPICH has no name for a start: the ranks must not take an earlier one's address."""
    file = folder.rendezvous / "test-1.json"
    other = None
    if before == "a dead port":
        write_json(file, {"host": "127.0.0.1", "port": 1, "secret": "00"})
    elif before == "last words":
        write_json(file, {"error": "3 of 4 ranks arrived"})
    else:
        elsewhere = RunFolder(folder.path.parent / "elsewhere")
        elsewhere.create()
        solitary = World(0, 1, 0, 1, 0, 1, host="here", launcher="mpi", attempt="other")
        other = meet(elsewhere, world=solitary, cluster=cluster())
        published = json.loads((elsewhere.rendezvous / "other.json").read_text())
        write_json(file, published | {"secret": "00"})
    early = start(folder, [world(1, size=2)], cluster())
    time.sleep(0.3)  # long enough to read the old file many times
    late = start(folder, [world(0, size=2)], cluster())
    outcomes = early() + late()  # rank 0 ends last
    assert [outcome.error for outcome in outcomes] == [None, None]
    del other


def test_twenty_starts_at_once_have_ports_of_their_own(tmp_path: Path) -> None:
    folders = [RunFolder(tmp_path / f"run-{index}") for index in range(20)]
    finishes = []
    for run in folders:
        run.create()
        finishes.append(start(run, [world(rank, size=2) for rank in range(2)], cluster()))
    # Read while all are held open.
    deadline = time.monotonic() + 240
    ports: set[int] = set()
    while len(ports) < 20 and time.monotonic() < deadline:
        files = [run.rendezvous / "test-1.json" for run in folders]
        ports = {json.loads(file.read_text())["port"] for file in files if file.exists()}
        time.sleep(0.02)
    outcomes = [outcome for finish in finishes for outcome in finish()]
    assert len(ports) == 20
    assert [outcome.error for outcome in outcomes] == [None] * 40
