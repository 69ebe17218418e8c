"""Runs as their folders tell them, for whoever looks on or comes later.

Nothing in a folder has to be whole, or ours: what is missing, half-written or foreign reads as None or
empty. Nothing is unpickled or executed.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import yaml

from hpc_parallel.launch import attempts
from hpc_parallel.launch.metrics_file import MetricsReader, last_line
from hpc_parallel.launch.run_folder import RunFolder
from hpc_parallel.launch.sweep_folder import MANIFEST, read_sweep
from hpc_parallel.record.safe_read import read_json

T = TypeVar("T")
# A folder that holds two of these is a run's: one name alone is a stranger's too.
MARKS = {"attempts.jsonl", "config.yaml", "environment.json", "metrics.jsonl", "owner.json", "rendezvous",
         "summary.json"}  # fmt: skip
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # eight times as fast, where libyaml is there
_HEAD = re.compile(r"^(?:name|nodes|gpus_per_node|strategy|training|task):.*\n(?:[ -].*\n|\n)*", re.MULTILINE)


@dataclass(frozen=True)
class RecordedRun:
    """One run. A file is read when something in it is first asked for, and kept: who wants to see a living
    run go on reads it again (`read_run`)."""

    path: Path  # absolute

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.path)

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def name(self) -> str:
        said = self.head.get("name")
        return said if isinstance(said, str) else self.path.parent.name

    @cached_property
    def config(self) -> dict[str, Any] | None:
        """The whole resolved configuration."""
        return _tolerant(lambda: _parse(self.folder.config.read_text(encoding="utf-8")))

    @cached_property
    def head(self) -> Mapping[str, Any]:
        """The configuration's shape alone (name, nodes, gpus_per_node, strategy, training, task): of a
        thousand runs the whole would take more than a second to parse."""
        text = _tolerant(lambda: self.folder.config.read_text(encoding="utf-8")) or ""
        tables = "".join(_HEAD.findall(text))
        return _tolerant(lambda: _parse(tables)) or self.config or {}

    @property
    def strategy(self) -> str | None:
        return self._text("strategy", "name")

    @property
    def task(self) -> str | None:
        return self._text("task", "name")

    @property
    def nodes(self) -> int | None:
        return whole(self.head.get("nodes"))

    @property
    def gpus_per_node(self) -> int | None:
        return whole(self.head.get("gpus_per_node"))

    @cached_property
    def summary(self) -> dict[str, Any] | None:
        return self._json(self.folder.summary)

    @cached_property
    def failure(self) -> dict[str, Any] | None:
        return self._json(self.folder.failure)

    @cached_property
    def stopped(self) -> dict[str, Any] | None:
        """The signal that ended the newest start, and the step it saved."""
        return self._json(self.folder.stopped)

    @cached_property
    def owner(self) -> dict[str, Any] | None:
        """The process or job that runs it, or ran it last."""
        return self._json(self.folder.owner)

    @cached_property
    def environment(self) -> dict[str, Any] | None:
        return self._json(self.folder.environment)

    @cached_property
    def attempts(self) -> dict[str, Any]:
        """`restarts`, `lost_steps`, `started` (ISO 8601, UTC; None before the first start), `job_ids`."""
        known = _tolerant(lambda: attempts.history(self.folder))
        return known or {"restarts": 0, "lost_steps": 0, "started": None, "job_ids": []}

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """Every whole line."""
        return _tolerant(lambda: MetricsReader(self.folder.metrics).read()) or []

    @cached_property
    def last_metrics(self) -> dict[str, Any] | None:
        """The last whole line; only the end of the file is read."""
        return _tolerant(lambda: last_line(self.folder.metrics))

    @property
    def job_ids(self) -> list[str]:
        """Slurm's, in order; the last also where it waits for its first start."""
        known = [*self.attempts["job_ids"], (self.owner or {}).get("job_id")]
        return list(dict.fromkeys(str(job) for job in known if job))

    @property
    def damaged(self) -> list[str]:
        """Names of the run's files that are there and can't be read."""
        known = {
            self.folder.config: self.config,
            self.folder.summary: self.summary,
            self.folder.failure: self.failure,
            self.folder.environment: self.environment,
            self.folder.owner: self.owner,
        }
        return [path.name for path, value in known.items() if value is None and os.path.lexists(path)]

    def _text(self, table: str, key: str) -> str | None:
        values = self.head.get(table)
        said = values.get(key) if isinstance(values, dict) else None
        return said if isinstance(said, str) else None

    def _json(self, path: Path) -> dict[str, Any] | None:
        value: Any = _tolerant(lambda: read_json(path))
        return value if isinstance(value, dict) else None


def read_run(path: Path) -> RecordedRun:
    """The run of this folder, as it is from now on."""
    return RecordedRun(Path(path).expanduser().absolute())


def is_run(path: Path) -> bool:
    """Also where it is half-written or was copied without its empty folders."""
    return len(MARKS & {entry.name for entry in _entries(path)}) > 1


def find_runs(root: Path) -> list[RecordedRun]:
    """The run of the folder `root`, those of a sweep folder (in its order), or all in the tree (by path).

    What is no run is passed by: foreign files, hidden folders, links to folders, what can't be read.
    """
    root = Path(root).expanduser().absolute()
    found = dict.fromkeys(_walk(root))
    return [RecordedRun(path) for path in found]


def _walk(path: Path) -> list[Path]:
    entries = _entries(path)
    names = {entry.name for entry in entries}
    if len(MARKS & names) > 1:
        return [path]  # what a run keeps is not searched: it may hold another checkout's runs
    if MANIFEST in names and (sweep := _tolerant(lambda: read_sweep(path))) is not None:
        return [run.run_dir for run in sweep.runs if is_run(run.run_dir)]
    folders = sorted(
        entry.name for entry in entries if entry.name[0] != "." and entry.is_dir(follow_symlinks=False)
    )
    return [run for name in folders for run in _walk(path / name)]


def _entries(path: Path) -> list[os.DirEntry[str]]:
    return _tolerant(lambda: list(os.scandir(path))) or []


def _parse(text: str) -> dict[str, Any] | None:
    loader = _Loader(text)  # as yaml.safe_load, plain values alone, but by libyaml
    try:
        value = loader.get_single_data()
    finally:
        loader.dispose()
    return value if isinstance(value, dict) else None


def whole(value: Any) -> int | None:
    """A whole number that a file says; None for what is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def number(value: Any) -> float | None:
    """Any finite number; None for what is none."""
    real = isinstance(value, int | float) and not isinstance(value, bool)
    return value if real and abs(value) <= sys.float_info.max else None


def _tolerant(read: Callable[[], T]) -> T | None:
    """None for a file that is away, closed to us, half-written or foreign."""
    try:
        return read()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, yaml.YAMLError):
        return None
