"""Whom a hang is blamed on, by what the ranks told; and when a watchdog calls it one."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.supervise import failure, hang_report
from hpc_parallel.supervise.hang_report import Collective, HangReport
from hpc_parallel.supervise.progress import Progress
from hpc_parallel.supervise.supervisor import spot_of, stack_of
from hpc_parallel.supervise.world import World
from hpc_parallel.worker.watchdog import _Watchdog

HOSTS = ("n1", "n1", "n2", "n3")
STORE = "10.0.0.1:4000"
WAITS = HangReport(
    rank=0, host="n1", world_size=4, attempt="a", phase="step", step=57, idle_s=300.4,
    where="step.py:9 in run", stack=["  the waiting line"],
    collective=Collective("all_reduce", "default_pg", 881, complete=False),
)  # fmt: skip
ENDED = Collective("all_reduce", "default_pg", 880, complete=True)
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
    cause = hang_report.cause_of(folder, failure.records(folder))
    assert cause is not None
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
        ({}, "0 on n1: no rank is behind and rank 0 answers, but all stand in step 57 at step.py:9 in run "
             "for 300 s (all_reduce 881 of default_pg)"),
    ],
)  # fmt: skip
def test_the_root_cause_is_chosen_by_kind_and_time(
    folder: RunFolder, but: dict[int, dict[str, object]], line: str
) -> None:
    assert blamed(folder, but=but) == line


def test_a_rank_that_gives_no_sign(folder: RunFolder) -> None:
    line = f"2 on n2: gave no sign for 300 s: its host may be cut off; {OTHERS}"
    assert blamed(folder, but={}, silent=(2,)) == line


def test_hang_reports_of_an_earlier_attempt_are_ignored(folder: RunFolder) -> None:
    hang_report.write_report(folder, replace(WAITS, attempt="before"))
    failure.record_hang(folder, world=World.discover({}), message="no progress", stack=[])
    assert hang_report.cause_of(folder, failure.records(folder)) is None


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
    progress.mark("step", events.get("step", 2))  # type: ignore[arg-type]
    watchdog = _Watchdog(
        folder, world=World.discover({}), timeout_s=100.0, progress=progress, closed=threading.Event()
    )
    watchdog.closed = clock  # type: ignore[assignment]
    return watchdog._until_hang()


def test_time_without_a_mark_is_a_hang(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert looked(folder, monkeypatch) == pytest.approx(100)
    assert hang_report.alarm(folder, attempt="alone")  # the others are told


def test_marks_and_the_first_step_are_no_hang(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert looked(folder, monkeypatch, mark=range(8, 42, 8)) is None
    assert looked(folder, monkeypatch, step=1) is None  # it compiles, say
    assert not hang_report.alarm(folder, attempt="alone")


def test_time_in_which_the_job_was_suspended_does_not_count(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert looked(folder, monkeypatch, nap=[3], mark=range(4, 42, 8)) is None


def test_the_alarm_of_another_rank_is_noticed(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    hang_report.raise_alarm(folder, attempt="alone")
    assert looked(folder, monkeypatch, mark=range(1, 42)) == pytest.approx(0)
