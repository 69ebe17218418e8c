"""The next batch is read while a step runs: the same batches, errors and random numbers as without."""

from __future__ import annotations

import random
import sqlite3
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hpc_parallel.data.dataset import DatasetData
from hpc_parallel.data.generators import generator_states
from hpc_parallel.data.sampler import Batch, Batches
from hpc_parallel.failure.stacks import reader_of, spot_of
from hpc_parallel.training.read_ahead import ReadAhead
from hpc_parallel.user_code import UserCodeError, user_line
from hpc_parallel.worker.watchdog import stack_in
from tests.datasets import Sentences

STEPS, BATCH = 6, 4
CPU = torch.device("cpu")


class Squares:
    """Remembers which thread read which sample; `noisy` samples draw, `bad` ones raise."""

    def __init__(self, *, noisy: int | None = None, bad: int | None = None) -> None:
        self.noisy, self.bad = noisy, bad
        self.readers: dict[int, int] = {}
        self.gate = threading.Event()
        self.gate.set()

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[float, float]:
        self.gate.wait(20)
        self.readers[index] = threading.get_ident()
        if index == self.bad:
            raise OSError("the disk is gone")
        noise = random.random() + torch.rand(()).item() if index == self.noisy else 0.0
        return float(index), index**2 + noise


def batches_of(dataset: Any) -> Batches:
    data = DatasetData(dataset=dataset, validation=Validation())
    return Batches(samples=data.train, global_batch_size=BATCH, seed=5)


class Validation:
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> tuple[float, float]:
        return 0.0, 0.0


def index_at(step: int) -> int:
    """A sample of the 0-based step, which is none of those that are checked at the start."""
    return next(int(i) for i in batches_of(Squares()).positions(step) if int(i) not in (0, 13, 26, 39))


@pytest.fixture(autouse=True)
def opened() -> Iterator[list[ReadAhead]]:
    ahead: list[ReadAhead] = []
    yield ahead
    for reader in ahead:
        reader.close()


def ahead_of(batches: Batches, opened: list[ReadAhead], pins: list[int] | None = None) -> ReadAhead:
    def pin(batch: Batch, device: torch.device) -> Batch:
        if pins is not None:
            pins.append(threading.get_ident())
        return batch

    opened.append(ReadAhead(batches, steps=STEPS, device=CPU, pin=pin))
    return opened[-1]


def same(batch: Batch, other: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return all(torch.equal(one, two) for one, two in zip(batch[:2], other, strict=True))


@pytest.mark.parametrize("first", [0, 3])  # from the start, and after a restart from a checkpoint
def test_the_next_batch_is_read_and_pinned_in_another_thread(first: int, opened: list[ReadAhead]) -> None:
    dataset, pins = Squares(), list[int]()
    batches = batches_of(dataset)
    ahead = ahead_of(batches, opened, pins)
    expected = [batches_of(Squares()).at(step) for step in range(STEPS)]
    for step in range(first, STEPS):
        dataset.readers.clear()
        assert same(ahead.next(step), expected[step])
        ahead.settle()  # as if the step took longer than the reading
        next_samples = batches.positions(step + 1).tolist() if step + 1 < STEPS else []
        others = {index for index, thread in dataset.readers.items() if thread != threading.get_ident()}
        assert others == set(next_samples)  # one batch ahead, no more, and none after the last
    assert len(pins) == STEPS - first
    assert pins[0] == threading.get_ident()  # the first batch, which nothing has read ahead
    assert threading.get_ident() not in pins[1:]


def test_a_step_begins_while_the_next_batch_is_not_there(opened: list[ReadAhead]) -> None:
    dataset = Squares()
    ahead = ahead_of(batches_of(dataset), opened)
    ahead.next(0)
    ahead.settle()
    dataset.gate.clear()
    ahead.next(1)  # the reading of the batch of step 2 stands still
    deadline_s = time.monotonic() + 240
    while "__getitem__" not in [frame.name for frame in stack_in("data")]:
        assert time.monotonic() < deadline_s  # a watchdog shows where the thread reads ...
    assert stack_in("step")[-1].name == "stack_in"  # ... and in another phase the main thread
    dataset.gate.set()
    assert same(ahead.next(2), batches_of(Squares()).at(2))
    ahead._on = False
    ahead.settle()
    assert stack_in("data")[-1].name == "stack_in"  # then the main thread reads


def test_an_error_is_raised_at_its_step_with_its_line(opened: list[ReadAhead]) -> None:
    ahead = ahead_of(batches_of(Squares(bad=index_at(2))), opened)
    ahead.next(0)
    ahead.next(1)
    message = (
        r"^OSError: the disk is gone \(test_read_ahead.py:\d+\), "
        rf"raised by sample {index_at(2)} of Squares \(training\)"
    )
    with pytest.raises(UserCodeError, match=message) as raised:
        ahead.next(2)
    assert raised.value.__cause__ is not None
    assert str(user_line(raised.value.__cause__)).startswith("test_read_ahead.py:")


class Stored(Squares):
    """A database that the main thread has opened."""

    def __init__(self) -> None:
        super().__init__()
        self.table = sqlite3.connect(":memory:")

    def __getitem__(self, index: int) -> tuple[float, float]:
        return self.table.execute("select ?, ?", (index, index**2)).fetchone()  # type: ignore[no-any-return]


def test_what_belongs_to_the_main_thread_is_named_with_a_remedy(opened: list[ReadAhead]) -> None:
    ahead = ahead_of(batches_of(Stored()), opened)
    ahead.next(0)
    with pytest.raises(UserCodeError, match=r"of Stored .*: open the database at the first sample"):
        ahead.next(1)


def test_samples_that_draw_are_read_in_the_main_thread(opened: list[ReadAhead]) -> None:
    batches = Batches(
        samples=DatasetData(dataset=Sentences(50, noise=0.5)).train, global_batch_size=4, seed=3
    )
    assert batches.draws
    before = generator_states()
    ahead = ahead_of(batches, opened)
    for step in range(3):
        assert same(ahead.next(step), batches.at(step))
    assert ahead._thread is None
    assert generator_states() == before


def test_a_sample_that_draws_late_changes_nothing(opened: list[ReadAhead]) -> None:
    """It was not among the samples of the start, so a thread has read it and drawn for it."""
    noisy = index_at(2)
    batches = batches_of(Squares(noisy=noisy))
    assert not batches.draws
    expected = [batches.at(step) for step in range(STEPS)]
    before = generator_states()
    ahead = ahead_of(batches, opened)
    assert all(same(ahead.next(step), batch) for step, batch in enumerate(expected))
    assert generator_states() == before


def test_a_model_that_draws_keeps_its_numbers(opened: list[ReadAhead]) -> None:
    def numbers(ahead: ReadAhead | None) -> list[tuple[float, float, float]]:
        torch.manual_seed(1), np.random.seed(1), random.seed(1)
        drawn = []
        for step in range(STEPS):
            if ahead is not None:
                assert same(ahead.next(step), batches_of(Squares()).at(step))
            drawn.append((torch.rand(()).item(), np.random.rand(), random.random()))
        return drawn

    assert numbers(ahead_of(batches_of(Squares()), opened)) == numbers(None)


def test_the_thread_ends() -> None:
    ahead = ReadAhead(batches_of(Squares()), steps=STEPS, device=CPU)
    ahead.next(0)
    thread = ahead._thread
    assert thread.daemon  # so a read that hangs does not keep the process
    ahead.close()
    thread.join(20)
    assert not thread.is_alive()


def test_the_reading_thread_in_a_dump_of_stacks() -> None:
    text = """Fatal Python error: Aborted

Thread 0x01 (most recent call first):
{reading}  File "/x/hpc_parallel/training/read_ahead.py", line 80 in _read_requested
  File "/lib/threading.py", line 982 in run

Current thread 0x02 (most recent call first):
  File "/home/mine/main.py", line 3 in <module>
"""
    reading = '  File "/home/mine/nfs.py", line 7 in __getitem__\n'
    assert spot_of(reader_of(text.format(reading=reading))) == "mine/nfs.py:7 in __getitem__"
    assert reader_of(text.format(reading="")) == []  # it waits for a request


def test_a_main_thread_that_joins_a_replica_stands_where_the_replica_is() -> None:
    """nn.DataParallel runs each replica in a thread, which may hang in the user's model."""
    places: list[str] = []

    def replica() -> None:
        until = time.monotonic() + 20
        while "replica" not in places and time.monotonic() < until:  # the main thread may not wait yet
            places[:] = [frame.name for frame in stack_in("step")]

    thread = threading.Thread(target=replica)
    thread.start()
    thread.join()
    assert places[-2:] == ["replica", "stack_in"]
