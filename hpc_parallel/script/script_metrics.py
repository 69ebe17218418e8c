"""Records the figures of a script: reads its own ones into `metrics.jsonl`, and measures each rank.

The parent of rank 0 reads the lines that rank 0 prints (`script.metrics`), what `job_context.log` writes, and
event files for TensorBoard. One process writes the file, so a restart can drop the steps that it repeats.
The parent of each rank measures the use of the device, the CPUs and the memory.
"""

from __future__ import annotations

import os
import re
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from hpc_parallel.failure.process_tree import tree_of
from hpc_parallel.job_context import LOGGED
from hpc_parallel.machine.device_state import device_state
from hpc_parallel.machine.topology import nvml_module
from hpc_parallel.machine.world import World
from hpc_parallel.problems import printable
from hpc_parallel.record.attempts import keep_metrics
from hpc_parallel.record.recorded_slow_ranks import device_file
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import DamagedError, is_file, open_regular, parse_line, size_of
from hpc_parallel.record.safe_write import append_line, write_json
from hpc_parallel.record.values import finite, integer, number

Figures = dict[str, Any]
Load = Callable[[], Iterable[Any]]  # the events that were added to a file since the last call
_MOST_BYTES = 2**20  # in one read; a longer line is cut
_EVERY = 10  # calls between two reads of event files, which list the folder, and two samples of all processes
_MOST_FILES, _MOST_FIGURES, _MOST_EVENT_BYTES = 64, 256, 2**30  # of TensorBoard
# Tags of the training loss in PyTorch's tutorials, in the Trainer of transformers and in Lightning.
_LOSSES = ("loss", "Loss/train", "train/loss", "train_loss", "train_loss_step")
_EXPONENT = re.compile(r"[eE][-+]?\d+")
_MEANS = ("utilisation", "power_w")  # the other figures are peaks


class MetricsWriter:
    """Call it from time to time while the script runs, and once after its end."""

    def __init__(self, folder: RunFolder, *, pattern: str | None) -> None:
        """pattern: `script.metrics`. What an earlier start has written is not read again."""
        self._folder = folder
        logged = folder.path / LOGGED
        self._logs = [_Log(logged, _logged_figures)]
        if pattern is not None:
            self._logs.append(_Log(folder.log(0, "out"), partial(figures_of, pattern=re.compile(pattern))))
        self._events = EventFiles(folder.path)
        self._is_first = True

    def __call__(self, is_last: bool) -> None:
        figures = [line for log in self._logs for line in log.read(is_last)]
        for line in [*figures, *self._events.read(is_last)]:
            if self._is_first and line["step"] > 0:  # a restart repeats steps; hyperparameters have step 0
                _, spent_s = keep_metrics(self._folder, until=line["step"] - 1)
                if spent_s:
                    append_line(self._folder.attempts, {"spent_s": spent_s})
                self._is_first = False
            append_line(self._folder.metrics, line)


class _Log:
    """The figures in the lines of a growing file."""

    def __init__(self, path: Path, parse: Callable[[str], Figures | None]) -> None:
        self._path, self._parse, self._offset = path, parse, size_of(path)

    def read(self, is_last: bool) -> list[Figures]:
        parsed: list[Figures | None] = []
        with suppress(OSError, DamagedError), open_regular(self._path) as file:
            file.seek(self._offset)
            while added := file.read(_MOST_BYTES):
                end = max(added.rfind(b"\n"), added.rfind(b"\r"))  # a progress bar writes no line end
                cut = end + 1 or (len(added) if is_last or len(added) == _MOST_BYTES else 0)
                parsed += map(self._parse, added[:cut].decode(errors="replace").splitlines())
                self._offset += cut
                file.seek(self._offset)
                if not cut:
                    break
        return [figures for figures in parsed if figures is not None]


def figures_of(line: str, pattern: re.Pattern[str]) -> Figures | None:
    """The figures in one line of output; None if it has no step. A figure that is not finite is null."""
    if (match := pattern.search(line)) is None:
        return None
    texts = {key: text for key, text in match.groupdict().items() if text is not None}
    texts |= {key: text + _exponent(line, match.end(key)) for key, text in texts.items() if key != "step"}
    try:
        values = {key: finite(float(text)) for key, text in texts.items()}
        step = values.pop("step", None)
    except ValueError:  # a group matched a text that is not a number
        return None
    return None if step is None else {"step": int(step), **values, "time": datetime.now(UTC).isoformat()}


def _exponent(line: str, place: int) -> str:
    """The exponent that follows there: a group such as `[0-9.]+` leaves out that of 8.1e-05."""
    exponent = _EXPONENT.match(line, place)
    return exponent[0] if exponent else ""


def _logged_figures(line: str) -> Figures | None:
    """The figures of one call of `job_context.log`."""
    values = parse_line(line.encode()) or {}
    if integer(values.get("step")) is None:
        return None
    return {
        key: value
        for key, value in values.items()
        if key == "time" or value is None or number(value) is not None
    }


class DeviceWatch:
    """Keeps a file with the figures of a rank up to date.

    Call it from time to time while the script runs, and once after its end. `cpu_cores` is the CPU time per
    second of all processes of the rank. `resident_bytes` is the largest sum of their memory; shared pages
    count once for each process. With an NVIDIA GPU, the file also has the figures of `device_state`.
    """

    def __init__(
        self, folder: RunFolder, *, world: World, process: int, environment: Mapping[str, str]
    ) -> None:
        """environment: the variables of the script."""
        self._file, self._process = device_file(folder, rank=world.rank), process
        self._figures: dict[str, Any] = {"rank": world.rank, "host": world.host}
        self._nvml = nvml_module()
        self._uuid = None if self._nvml is None else gpu_of(environment, nvml=self._nvml)
        self._started = time.monotonic()
        self._calls, self._samples, self._cpu_s = 0, 0, 0.0

    def __call__(self, is_last: bool) -> None:
        self._calls += 1
        if is_last:  # the processes have ended, so use what Linux counted
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            self._keep(used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)
        elif self._calls % _EVERY == 1:
            self._keep(*_used_by_tree(self._process))
            self._samples += 1
            for key, value in device_state(self._nvml, self._uuid).items():
                before = self._figures.get(key, value)
                mean = before + (value - before) / self._samples
                self._figures[key] = mean if key in _MEANS else max(before, value)
        else:
            return
        write_json(self._file, self._figures)

    def _keep(self, cpu_s: float, resident_bytes: int) -> None:
        self._cpu_s = max(self._cpu_s, cpu_s)
        self._figures["cpu_cores"] = self._cpu_s / (time.monotonic() - self._started)
        self._figures["resident_bytes"] = max(resident_bytes, self._figures.get("resident_bytes", 0))


def gpu_of(environment: Mapping[str, str], *, nvml: Any) -> str | None:
    """The UUID of a rank's GPU: by torch's convention, the local rank is its index. None without a GPU."""
    with suppress(nvml.NVMLError, ValueError):
        nvml.nvmlInit()
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        numbers = [str(index) for index in range(nvml.nvmlDeviceGetCount())]
        names = numbers if visible is None else [name for name in visible.split(",") if name]
        local_rank = int(environment["LOCAL_RANK"])
        name = names[local_rank if local_rank < len(names) else 0] if names else None
        if name is None or not name.isdecimal():
            return name
        return str(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(int(name))))
    return None


def _used_by_tree(process: int) -> tuple[float, int]:
    """Seconds on CPUs, and bytes of resident memory, of a process and its descendants."""
    cpu_s, resident_bytes = 0.0, 0
    for member in tree_of(process):
        with suppress(psutil.Error):
            cpu_s += sum(member.cpu_times()[:4])  # its own, and of the children that have ended
            resident_bytes += member.memory_info().rss
    return cpu_s, resident_bytes


class EventFiles:
    """The event files that appear in a run folder, outside of its own sub-folders."""

    def __init__(self, root: Path) -> None:
        """root: the run folder. An earlier start wrote the files that are in it now."""
        folder = RunFolder(root)
        self._root, self._skipped = root, {folder.code, folder.logs, folder.rendezvous, folder.slurm}
        self._loaders: dict[Path, Load] = dict.fromkeys(self._paths(), _nothing)
        self._calls = 0

    def read(self, is_last: bool) -> Iterator[dict[str, Any]]:
        """The figures that were added since the last call, one object for each step of a file."""
        self._calls += 1
        if not is_last and self._calls % _EVERY:
            return
        for path in self._paths():
            if path not in self._loaders:
                is_full = sum(load is not _nothing for load in self._loaders.values()) >= _MOST_FILES
                self._loaders[path] = _refuse(path, f"{_MOST_FILES} others are") if is_full else _loader(path)
            try:
                yield from _figures(self._loaders[path])
            except Exception as error:  # a damaged record ends the reading of its file
                self._loaders[path] = _refuse(path, f"{type(error).__name__}: {error}")

    def _paths(self) -> list[Path]:
        paths = []
        for place, folders, names in os.walk(self._root):
            folders[:] = sorted(name for name in folders if Path(place, name) not in self._skipped)
            paths += [Path(place, name) for name in sorted(names) if "tfevents" in name]
        return [path for path in paths if is_file(path) and not path.is_symlink()]


def _loader(path: Path) -> Load:
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    except ImportError:
        return _refuse(path, "install tensorboard beside hpc_parallel")
    if path.stat().st_size > _MOST_EVENT_BYTES:
        return _refuse(path, "it is larger than 1 GiB")
    load: Load = EventFileLoader(str(path)).Load
    return load


def _refuse(path: Path, reason: str) -> Load:
    print(printable(f"{path} is not read into metrics.jsonl: {reason}"), file=sys.stderr)
    return _nothing


def _nothing() -> Iterable[Any]:
    """The events of a file that is not read."""
    return ()


def _figures(load: Load) -> list[dict[str, Any]]:
    steps: dict[int, dict[str, Any]] = defaultdict(dict)
    for event in load():
        figures = steps[event.step]
        for value in event.summary.value:
            if (scalar := _scalar(value)) is not None and len(figures) < _MOST_FIGURES:
                figures[value.tag] = finite(scalar)
        figures["time"] = datetime.fromtimestamp(event.wall_time, UTC).isoformat()
    lines = [
        {"step": step, **{tag: number for tag, number in figures.items() if tag != "step"}}
        for step, figures in sorted(steps.items()) if len(figures) > 1
    ]  # fmt: skip
    for line in lines:
        if (loss := next((line[tag] for tag in _LOSSES if tag in line), None)) is not None:
            line["loss"] = loss
    return lines


def _scalar(value: Any) -> float | None:
    """The number of a summary's value; None for an image or a table. The reader makes all numbers tensors."""
    from tensorboard.util.tensor_util import make_ndarray

    if value.WhichOneof("value") != "tensor" or value.tensor.tensor_shape.dim:  # a shape may need much memory
        return None
    try:
        return float(make_ndarray(value.tensor))
    except (TypeError, ValueError):  # a text
        return None
