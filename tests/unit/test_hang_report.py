"""Whom a hang is blamed on, by what the ranks told; and when a watchdog calls it one."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistStoreError, TCPStore

from hpc_parallel.failure import failure, hang_report, normal_end
from hpc_parallel.failure.flight_recorder import Call, Collective, DeviceProgress, Entered, device_progress
from hpc_parallel.failure.hang_cause import cause_of
from hpc_parallel.failure.hang_report import HangReport
from hpc_parallel.failure.stacks import spot_of, stack_of
from hpc_parallel.failure.supervisor import Supervisor
from hpc_parallel.machine.world import World
from hpc_parallel.record.attempts import earlier_starts
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.script.script_failure import ScriptSupervisor
from hpc_parallel.training.observers import Progress
from hpc_parallel.worker.watchdog import _Watchdog, all_reported, last_collective, meet_hang

HOSTS = ("n1", "n1", "n2", "n3")
STORE = "10.0.0.1:4000"
WAITS = HangReport(
    rank=0, host="n1", world_size=4, attempt="a", phase="step", step=57, idle_s=300.4,
    where="step.py:9 in run", stack=["  the waiting line"],
    collective=Collective("all_reduce", "default_pg", 881, complete=False),
)  # fmt: skip
ENDED = Collective("all_reduce", "default_pg", 880, complete=True)
# A rank in a send or receive; torch does not record these for gloo.
FRAME = ['  File "/me/net.py", line 3, in forward', "    time.sleep(9)"]
RECEIVES = ['  File "/site/torch/distributed/distributed_c10d.py", line 9, in recv', "    x()"]
P2P: dict[str, object] = {"collective": ENDED, "stack": RECEIVES, "where": "pipe.py:5 in run"}
RING = {**P2P, "stack": [FRAME[0], "    work.wait()"], "where": "ring.py:7 in get"}
OTHERS = "others wait in step 57 at step.py:9 in run (all_reduce 881 of default_pg)"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.create()
    return made


def blamed(folder: RunFolder, *, but: dict[int, dict[str, object]], silent: tuple[int, ...] = ()) -> str:
    """The line's end for four ranks that wait, but for what some of them told."""
    for rank, host in enumerate(HOSTS):
        world = replace(World.discover({}), rank=rank, world_size=4, host=host, attempt="a")
        failure.record_hang(folder, world=world, message="no progress", stack=[])
        if rank not in silent:
            told = replace(WAITS, rank=rank, host=host, **but.get(rank, {}))  # type: ignore[arg-type]
            hang_report.write_report(folder, told)
    cause = cause_of(folder, failure.records(folder))
    assert cause.kind == "hang"
    return f"{cause.rank} on {cause.host}: {cause.message}"


@pytest.mark.parametrize(
    ("but", "line"),
    [
        ({2: {"phase": "data", "where": "nfs.py:3 in read"}},
         f"2 on n2: hangs in loading the data of step 57 at nfs.py:3 in read for 300 s; {OTHERS}"),
        ({3: {"step": 56, "phase": "log"}, 1: {"phase": "data"}},  # an earlier step, in a later phase
         f"3 on n3: hangs in the metrics of step 56 at step.py:9 in run for 300 s; {OTHERS}"),
        # it computes, or loops, and all wait for it
        ({1: {"collective": replace(ENDED, group="stages", sequence=990), "where": "loss.py:2 in mine"}},
         f"1 on n1: hangs in step 57 at loss.py:2 in mine for 300 s; {OTHERS}"),
        ({1: {"collective": replace(ENDED, complete=False)}},  # one collective behind
         f"1 on n1: hangs in step 57 at step.py:9 in run for 300 s; {OTHERS}"),
        ({0: P2P, 1: P2P, 2: {**P2P, "stack": FRAME, "where": "net.py:3 in forward"}, 3: RING},
         "2 on n2: hangs in step 57 at net.py:3 in forward for 300 s; others wait in step 57 at pipe.py:5 in "
         "run"),
        ({0: P2P, 1: P2P, 2: P2P, 3: RING},
         "-1 on n1: no rank is behind and rank 0 answers, but they stand apart: rank 0 in step 57 at pipe.py:"
         "5 in run, rank 3 in step 57 at ring.py:7 in get for 300 s"),
        ({2: {"phase": None, "step": None, "stopped": True}},
         f"2 on n2: stopped by a signal (state T) at step.py:9 in run; {OTHERS}"),
        ({3: {"phase": None, "step": None}},
         f"3 on n3: hangs at step.py:9 in run, where its Python can't run; {OTHERS}"),
        ({3: {"unreachable": STORE}, 1: {"step": 56}},  # who is a step behind tells nothing then
         f"3 on n3: lost link: n3 can't reach rank 0 on n1 ({STORE}) any more; it stands in step 57 at "
         "step.py:9 in run (all_reduce 881 of default_pg)"),
        ({2: {"unreachable": STORE}, 3: {"unreachable": STORE}},  # then it is rank 0's host that is cut off
         f"0 on n1: lost link: n2, n3 can't reach rank 0 on n1 ({STORE}) any more; it stands in step 57 at "
         "step.py:9 in run (all_reduce 881 of default_pg)"),
        ({}, "-1 on n1: no rank is behind and rank 0 answers, but all stand in step 57 at step.py:9 in run "
             "for 300 s (all_reduce 881 of default_pg)"),
    ],
)  # fmt: skip
def test_the_root_cause_is_chosen_by_kind_and_time(
    folder: RunFolder, but: dict[int, dict[str, object]], line: str
) -> None:
    assert blamed(folder, but=but) == line


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ({}, "hangs in step 57 at step.py:9 in run for 300 s"),
        ({"phase": None, "step": None}, "hangs at step.py:9 in run, where its Python can't run"),
        ({"stopped": True}, "stopped by a signal (state T) in step 57 at step.py:9 in run"),
        ({"phase": None, "step": None, "is_script": True},
         "hangs at step.py:9 in run; it has not written anything for 300 s"),
    ],
)  # fmt: skip
def test_the_only_rank_of_a_run_is_the_one_that_hangs(
    folder: RunFolder, report: dict[str, object], message: str
) -> None:
    world = replace(World.discover({}), rank=0, world_size=1, host="n1", attempt="a")
    failure.record_hang(folder, world=world, message="no progress", stack=[])
    hang_report.write_report(folder, replace(WAITS, world_size=1, **report))  # type: ignore[arg-type]
    cause = cause_of(folder, failure.records(folder))
    assert (cause.rank, cause.host, cause.message) == (0, "n1", message)


def test_a_rank_that_gives_no_sign(folder: RunFolder) -> None:
    line = f"2 on n2: gave no sign for 300 s: its host may be cut off; {OTHERS}"
    assert blamed(folder, but={}, silent=(2,)) == line


def test_a_rank_that_has_ended_is_not_one_that_gives_no_sign(folder: RunFolder) -> None:
    world = replace(World.discover({}), rank=2, world_size=4, host="n2", attempt="a")
    normal_end.record(folder, world=world)
    line = f"1 on n1: hangs in loading the data of step 57 at step.py:9 in run for 300 s; {OTHERS}"
    assert blamed(folder, but={1: {"phase": "data"}}, silent=(2,)) == line


def test_after_the_end_of_rank_0_the_next_rank_watches_the_logs(folder: RunFolder) -> None:
    """The limit begins with its watch, and any rank's output moves it."""
    worlds = [replace(World.discover({}), rank=rank, world_size=4, attempt="a") for rank in range(4)]
    watches = [
        ScriptSupervisor(folder, world=world, process=1, timeout_s=100, environment={}) for world in worlds
    ]

    def hang(elapsed_s: float) -> list[int]:
        return [rank for rank in (2, 3) if watches[rank].hangs(elapsed_s, stopped=False)]

    assert hang(900) == []
    normal_end.record(folder, world=worlds[0])
    normal_end.record(folder, world=worlds[1])
    assert hang(60) == []
    folder.log(3, "out").write_text("step 1\n")
    assert hang(60) == []
    assert hang(60) == [2]


@pytest.mark.parametrize(
    ("phase", "place"),
    [
        ("start", "in the start at "),
        ("step", "in step 7 at "),
        ("validate", "in the validation after step 7 at "),
        ("done", "in the work after step 7 at "),
    ],
)
def test_the_place_of_a_rank_is_a_clause(phase: str, place: str) -> None:
    assert replace(WAITS, phase=phase, step=7).place == place + WAITS.where


def test_hang_reports_of_an_earlier_attempt_are_ignored(folder: RunFolder) -> None:
    hang_report.write_report(folder, replace(WAITS, attempt="before"))
    failure.record_hang(folder, world=World.discover({}), message="no progress", stack=[])
    assert cause_of(folder, failure.records(folder)) is None


def test_the_main_threads_stack_is_the_last() -> None:
    text = """Fatal Python error: Aborted

Thread 0x01 (most recent call first):
  File "/lib/threading.py", line 331 in wait

Current thread 0x02 (most recent call first):
  File "/lib/site-packages/torch/autograd/graph.py", line 979 in run
  File "/home/mine/train.py", line 12 in <lambda>
  File "/home/mine/main.py", line 3 in <module>

Extension modules: numpy (total: 1)
"""
    stack = stack_of(text)
    assert [line.rpartition(" ")[2] for line in stack] == ["<module>", "<lambda>", "run"]
    assert spot_of(stack) == "mine/train.py:12 in <lambda>"


def entry(sequence: int, state: str, *, group: str = "0", p2p: bool = False) -> dict[str, Any]:
    """As NCCL's flight recorder writes it; the host has queued the collective in any state."""
    return {
        "profiling_name": "nccl:send" if p2p else "nccl:all_reduce", "is_p2p": p2p, "state": state,
        "process_group": [group, "default_pg"], "retired": state == "retired",
        "collective_seq_id": 0 if p2p else sequence, "p2p_seq_id": sequence if p2p else 0,
    }  # fmt: skip


def test_the_progress_of_a_gpu_is_that_of_its_entries() -> None:
    queued = [entry(1, "retired"), entry(7, "completed", group="3"), entry(2, "completed"),
              entry(1, "completed", p2p=True)]  # fmt: skip
    pending = [entry(3, "started"), entry(8, "scheduled", group="3"), entry(4, "scheduled")]
    progress = device_progress([*queued, *pending])
    assert progress.waits_in == Collective("all_reduce", "0 default_pg", 3, complete=False)
    assert progress.next == Collective("all_reduce", "3 default_pg", 8, complete=False)
    assert progress.completed == {"0 default_pg": 2, "3 default_pg": 7}
    assert progress.queued == {"0 default_pg": 4, "3 default_pg": 8}
    assert device_progress([{**entry(3, "scheduled"), "profiling_name": "gloo:all_reduce"}]) is None


def test_a_send_of_a_batch_that_has_completed_does_not_wait() -> None:
    """Seen on an H100: the two entries of a batch never change, and the entry of the batch completes."""
    batch = [entry(1, "scheduled", p2p=True), entry(2, "scheduled", p2p=True), entry(3, "retired")]
    progress = device_progress([*batch, entry(4, "scheduled", group="3"), entry(5, "completed")])
    assert progress.next == Collective("all_reduce", "3 default_pg", 4)
    assert progress.completed == {"0 default_pg": 5}


def test_the_first_pending_collective_of_a_group_is_the_one_that_hangs() -> None:
    """A stuck reduce_scatter was told as a later all_gather, because a collective of gloo ended between."""
    stuck = {**entry(7, "started", group="3"), "profiling_name": "nccl:reduce_scatter"}
    of_gloo = {**entry(4, "retired"), "profiling_name": "gloo:all_reduce"}
    later = {**entry(8, "scheduled", group="3"), "profiling_name": "nccl:all_gather"}
    assert last_collective([entry(6, "retired", group="3"), stuck, of_gloo, later]) == Collective(
        "reduce_scatter", "3 default_pg", 7, complete=False
    )
    # The same number of another backend of the group says nothing about this one.
    assert last_collective([entry(2, "started"), of_gloo]).sequence == 2
    # What a later collective of its group has overtaken does not hang.
    forgotten = entry(1, "started", group="9")
    assert last_collective([forgotten, entry(2, "retired", group="9"), stuck]).sequence == 7
    assert last_collective([entry(6, "retired"), of_gloo]) == Collective(
        "all_reduce", "0 default_pg", 4, complete=True
    )
    # A save beside the training waits for its slowest rank.
    save = {**entry(3, "started"), "profiling_name": "gloo:gather", "process_group": ["1", "saving"]}
    assert last_collective([save, stuck]).sequence == 7
    assert last_collective([save]).sequence == 3


LOG: dict[str, object] = {"phase": "log", "where": "metrics.py:7 in line"}  # where every host needs the loss
HOSTS_WAIT = "the host stands in the metrics of step 57 at metrics.py:7 in line"


def test_a_gpu_that_hangs_is_named_although_all_hosts_wait_in_one_call(folder: RunFolder) -> None:
    waits = device_progress([entry(880, "completed"), entry(881, "started"), entry(882, "scheduled")])
    hangs = device_progress([entry(880, "completed"), entry(881, "scheduled"), entry(882, "scheduled")])
    but = {rank: {**LOG, "device": hangs if rank == 2 else waits} for rank in range(4)}
    assert blamed(folder, but=but) == (
        "2 on n2: its GPU hangs before all_reduce 881 of default_pg for 300 s; the GPU of ranks 0, 1, 3 "
        f"waits in all_reduce 881 of default_pg; {HOSTS_WAIT}"
    )
    # A host that was held up by the full queue of its GPU is no culprit.
    but[1] = {"device": waits, "step": 56}
    assert blamed(folder, but=but).startswith("2 on n2: its GPU hangs")
    # A host that reads its data has queued nothing more: its GPU is idle, and the host is to blame.
    idle = device_progress([entry(880, "completed")])
    but = {rank: {**LOG, "device": waits} for rank in range(3)} | {3: {"phase": "data", "device": idle}}
    assert blamed(folder, but=but) == (
        "3 on n3: hangs in loading the data of step 57 at step.py:9 in run for 300 s; the GPU of ranks "
        "0, 1, 2 waits in all_reduce 881 of default_pg, which it has not queued"
    )


def entered(*last: tuple[str, str], backend: str) -> dict[str, object]:
    """Two steps in one group; last: the names and phases of the newest collectives."""
    earlier = [("sum", "step 56"), ("max", "step 56"), ("gather", "log 56"), ("sum", "step 57")]
    calls = [Call(n, name, "4", n, phase) for n, (name, phase) in enumerate([*earlier, *last], 1)]
    waits = Collective(calls[-1].name, "0 default_pg", calls[-1].number)
    return {"collective": waits, "entered": [Entered(f"0 {backend}", [0, 1, 2, 3], calls)]}


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_rank_that_left_a_collective_out_is_named(folder: RunFolder, backend: str) -> None:
    """It is ahead of those that wait for it."""
    right = entered(("max", "step 57"), ("gather", "log 57"), backend=backend)
    wrong = {**LOG, **entered(("gather", "log 57"), backend=backend)}
    assert blamed(folder, but={0: right, 1: right, 2: right, 3: wrong}) == (
        "3 on n3: entered gather where ranks 0, 1, 2 entered max (collective 5), in the metrics of step 57 "
        "at metrics.py:7 in line for 300 s; others wait in step 57 at step.py:9 in run"
    )
    # Of two against two, the one whose step ended too early.
    assert blamed(folder, but={0: right, 1: wrong, 2: right, 3: wrong}).startswith("1 on n1: entered gather")
    assert blamed(folder, but={0: wrong, 1: right, 2: wrong, 3: right}).startswith("0 on n1: entered gather")
    # A rank that waits in no collective makes all others wait.
    computes = {**right, "collective": ENDED, "where": "loss.py:2 in mine"}
    line = blamed(folder, but={0: right, 1: computes, 2: right, 3: wrong})
    assert line.startswith("1 on n1: hangs in step 57 at loss.py:2 in mine for 300 s; others wait in")


def test_a_host_that_queues_ahead_on_its_gpu_leaves_nothing_out(folder: RunFolder) -> None:
    told = [entered(*[("max", "step 57")] * count, backend="nccl") for count in (1, 9, 50, 2)]
    assert blamed(folder, but=dict(enumerate(told))).startswith("-1 on n1: no rank is behind")
    # So far ahead that the records have no collective in common.
    numbers = [range(100, 132), range(28, 60), range(28, 60), range(28, 60)]
    assert blamed(folder, but=gathers(numbers, group="0 nccl")).startswith("-1 on n1: no rank is behind")


def test_a_rank_that_does_not_exist_is_not_blamed(folder: RunFolder) -> None:
    but = gathers([range(1, 9)] * 4, group="0 gloo", ranks=[0, 1, 2, 3, 99])
    assert blamed(folder, but=but).startswith("-1 on n1: no rank is behind")


def gathers(
    numbers: Sequence[Sequence[int]], *, group: str, ranks: Sequence[int] = (0, 1, 2, 3)
) -> dict[int, dict[str, object]]:
    """Each rank has entered the gathers of these numbers in a group that has `ranks`."""
    waits = Collective("gather", "0 default_pg", 9)
    calls = [[Call(n, "gather", "4", n, None) for n in of_rank] for of_rank in numbers]
    entered = [[Entered(group, list(ranks), made)] for made in calls]
    return {rank: {"collective": waits, "entered": found} for rank, found in enumerate(entered)}


def test_two_that_wait_for_each_other_in_the_first_step_are_both_told(folder: RunFolder) -> None:
    """Ranks 1 to 3 wait for rank 0 in their sum, and rank 0 for rank 3 in a group of these two."""
    first = Call(1, "sum", "4", 1, "step 57")
    of_all, of_two = (Collective("sum", group, 1) for group in ("0 default_pg", "1 ends"))
    all_ranks = {"collective": of_all, "entered": [Entered("0 gloo", [0, 1, 2, 3], [first])]}
    two = {"collective": of_two, "entered": [Entered("1 gloo", [0, 3], [first])], "where": "ends.py:4 in tie"}
    assert blamed(folder, but={0: two, 1: all_ranks, 2: all_ranks, 3: all_ranks}) == (
        "-1 on n1: ranks are in different collectives, and no earlier step shows which is right: rank 3: "
        "missing from sum (collective 1), in which rank 0 waited; rank 0: missing from sum (collective 1), "
        "in which ranks 1, 2, 3 waited for 300 s; rank 0 in step 57 at ends.py:4 in tie, rank 1 in step 57 "
        "at step.py:9 in run"
    )


def test_without_times_of_starts_the_last_completed_collective_tells(folder: RunFolder) -> None:
    """TORCH_NCCL_ENABLE_TIMING=0, so that no entry is ever `started`."""
    waits = device_progress([entry(880, "completed"), entry(881, "scheduled")])
    hangs = device_progress([entry(879, "completed"), entry(880, "scheduled"), entry(881, "scheduled")])
    but = {rank: {**LOG, "device": hangs if rank == 1 else waits} for rank in range(4)}
    assert blamed(folder, but=but) == (
        "1 on n1: its GPU has completed 879 collectives of 0 default_pg, another GPU 880; all hosts stand in "
        "the metrics of step 57 at metrics.py:7 in line for 300 s"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": "2"}, {"rank": 4}, {"rank": True}, {"world_size": 2**62}, {"host": None}, {"phase": "lunch"},
        {"phase": ["step"]}, {"step": None}, {"idle_s": "long"}, {"where": 1},
    ],
)  # fmt: skip
def test_a_report_that_no_rank_wrote_is_left_out(folder: RunFolder, wrong: dict[str, object]) -> None:
    (folder.logs / "rank-0.hang.json").write_text(json.dumps({**asdict(WAITS), **wrong, "more": [1]}))
    assert hang_report.read_reports(folder, attempt="a") == []


def test_parts_of_a_report_may_be_anything(folder: RunFolder) -> None:
    progress = DeviceProgress(waits_in=WAITS.collective, next=None, completed={"0 default_pg": 3})
    hang_report.write_report(folder, replace(WAITS, device=progress))
    assert hang_report.read_reports(folder, attempt="a") == [replace(WAITS, device=progress)]
    values = asdict(WAITS) | {"collective": {"name": 1}, "device": [2], "stack": [3, "x"], "stopped": "no"}
    values["entered"] = [
        1,
        {"group": "0 gloo"},
        {"group": "1", "ranks": ["a"], "calls": [[1], ["a", 2, 3, 4, 5]]},
    ]
    (folder.logs / "rank-0.hang.json").write_text(json.dumps(values))
    assert hang_report.read_reports(folder, attempt="a") == [
        replace(WAITS, collective=None, stack=["x"], entered=[Entered("1", [], [])])
    ]


class CountedStore:
    """The store of a start in memory; a key that is never set is a time-out."""

    def __init__(self) -> None:
        self.values: dict[str, str | bytes] = {}
        self.requests = Counter[str]()

    def set(self, key: str, value: str | bytes) -> None:
        self.requests["set"] += 1
        self.values[key] = value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self.requests["wait"] += len(keys)
        if not self.values.keys() >= set(keys):
            raise DistStoreError


def worlds(world_size: int) -> Iterator[World]:
    for rank in reversed(range(world_size)):  # rank 0 is the last, so that no test needs threads
        yield replace(World.discover({}), rank=rank, world_size=world_size, attempt="a")


@pytest.mark.parametrize("world_size", [8, 64, 512])
def test_the_work_of_a_hang_grows_with_the_number_of_ranks(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    store = CountedStore()
    met = [all_reported(store, world=world, until_s=0) for world in worlds(world_size)]
    assert met == [False] * (world_size - 1) + [True]  # they asked before rank 0 had seen all
    assert store.requests == {"set": world_size + 1, "wait": 2 * world_size - 1}
    text = json.dumps(asdict(WAITS) | {"world_size": world_size})
    for rank in range(world_size):
        (folder.logs / f"rank-{rank}.hang.json").write_text(text)
    (folder.rendezvous / "a.hang").write_text("")
    reads = Counter[str]()
    readable = failure.readable

    def counted(path: Path) -> dict[str, Any] | None:
        reads["files"] += 1
        return readable(path)

    monkeypatch.setattr(failure, "readable", counted)
    for world in worlds(world_size):  # each rank's parent looks twice
        supervisor = Supervisor(folder, world=world, process=1, timeout_s=10)
        for _ in range(2):
            supervisor.checked_at -= 10
            supervisor.check()
        assert supervisor.done
    assert reads == {"files": world_size}


def test_ranks_meet_through_a_real_store() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    three = list(worlds(3))
    met: dict[int, bool] = {}

    def meet(world: World) -> None:
        met[world.rank] = meet_hang(server.clone(), world=world, within_s=900)

    threads = [threading.Thread(target=meet, args=(world,)) for world in three]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert met == {0: True, 1: True, 2: True}
    # Nobody waited for the time-out, which is longer than a test may last.


def test_a_rank_waits_when_the_store_does_not_help() -> None:
    """It must not end before the others have reported: its end would break their connections."""

    class Gone(CountedStore):
        def set(self, key: str, value: str | bytes) -> None:
            raise RuntimeError("Broken pipe")

    (world,) = worlds(1)
    for store in (None, Gone()):
        began = time.monotonic()
        assert not meet_hang(store, world=world, within_s=0.2)
        assert time.monotonic() - began >= 0.2


class Clock:
    """Time that passes while a watchdog waits; `events` happen at the waits, by their number."""

    def __init__(self, events: dict[int, object]) -> None:
        self.now, self.waits, self.events = 1000.0, 0, events

    def wait(self, timeout_s: float) -> bool:
        self.now += timeout_s
        self.waits += 1
        event = self.events.get(self.waits)
        if callable(event):
            event()
        return self.waits > 40


def looked(folder: RunFolder, monkeypatch: pytest.MonkeyPatch, **events: object) -> float | None:
    """What a watchdog of 100 s sees of a rank that marks step 2 and then does what `events` say."""
    progress, clock = Progress(), Clock({})
    acts = {"mark": lambda: progress.mark("data", 3), "nap": lambda: setattr(clock, "now", clock.now + 500)}
    clock.events = {
        number: acts[name] for name, numbers in events.items() if name in acts for number in numbers
    }
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    progress.mark(events.get("phase", "step"), events.get("step", 2))  # type: ignore[arg-type]
    watchdog = _Watchdog(
        folder=folder, world=World.discover({}), timeout_s=100.0, progress=progress,
        first_timeout_s=events.get("first_timeout_s", 100.0), closed=clock,  # type: ignore[arg-type]
    )  # fmt: skip
    return watchdog._until_hang()


def test_time_without_a_mark_is_a_hang(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert looked(folder, monkeypatch) == pytest.approx(100)
    assert hang_report.alarm(folder, attempt="alone")  # the others are told


def test_marks_are_no_hang(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert looked(folder, monkeypatch, mark=range(8, 42, 8)) is None
    assert looked(folder, monkeypatch, phase="done") is None
    assert looked(folder, monkeypatch, phase="start", step=0) is None
    assert not hang_report.alarm(folder, attempt="alone")


def test_the_first_step_may_take_as_long_as_it_compiles(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert looked(folder, monkeypatch, step=1, first_timeout_s=600.0) is None  # within 40 looks of 10 s
    assert not hang_report.alarm(folder, attempt="alone")
    assert looked(folder, monkeypatch, step=1, first_timeout_s=300.0) == pytest.approx(300)
    hang_report.forget(folder, world=World.discover({}))
    assert looked(folder, monkeypatch, step=1) == pytest.approx(100)  # it does not compile
    assert hang_report.alarm(folder, attempt="alone")


def test_time_in_which_the_job_was_suspended_does_not_count(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert looked(folder, monkeypatch, nap=[3], mark=range(4, 42, 8)) is None


def test_the_alarm_of_another_rank_is_noticed(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    hang_report.raise_alarm(folder, attempt="alone")
    assert looked(folder, monkeypatch, mark=range(1, 42)) == pytest.approx(0)


def test_of_a_script_the_rank_outside_torch_is_behind_else_the_one_at_the_rarest_place(
    folder: RunFolder,
) -> None:
    waits = {
        "phase": None, "step": None, "is_script": True, "collective": None, "where": "train.py:9 in step",
        "stack": ['  File "/x/torch/autograd/graph.py", line 8 in run'],
    }  # fmt: skip
    loads = {**waits, "where": "train.py:7 in load", "stack": ['  File "/x/train.py", line 7 in load']}
    reads = {**waits, "stack": ['  File "/x/torch/utils/data/dataloader.py", line 7 in get']}
    silent = "no rank has written anything for 300 s"
    everyone = dict.fromkeys(range(4), waits)
    line = f"2 on n2: hangs at train.py:7 in load; others wait at train.py:9 in step; {silent}"
    assert blamed(folder, but={**everyone, 2: loads}) == line
    assert blamed(folder, but={**everyone, 3: reads, 1: {**waits, "where": "train.py:2 in f"}}).startswith(
        "3 "
    )
    assert blamed(
        folder, but={**dict.fromkeys(range(4), loads), 2: {**loads, "where": "rare.py:2 in f"}}
    ) == (f"2 on n2: hangs at rare.py:2 in f; others wait at train.py:7 in load; {silent}")
    assert blamed(folder, but=everyone) == (
        f"-1 on n1: no rank is behind; all stand at train.py:9 in step; {silent}"
    )
    stopped = {**everyone, 0: {**waits, "stopped": True}}
    assert blamed(folder, but=stopped) == (
        "0 on n1: stopped by a signal (state T) at train.py:9 in step; others wait at train.py:9 in step"
    )


@pytest.mark.parametrize(
    ("lines", "earlier"),
    [
        ([], 0),
        (["began"], 0),
        (["began", "ended", "began"], 1),
        (["began", "ended"], 1),  # rank 0 has not recorded its begin yet
        (["began", "ended", "resumed", "began"], 1),  # by hand after a failure
        (["began", "resumed"], 1),  # by hand after it completed
        (["began", "ended", "began", "ended", "resumed", "began", "ended"], 3),
    ],
)
def test_each_start_knows_how_many_came_before(folder: RunFolder, lines: list[str], earlier: int) -> None:
    text = "".join(json.dumps({word: "2026-11-26T00:00:00+00:00", "how": "killed"}) + "\n" for word in lines)
    folder.attempts.write_text(text)
    assert earlier_starts(folder) == earlier
