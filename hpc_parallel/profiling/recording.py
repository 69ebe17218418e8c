"""Records a window of steps for a profiler, only on the chosen ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from hpc_parallel.config.schema import ProfileConfig
from hpc_parallel.failure.left_out import left_out
from hpc_parallel.problems import print_warning
from hpc_parallel.profiling.timeline import (
    STEP,
    Event,
    Timeline,
    events_of,
    length,
    marked_waits,
    spans,
    within,
    without,
)
from hpc_parallel.record.safe_write import write_text
from hpc_parallel.torch_internals import record_memory, write_memory

PROFILE = "the profile of this rank is"


class Recording:
    """The recorded window of this rank: each step of the window, with the fetch of its batch."""

    def __init__(
        self, config: ProfileConfig, *, folder: Path, rank: int, device: torch.device,
        leave_out: Callable[[float], None],
    ) -> None:  # fmt: skip
        """folder: where the files go; `leave_out` is called with the seconds of each recorded step."""
        self._config, self._folder, self._rank, self._device = config, folder, rank, device
        self._leave_out = leave_out
        window = range(config.first_step, config.first_step + config.steps)
        self._window = window if config.kind != "none" and rank in config.ranks else range(0)
        self._all = window if config.kind != "none" else range(0)  # other ranks wait for the recorded ones
        self.on = config.kind != "none"
        self._trace: _Trace | None = None
        self._recorded = 0
        self._began_s = 0.0

    def loading(self, step: int) -> AbstractContextManager[None]:
        """The context in which to fetch the batch of the 1-based `step` since the start."""
        if step in self._all:
            self._began_s = time.perf_counter()
            if step == self._window.start and self._window:
                with left_out(PROFILE):
                    self._start()
        return nullcontext()

    def watch(self, step: int) -> AbstractContextManager[None]:
        return self._record(step) if step in self._all else nullcontext()

    def _start(self) -> None:
        if self._config.kind == "torch":
            self._trace = _Trace(self._device, memory=self._config.memory)
        else:
            torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())

    @contextmanager
    def _record(self, step: int) -> Iterator[None]:
        yield
        self._recorded += step in self._window
        if step == self._window[-1] if self._window else False:
            self.close()
        self._leave_out(time.perf_counter() - self._began_s)

    def close(self) -> None:
        """Write what was recorded, also if the training ends inside the window."""
        with left_out(PROFILE):
            if self._trace is not None:
                trace, self._trace = self._trace, None
                trace.write(self._folder, rank=self._rank, first=self._window.start, steps=self._recorded)
            elif self._recorded and self._config.kind in ("nsys", "ncu"):
                torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStop())
        self._recorded = 0


class _Trace:
    """torch's profiler, on from the construction until `write`."""

    def __init__(self, device: torch.device, *, memory: bool) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise Kineto writes to the rank's log
        self._on_gpu = device.type == "cuda"
        self._memory = memory and self._on_gpu
        if memory and not self._on_gpu:
            print_warning("profile.memory records GPU memory, and this rank has no GPU")
        if self._memory:
            record_memory(True)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        with ExitStack() as stack:
            stack.enter_context(marked_waits())
            self._profile = stack.enter_context(profile(activities=activities, record_shapes=True))
            stack.enter_context(record_function(STEP))
            self._contexts = stack.pop_all()

    def write(self, folder: Path, *, rank: int, first: int, steps: int) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()
        self._contexts.close()
        folder.mkdir(mode=0o700, exist_ok=True)
        if self._memory:
            _write_beside(folder / f"rank-{rank}-memory.pickle", write_memory)
            record_memory(False)
        export = self._profile.export_chrome_trace
        _write_beside(folder / f"rank-{rank}.json.gz", lambda path: export(str(path)))
        head = f"rank {rank}, steps {first} to {first + steps - 1} since the start"
        text = describe(events_of(self._profile), steps=steps, on_gpu=self._on_gpu)
        key = "self_device_time_total" if self._on_gpu else "self_cpu_time_total"
        table = self._profile.key_averages().table(sort_by=key, row_limit=15, max_name_column_width=50)
        write_text(folder / f"rank-{rank}.txt", f"{head}\n{text}\n\n{table}\n")


def _write_beside(path: Path, write: Callable[[Path], object]) -> None:
    """Let torch write a file under a temporary name, and rename the file when it is complete."""
    half_written = path.with_name(f".{path.name}")
    write(half_written)
    half_written.chmod(0o600)
    half_written.rename(path)


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
    data = within(spans(event for event in events if event.name == DATA and event.is_mark), window)
    moves = [event for event in events if event.name.startswith(COPIES) and event.on_device == on_gpu]
    waiting = timeline.waiting
    copies = without(without(within(spans(moves), window), waiting), data)
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
