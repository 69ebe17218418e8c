"""Reads the scalars of TensorBoard's event files, with TensorBoard's own reader."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hpc_parallel.problems import printable
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import is_file
from hpc_parallel.record.values import finite

Load = Callable[[], Iterable[Any]]  # the events that were added to a file since the last call
_EVERY = 10  # only every tenth call reads, because a read lists the folder
_MOST_FILES, _MOST_FIGURES, _MOST_BYTES = 64, 256, 2**30
# Tags of the training loss in PyTorch's tutorials, in the Trainer of transformers and in Lightning.
_LOSSES = ("loss", "Loss/train", "train/loss", "train_loss", "train_loss_step")


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
    if path.stat().st_size > _MOST_BYTES:
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
