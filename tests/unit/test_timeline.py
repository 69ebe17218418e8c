"""Timelines of events made by hand: what is waiting, what a bubble, what hidden."""

from __future__ import annotations

import math
import threading
from itertools import pairwise

import pytest
import torch

from hpc_parallel.profiling.timeline import BACKWARD, STEP, WAIT, Event, Timeline, union, without
from hpc_parallel.record.task_files import StageWork
from hpc_parallel.strategies.pipeline import BUSY, busy
from hpc_parallel.strategies.ranges import Action, recorded_actions

NODE = "autograd::engine::evaluate_function: AddBackward0"


def test_intervals_against_sets() -> None:
    random = torch.Generator().manual_seed(0)
    for _ in range(200):
        starts = torch.randint(0, 40, (2, 5), generator=random)
        sizes = torch.randint(1, 8, (2, 5), generator=random)
        first, second = (
            [(int(a), int(a + n)) for a, n in zip(*row, strict=True)]
            for row in zip(starts, sizes, strict=True)
        )
        a, b = union(first), union(second)
        points = [{t for start, end in found for t in range(start, end)} for found in (first, second)]
        assert {t for start, end in a for t in range(start, end)} == points[0]
        assert {t for start, end in without(a, b) for t in range(start, end)} == points[0] - points[1]
        assert all(x[1] < y[0] for x, y in pairwise(a))


def test_a_host_waits_in_marked_calls() -> None:
    events = [
        Event(STEP, 1000, 2000),
        Event(WAIT, 1100, 1200),
        Event("_c10d_functional::wait_tensor", 1150, 1250),
        Event(WAIT, 1990, 2100),  # goes on after the step
        Event(WAIT, 1500, 1700, thread=2),  # another's
        Event("gloo:all_reduce", 1000, 1900, thread=3, is_mark=True),  # beside what the host computes
    ]
    timeline = Timeline.read(events, on_gpu=False)
    assert (timeline.length, timeline.waiting) == (1000, [(100, 250), (990, 1000)])
    assert timeline.exposed(None) == 160
    assert timeline.bubble(None) == 0.0


def test_the_end_of_a_backward_pass_waits_for_its_buckets() -> None:
    events = [
        Event(STEP, 0, 1000),
        Event("aten::mm", 10, 100),
        Event(BACKWARD, 90, 600, is_mark=True),
        Event(NODE, 100, 200),
        Event("aten::mm", 120, 180),
        Event(NODE, 250, 300),  # the engine's own time before it
        Event("aten::as_strided", 350, 360),  # the first bucket is there, and goes to its gradients
        Event("aten::detach", 610, 611),
        Event("gloo:all_reduce", 150, 350, thread=3, is_mark=True),
        Event("gloo:all_reduce", 340, 500, thread=4, is_mark=True),
        Event("gloo:all_reduce", 580, 900, thread=3, is_mark=True),  # who waits for it says so
        Event("gloo:recv", 150, 1000, is_mark=True),  # the schedule waits for it, not the engine
        Event(BACKWARD, 700, 800, is_mark=True),  # has no node here
    ]
    assert Timeline.read(events, on_gpu=False).waiting == [(300, 350), (360, 500), (580, 600)]


def test_on_a_gpu_the_kernels_are_measured() -> None:
    events = [
        Event(STEP, 0, 1000),
        Event("ampere_sgemm", 100, 300, on_device=True),
        Event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 200, 500, on_device=True),
        Event("nccl:all_reduce", 0, 900, on_device=True, is_mark=True),
        Event("ampere_sgemm", 450, 600, on_device=True),
        Event(BUSY, 0, 10),  # the host launches
        Event(BUSY, 100, 300, on_device=True, is_mark=True),  # the profiler's range misses the second kernel
    ]
    timeline = Timeline.read(events, on_gpu=True, actions=[Action(BUSY, 100, 600)])
    assert timeline.waiting == [(300, 450)]
    assert timeline.stages == [(100, 600)]
    assert timeline.parts(None) == {"compute": 350, "communication": 150, "bubble": 0, "other": 500}


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 8), (4, 8), (2, 4)])
def test_gpipe_by_hand(ranks: int, microbatches: int) -> None:
    """Stages of equal weight idle (P-1)/(M+P-1) of the schedule (Huang et al. 2019), which is not exposed."""
    ticks = microbatches + ranks - 1
    for rank in range(ranks):
        forward = [(rank + i, rank + i + 1) for i in range(microbatches)]
        backward = [(2 * ticks - end, 2 * ticks - start) for start, end in forward]
        busy = [Event(BUSY, 10 * start, 10 * end, is_mark=True) for start, end in forward + backward]
        waits = [Event(WAIT, 0, 10 * rank), Event(WAIT, 10 * (2 * ticks - rank), 20 * ticks + 5)]
        timeline = Timeline.read([Event(STEP, 0, 1000), *busy, *waits], on_gpu=False)
        schedule = (0, 20 * ticks)
        assert timeline.bubble(schedule) == pytest.approx((ranks - 1) / ticks)
        assert timeline.exposed(schedule) == 5  # after the last stage's end


class Stream:
    """A device that runs work in order. The host is never ahead of it by a time that counts."""

    def __init__(self) -> None:
        self.now_ms = 3.0
        self.kernels: list[Event] = []

    def launch(self, kernel_ms: float, *, by_autograd: bool) -> None:
        """One kernel, from the thread that torch uses: autograd has its own for each GPU."""
        thread = threading.Thread(target=self._run, args=(kernel_ms,)) if by_autograd else None
        if thread is None:
            self._run(kernel_ms)
        else:
            thread.start()
            thread.join()

    def _run(self, kernel_ms: float) -> None:
        start_ms, self.now_ms = self.now_ms, self.now_ms + kernel_ms
        times_ns = (round(time_ms * 1e6) for time_ms in (start_ms, self.now_ms))
        self.kernels.append(Event("sgemm", *times_ns, thread=threading.get_ident(), on_device=True))

    def new_event(self) -> StreamEvent:
        return StreamEvent(self)


class StreamEvent:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def record(self) -> None:
        self.at_ms = self.stream.now_ms

    def elapsed_time(self, event: StreamEvent) -> float:
        return event.at_ms - self.at_ms


@pytest.mark.parametrize("rank", [0, 1])
def test_a_backward_pass_that_autograds_thread_launches_is_no_bubble(rank: int) -> None:
    """GPipe of two stages and four microbatches: (P-1)/(M+P-1) of the schedule is idle, 1 of 5."""
    forward_ms, backward_ms = 2.0, 4.0
    stream = Stream()
    with recorded_actions(stream.new_event) as times:
        stream.now_ms += rank * forward_ms  # it waits for the first activation
        for microbatch in range(4):
            with busy(rank, "forward", microbatch):
                stream.launch(forward_ms, by_autograd=False)
        stream.now_ms += (1 - rank) * (forward_ms + backward_ms)  # for the first gradient
        for microbatch in range(4):
            with busy(rank, "backward", microbatch):
                stream.launch(backward_ms, by_autograd=True)
    with busy(rank, "forward", 9):
        pass  # after the recording
    host = threading.get_ident()
    start_ns = 3_000_000
    # Kineto gives a range on a GPU the kernels of the range's thread: those of the forward passes.
    ranges = [
        Event(f"{BUSY} {rank} forward {index}", kernel.start, kernel.end, on_device=True, is_mark=True)
        for index, kernel in enumerate(stream.kernels) if kernel.thread == host
    ]  # fmt: skip
    assert len(ranges) == 4
    step = Event(STEP, start_ns, start_ns + 100_000_000, thread=host, is_mark=True)
    timeline = Timeline.read([step, *stream.kernels, *ranges], on_gpu=True, actions=times.read())
    schedule = (0, 30_000_000)
    assert timeline.bubble(schedule) == pytest.approx(1 / 5)
    assert timeline.parts(schedule)["compute"] == 24_000_000
    assert [chunk.kind for chunk in timeline.chunks] == ["forward"] * 4 + ["backward"] * 4
    begin_ms, end_ms = 8 + 6 - 4 * rank, 12 + 6 - 4 * rank
    assert timeline.chunks[4] == StageWork(begin_ms * 1e6 / 1e9, end_ms * 1e6 / 1e9, rank, "backward", 0)


def test_a_bubble_that_was_not_seen_is_no_number() -> None:
    assert math.isnan(Timeline.read([Event(STEP, 0, 10)], on_gpu=True).bubble((0, 0)))


@pytest.mark.parametrize("on_gpu", [False, True])
def test_named_collectives_change_no_figure(on_gpu: bool) -> None:
    """Ranges such as `all_reduce replicate` lie around a call, and a profiler copies them to the GPU."""
    events = [
        Event(STEP, 0, 1000),
        Event("aten::mm", 10, 100),
        Event("sgemm", 10, 100, on_device=True),
        Event("ncclDevKernel_AllReduce", 50, 250, on_device=True),
        Event(BACKWARD, 90, 600, is_mark=True),
        Event(NODE, 100, 200),
        Event("gloo:all_reduce", 150, 500, thread=3, is_mark=True),
        Event(f"{BUSY} 0 forward 0", 20, 300, is_mark=True),
        Event(f"{BUSY} 0 forward 0", 20, 300, on_device=True, is_mark=True),
        Event(WAIT, 700, 800, is_mark=True),
    ]
    names = ("all_reduce replicate", "all_gather context", "send pipeline", "all_to_all tile")
    ranges = [
        Event(name, start, start + 240, thread=thread, on_device=on_device, is_mark=True)
        for name, start in zip(names, (100, 250, 550, 750), strict=True)
        for thread, on_device in ((1, False), (2, False), (1, True))
    ]
    plain, named = (Timeline.read(found, on_gpu=on_gpu) for found in (events, [*events, *ranges]))
    assert named == plain
    assert plain.waiting


def test_the_parts_of_a_step_add_up() -> None:
    """On a host operators compute, marks and collectives do not; a schedule without work is bubble."""
    events = [
        Event(STEP, 1000, 2000, is_mark=True),
        Event(f"{BUSY} 1 forward 0", 1100, 1300, is_mark=True),
        Event("aten::mm", 1120, 1280),
        Event("aten::mul", 1150, 1160),  # inside: counted once
        Event("aten::mm", 1400, 1420),  # while the stage has no work
        Event("c10d::send", 1300, 1390),
        Event("gloo:send", 1300, 1990, thread=3, is_mark=True),
        Event(f"{BUSY} 1 loss", 1500, 1520, is_mark=True),
        Event(f"{BUSY} 1 backward 0", 1500, 1800, is_mark=True),
        Event("aten::mm", 1510, 1700, thread=2),  # a device's own thread
        Event(WAIT, 1900, 2100, is_mark=True),
        Event("aten::add_", 1850, 1950),
    ]
    timeline = Timeline.read(events, on_gpu=False)
    assert timeline.parts((50, 800)) == {
        "compute": 160 + 190 + 50,
        "communication": 100,
        "bubble": 50 + 200,
        "other": 1000 - 400 - 100 - 250,
    }
    assert timeline.chunks == [
        StageWork(100 / 1e9, 300 / 1e9, 1, "forward", 0),
        StageWork(500 / 1e9, 520 / 1e9, 1, "loss", None),
        StageWork(500 / 1e9, 800 / 1e9, 1, "backward", 0),
    ]  # fmt: skip
