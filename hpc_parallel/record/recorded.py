"""Runs as their folders describe them, for commands that read them during or after the run.

A folder may be incomplete or belong to another user. A file that is missing or can't be read reads as None or
empty. `damaged` lists the files that can't be read. Nothing is unpickled or executed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from hpc_parallel.record import attempts
from hpc_parallel.record.attempts import History
from hpc_parallel.record.endings import PRUNED, Failure, Stop, Summary
from hpc_parallel.record.environment_file import Environment
from hpc_parallel.record.metrics_file import MetricsLine, last_line, read_metrics
from hpc_parallel.record.owner import Owner
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import (
    LINES_BYTES,
    MAX_LINES,
    MIB,
    YAML_BYTES,
    DamagedError,
    is_real_folder,
    list_folder,
    parse_yaml,
    read_json,
    read_lines,
    read_text,
    read_yaml,
    size_of,
)
from hpc_parallel.record.sweep_folder import MANIFEST, sweep_of
from hpc_parallel.record.time_use import Interval, intervals, time_use, useful_share
from hpc_parallel.record.typed import build
from hpc_parallel.record.values import integer, table, text
from hpc_parallel.slurm.allocation import in_allocation
from hpc_parallel.slurm.jobs import Job

T = TypeVar("T")
# A folder with two of these files is a run folder: an unrelated folder may have one of them.
MARKS = {"attempts.jsonl", "config.yaml", "environment.json", "metrics.jsonl", "owner.json", "rendezvous",
         "summary.json"}  # fmt: skip
MAX_LEVELS = 32  # of nested folders that are searched for runs
_HEAD = re.compile(r"^(?:name|nodes|gpus_per_node|strategy|training|task):.*\n(?:[ -].*\n|\n)*", re.MULTILINE)


@dataclass(frozen=True)
class RecordedRun:
    """One run. Each file is read at first use and then cached; call `read_run` to read a run again."""

    path: Path  # absolute
    _damage: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.path)

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def name(self) -> str:
        return text(self.head.get("name")) or self.path.parent.name

    @cached_property
    def config(self) -> dict[str, Any] | None:
        """The whole resolved configuration."""
        return self._read(self.folder.config, read_yaml)

    @cached_property
    def head(self) -> Mapping[str, Any]:
        """The keys name, nodes, gpus_per_node, strategy, training and task of the configuration.

        The whole configurations of a thousand runs would take more than a second to parse.
        """
        tables = "".join(_HEAD.findall(self._config_text or ""))
        try:
            return table(parse_yaml(tables)) or self.config or {}
        except ValueError:
            return self.config or {}

    @cached_property  # a report of thousands of runs asks for it millions of times
    def strategy(self) -> str | None:
        return text(table(self.head.get("strategy")).get("name"))

    @cached_property
    def task(self) -> str | None:
        return text(table(self.head.get("task")).get("name"))

    @property
    def nodes(self) -> int | None:
        return integer(self.head.get("nodes"))

    @property
    def gpus_per_node(self) -> int | None:
        return integer(self.head.get("gpus_per_node"))

    @cached_property
    def summary(self) -> dict[str, Any] | None:
        return self._read(self.folder.summary, read_json)

    @cached_property
    def totals(self) -> Summary:
        """`summary` with checked types; without values if the file can't be read."""
        return build(Summary, self.summary) or Summary()

    @cached_property
    def failure(self) -> dict[str, Any] | None:
        return self._read(self.folder.failure, read_json)

    @property
    def root_cause(self) -> Failure | None:
        """`failure` with checked types."""
        return build(Failure, self.failure)

    @cached_property
    def stopped(self) -> Stop | None:
        return self._read(self.folder.stopped, lambda _: Stop.read(self.folder))

    @property
    def cause(self) -> str | None:
        """One line about why the run failed, or else why it stopped or was pruned."""
        if self.totals.outcome == PRUNED:
            return self.totals.ended_early
        ending = self.stopped if self.failure is None else self.root_cause
        return None if ending is None else ending.line

    @cached_property
    def owner(self) -> Owner | None:
        """The process or job that executes the run or did so last (`record/owner.py`)."""
        return self._read(self.folder.owner, lambda _: Owner.read(self.folder))

    @cached_property
    def environment(self) -> dict[str, Any] | None:
        return self._read(self.folder.environment, read_json)

    @cached_property
    def ran_on(self) -> Environment:
        """`environment` with checked types; without values if the file can't be read."""
        return build(Environment, self.environment) or Environment()

    @cached_property
    def attempts(self) -> History:
        return self._read(self.folder.attempts, lambda _: attempts.history(self.folder)) or History()

    def intervals(self, *, until: datetime) -> list[Interval]:
        """Where the time of the run went (`record/time_use.py`); empty if its folder does not say it."""
        events = self._read(self.folder.attempts, read_lines) or []
        return intervals(events, last_line=self.last_metrics, until=until)

    @property
    def useful_share(self) -> float | None:
        """The share of useful time of a run that goes on, or that has a summary; None if it is not known."""
        if self.summary is not None:
            return self.totals.useful_share
        events = self._read(self.folder.attempts, read_lines) or []
        return useful_share(time_use(events, last_line=self.last_metrics, until=datetime.now(UTC)))

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """Every whole line of `metrics.jsonl`, and of the evaluations beside the run, by step."""
        lines, evaluations = self.logged, self._read(self.folder.evaluations, read_metrics) or []
        return sorted([*lines, *evaluations], key=lambda line: line["step"]) if evaluations else lines

    @cached_property
    def logged(self) -> list[dict[str, Any]]:
        """Every whole line of `metrics.jsonl`; of a file that is too long, the last ones (see `damaged`)."""
        path = self.folder.metrics
        lines = self._read(path, read_metrics) or []
        if lines and (size_of(path) > LINES_BYTES or len(lines) >= MAX_LINES):
            limit = f"it has more than {LINES_BYTES // MIB} MiB or {MAX_LINES:,} lines"
            self._damage[path.name] = f"lines before step {lines[0]['step']}, because {limit}"
        return lines

    @cached_property
    def last_metrics(self) -> dict[str, Any] | None:
        """The last whole line of `metrics.jsonl`. Only the end of the file is read."""
        return self._read(self.folder.metrics, last_line)

    @cached_property
    def newest_line(self) -> MetricsLine | None:
        """`last_metrics` with checked types."""
        return MetricsLine.of(self.last_metrics) if self.last_metrics is not None else None

    @property
    def line_of_layout(self) -> MetricsLine | None:
        """`newest_line`, if it is of the newest start's layout; its speeds hold for no other one."""
        line, after = self.newest_line, self.attempts.layout_after_step
        return line if line is not None and (not after or line.step > after) else None

    @property
    def job_ids(self) -> list[str]:
        """Slurm's job ids in order. The newest job is included even while it waits for its first start."""
        jobs = [*self.attempts.job_ids, self.owner and self.owner.job_id]
        return list(dict.fromkeys(job for job in jobs if job))

    @property
    def job(self) -> Job | None:
        """The job of the newest start; None if it was not a Slurm job."""
        owner, ids = self.owner, self.job_ids
        if not ids or (owner is not None and owner.pid is not None):
            return None
        return owner.job if owner is not None and owner.job_id == ids[-1] else Job(ids[-1])

    @property
    def shares_jobs(self) -> bool:
        """Whether its jobs have other runs too, so that what Slurm accounts for them is not of this run."""
        is_packed = self.owner is not None and self.owner.is_packed
        launcher, sweep = (table((self.config or {}).get(key)) for key in ("launcher", "sweep"))
        return is_packed or in_allocation(launcher) or sweep.get("pack") == "auto"

    @property
    def damaged(self) -> dict[str, str]:
        """The run's files that exist and can't be read, each with the reason."""
        for name in ("config", "summary", "failure", "environment", "owner", "attempts", "last_metrics"):
            getattr(self, name)
        folder = self.folder
        files = (folder.config, folder.summary, folder.failure, folder.environment, folder.owner,
                 folder.attempts, folder.metrics)  # fmt: skip
        order = {path.name: number for number, path in enumerate(files)}
        return dict(sorted(self._damage.items(), key=lambda item: order.get(item[0], len(files))))

    @property
    def noticed(self) -> dict[str, str]:
        """The files of `damaged` that have been read so far."""
        return dict(self._damage)

    @cached_property
    def _config_text(self) -> str | None:
        return self._read(self.folder.config, lambda path: read_text(path, limit_bytes=YAML_BYTES))

    def _read(self, path: Path, read: Callable[[Path], T]) -> T | None:
        try:
            return read(path)
        except FileNotFoundError:
            return None
        except DamagedError as error:
            self._damage[error.path.name] = error.reason
            return None


def read_run(path: Path) -> RecordedRun:
    """The run of this folder, without cached files."""
    return RecordedRun(Path(os.path.expanduser(path)).absolute())


def is_run(path: Path) -> bool:
    """Whether a folder is a run folder, even if it is half-written or a copy without the empty folders.

    False for a folder that this user may not read.
    """
    return len(MARKS & {entry.name for entry in list_folder(path)}) > 1


def find_runs(root: Path) -> list[RecordedRun]:
    """The run in `root`, the runs of a sweep folder (in its order), or all runs in the tree (by path).

    Other files, hidden folders, links to folders, and folders that can't be read are skipped.
    """
    paths = _walk(Path(os.path.expanduser(root)).absolute(), MAX_LEVELS)
    return [RecordedRun(path) for path in dict.fromkeys(paths)]


def _walk(path: Path, levels: int) -> list[Path]:
    entries = list_folder(path)
    names = {entry.name for entry in entries}
    if len(MARKS & names) > 1:
        return [path]  # do not search inside a run: its source may contain other runs
    if MANIFEST in names and (sweep := sweep_of(path)) is not None:
        return [run.run_dir for run in sweep.runs if is_run(run.run_dir)]
    if not levels:
        return []
    folders = sorted(entry.name for entry in entries if entry.name[0] != "." and is_real_folder(entry))
    return [run for name in folders for run in _walk(path / name, levels - 1)]
