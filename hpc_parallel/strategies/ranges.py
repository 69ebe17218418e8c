"""Named ranges for profilers, and the times of actions on the device.

While torch's profiler is on, a range is one of this profiler. Otherwise it is an NVTX range on a GPU.

A profiler's range on a GPU covers the kernels that the range's own thread launched. Autograd launches the
kernels of a backward pass from another thread, so a range around `backward()` misses them. But autograd makes
the stream of its caller wait for its work, so an event that is recorded after `backward()` comes after all of
this work. Therefore `action` records a pair of events while actions are recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch.profiler import record_function

from hpc_parallel.torch_internals import profiler_is_on

_NOTHING = nullcontext()


def marked(name: str) -> AbstractContextManager[object]:
    """A range around a piece of work. Without a profiler it costs one call, and on a GPU two NVTX calls.

    The range of a collective is named by it and its axis: `all_reduce replicate`.
    """
    if torch.compiler.is_compiling():  # the compiler can't trace profiler_is_on
        return _NOTHING
    if profiler_is_on():
        return record_function(name)
    return torch.cuda.nvtx.range(name) if _has_nvtx() else _NOTHING


@cache
def _has_nvtx() -> bool:
    return torch.cuda.is_available()


class DeviceEvent(Protocol):
    """A `torch.Event` with timing."""

    def record(self) -> None: ...

    def elapsed_time(self, event: Any, /) -> float:
        """Returns milliseconds from this event to a later one."""
        ...


class Action(NamedTuple):
    """A marked action; its times are nanoseconds since the recording began."""

    name: str
    start: int
    end: int


class ActionTimes:
    """Records a pair of events for each action. It never waits for the device."""

    def __init__(self, new_event: Callable[[], DeviceEvent]) -> None:
        self._new_event = new_event
        self._began = self._record()
        self._pairs: list[tuple[str, DeviceEvent, DeviceEvent]] = []

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        """Record the action `name`."""
        start = self._record()
        yield
        self._pairs.append((name, start, self._record()))

    def read(self) -> list[Action]:
        """Returns the recorded actions. The device must have completed them."""
        return [Action(name, self._ns(start), self._ns(end)) for name, start, end in self._pairs]

    def _ns(self, event: DeviceEvent) -> int:
        return round(self._began.elapsed_time(event) * 1e6)

    def _record(self) -> DeviceEvent:
        event = self._new_event()
        event.record()
        return event


_recording: list[ActionTimes] = []  # at most one; steps are measured one at a time


@contextmanager
def recorded_actions(new_event: Callable[[], DeviceEvent]) -> Iterator[ActionTimes]:
    """While active, each `action` is recorded in the returned ActionTimes."""
    _recording[:] = [ActionTimes(new_event)]
    try:
        yield _recording[0]
    finally:
        _recording.clear()


def action(name: str) -> AbstractContextManager[object]:
    """A range for profilers around a piece of work, with device events while actions are recorded."""
    return _recorded(name) if _recording else marked(name)


@contextmanager
def _recorded(name: str) -> Iterator[None]:
    with marked(name), _recording[0].around(name):
        yield
