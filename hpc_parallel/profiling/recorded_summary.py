"""Where the time of recorded steps went, in a few lines."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_parallel.profiling.timeline import STEP, Event, Interval, Timeline, length, spans, union, without

DATA = "data"  # the range around the fetch of a batch
COPIES = ("Memcpy", "Memset", "aten::copy_", "aten::_to_copy")
MEANINGS = {
    "compute": "operators or kernels run",
    "copies": "data moves inside the device, or between host and device, and nothing else runs",
    "exposed communication": "a wait for other ranks with no computation beside it",
    "data": "the next batch is fetched",
    "idle": "none of these: the host's own work, or a pipeline's bubble",
}


def parts(events: Sequence[Event], *, on_gpu: bool) -> dict[str, int]:
    """Nanoseconds by use, which add up to the recorded time. The range STEP must enclose all events."""
    timeline = Timeline.read(events, on_gpu=on_gpu)
    (window,) = [event for event in events if event.name == STEP and not event.on_device]

    def inside(chosen: Sequence[Event]) -> list[Interval]:
        clipped = ((max(a, window.start), min(b, window.end)) for a, b in spans(chosen))
        return union((a - window.start, b - window.start) for a, b in clipped if a < b)

    data = inside([event for event in events if event.name == DATA and event.is_mark])
    moves = [event for event in events if event.name.startswith(COPIES) and event.on_device == on_gpu]
    waiting = timeline.waiting
    copies = without(without(inside(moves), waiting), data)
    compute = without(without(without(timeline.computing, waiting), data), copies)
    by_use = {
        "compute": length(compute),
        "copies": length(copies),
        "exposed communication": length(without(waiting, data)),
        "data": length(data),
    }
    return {**by_use, "idle": timeline.length - sum(by_use.values())}


def describe(events: Sequence[Event], *, steps: int, on_gpu: bool) -> str:
    """A table for people: for each use of time, its milliseconds per step, its share, and its meaning."""
    by_use = parts(events, on_gpu=on_gpu)
    total = sum(by_use.values())
    rows = [
        f"{name:<22} {nanoseconds / steps / 1e6:9.2f} ms  {nanoseconds / total:6.1%}  {MEANINGS[name]}"
        for name, nanoseconds in by_use.items()
    ]
    total_row = f"{'one step':<22} {total / steps / 1e6:9.2f} ms          slower than without the profiler"
    return "\n".join([*rows, total_row])
