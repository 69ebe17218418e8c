"""Runs as rows: the figures in their folders, in SI units, and a label that distinguishes them.

A folder may be half-written, running, failed or damaged. A missing value is None and is never guessed.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from hpc_parallel.config.script import KINDS
from hpc_parallel.config.script import TASK as SCRIPT
from hpc_parallel.failure.run_state import states
from hpc_parallel.failure.summary import (
    OPTIMIZER_SPEEDLESS,
    SPEEDLESS,
    computed_as,
    of_newest_layout,
    summarise,
)
from hpc_parallel.layout.axes import AXES, with_all_axes
from hpc_parallel.layout.layout import Layout, layout_of, recorded_strategy
from hpc_parallel.layout.schedules import SUFFIX
from hpc_parallel.problems import printable
from hpc_parallel.record import attempts
from hpc_parallel.record.credentials import without_secret_values
from hpc_parallel.record.endings import PRUNED
from hpc_parallel.record.names import RUN_COMMAND
from hpc_parallel.record.recorded import RecordedRun, find_runs
from hpc_parallel.record.safe_read import read_lines
from hpc_parallel.record.sweep_folder import MANIFEST, Sweep, sweep_of
from hpc_parallel.record.task_files import RankTimeline, StepTimeline
from hpc_parallel.record.time_use import time_of
from hpc_parallel.record.values import flatten, table, without
from hpc_parallel.report.figures import Spread, fullest, is_count, number, throughput_spread
from hpc_parallel.report.labels import RUN_KEYS, Label, defaults, labels_of

COMPLETED = "completed"
SPEEDS = ("samples_per_s", "step_time_s")  # figures with a spread
FIGURES = (  # of summary.json, with the keys and units of its contract
    "samples_per_s", "tokens_per_s", "latency_s", "step_time_s", "peak_memory_bytes", "bubble_share",
    "exposed_communication_share", "traffic_bytes", "busiest_rank_traffic_bytes", "final_loss",
    "validation_loss", "restarts", "steps", "samples",
)  # fmt: skip
PARTS = ("compute", "communication", "bubble", "data", "other")  # of a step's time
# Keys of `training` that change how a step is computed, but not its result.
SAME_RESULT = ("microbatch_size", "compile", "compile_whole", "activation_checkpointing")
REPEATED = {*RUN_KEYS, "seed"} - {"nodes", "gpus_per_node"}  # keys in which repeated runs may differ
MAX_STARTS = 1000
MAX_OVERLAP = 4  # chunks of a rank at the same time: its compute and its transfers
SWEEPS = ("", "*/", "*/*/")  # where sweep folders are in a folder of runs


@dataclass(frozen=True)
class Row:
    """One run."""

    run: RecordedRun
    state: str
    ended: bool
    names: Label
    layout: Mapping[str, int]  # axis -> degree
    devices: int | None
    # FIGURES, `device_hours`, `exposed_communication_s` (of a step) and `state_bytes` (of the fullest rank);
    # None if not measured.
    figures: Mapping[str, float | None]
    parts: Mapping[str, float] | None  # PARTS of a profiled step, seconds
    spread: Spread  # of the throughput
    repeats: Sequence[Row] = ()  # the completed runs that are equal except for the seed, with this one

    def range_of(self, key: str) -> tuple[float, float] | None:
        """The least and largest value of a figure in this run and its repeats; of speeds, in samples/s."""
        speed = SPEEDS[0] if key in SPEEDS else None
        ends = [
            (speed and row.spread.limits) or (row.figures[speed or key],) for row in self.repeats or (self,)
        ]
        known = [value for of_run in ends for value in of_run if value is not None]
        return (min(known), max(known)) if known else None

    @property
    def label(self) -> str:
        end = "ended early" if self.completed and self.run.totals.ended_early else self.state
        if end not in ("ended early", PRUNED):
            return str(self.names)
        return f"{self.names} ({end} at step {self.figures['steps'] or 0:.0f})"

    @property
    def completed(self) -> bool:
        return self.state == COMPLETED

    @property
    def folder(self) -> str:
        """The run folder; relative if it is in the working directory, because others may read the report."""
        path, current = self.run.path, Path.cwd()
        return str(path.relative_to(current) if path.is_relative_to(current) else path)

    @cached_property
    def strategy(self) -> str:
        return printable(self.run.strategy or "unknown")

    @property
    def shape(self) -> str:
        """The numbers of nodes and of devices per node."""
        nodes, gpus = self.run.nodes, self.run.gpus_per_node
        return "unknown" if nodes is None or gpus is None else f"{nodes} x {gpus}"

    @property
    def processes(self) -> int:
        return int(number(self.run.totals.world_size) or self.devices or 1)

    @property
    def hosts(self) -> int:
        """The number of different hosts of the run's ranks; 0 if unknown."""
        return len({place.host for place in self.run.ran_on.places} - {None})

    @property
    def on_cpu(self) -> bool:
        """Whether the run's devices were processes on a CPU; False if unknown."""
        return self.run.ran_on.cuda is None

    @cached_property
    def config(self) -> dict[str, Any]:
        """The recorded values; a user's schedule without its folder, because its name tells its contents."""
        config = self.run.config or {}
        strategy = config.get("strategy")
        if not isinstance(strategy, dict) or not str(strategy.get("schedule")).endswith(SUFFIX):
            return config
        return config | {"strategy": strategy | {"schedule": Path(strategy["schedule"]).name}}

    def section(self, name: str) -> dict[str, Any]:
        """A section of the configuration; empty if the file has none."""
        section = self.config.get(name)
        return section if isinstance(section, dict) else {}

    @property
    def layout_text(self) -> str:
        if not self.layout:
            return "unknown"
        server = "a server and " * (self.processes > math.prod(self.layout.values()))
        return f"{server}{Layout(**self.layout)}"

    @property
    def notes(self) -> list[str]:
        damaged = ", ".join(f"{name} ({reason})" for name, reason in self.run.damaged.items())
        return [text for text in (damaged and f"can't be read: {damaged}", self.run.cause) if text]

    @property
    def workload(self) -> tuple[str, ...]:
        """What the run computes: figures of the same workload are comparable."""
        sections = (self.config.get(key) for key in ("task", "model", "data"))
        parts = (*sections, self.program)
        return tuple(repr(flatten(part) if isinstance(part, dict) else part) for part in parts)

    @property
    def program(self) -> dict[str, Any]:
        """The user's own script, without its arguments and the name of the folder of its copy."""
        values = {key: self.section("script").get(key) for key in KINDS}
        return {key: re.sub("^code/[^/]*/", "", str(value)) for key, value in values.items() if value}

    def is_alike(self, other: Row) -> bool:
        """Whether two strategies resulted in the same degrees of all axes and the same options."""
        options, other_options = (
            {key: value for key, value in row.section("strategy").items() if key not in ("name", *AXES)}
            for row in (self, other)
        )
        return self.layout == other.layout and self.shape == other.shape and options == other_options

    @property
    def global_batch_size(self) -> int | None:
        size = self.section("training").get("global_batch_size")
        return size if is_count(size) else None

    @cached_property
    def work(self) -> tuple[object, ...]:
        """What one step computes: times, bytes and shares of the same work are comparable."""
        return *self.workload, self.global_batch_size

    @cached_property
    def settings(self) -> tuple[object, ...]:
        """All that decides the work of a step and its device: speeds with equal settings are comparable.

        Two runs with the same settings may differ in how a step is computed (strategy, devices, microbatches,
        compilation, recomputation), and in numbers that change no speed, such as the learning rate.
        """
        return identity(self._computation(optimizer_without=OPTIMIZER_SPEEDLESS)), self.machine

    @cached_property
    def loss_settings(self) -> str:
        """All settings that decide the loss after a number of samples; for a script, all its arguments."""
        start = {key: self.config.get(key) for key in ("seed", "weights", "script")}
        return identity({**self._computation(), **start})

    @cached_property
    def repeated(self) -> str:
        """What runs have in common that are equal except for the seed."""
        return identity(without(self.config, REPEATED))

    def _computation(self, *, optimizer_without: Sequence[str] = ()) -> dict[str, Any]:
        """The sections that decide what a step computes, without keys that change no result.

        Sections about the site and its supervision (cluster, preflight, fabric, profile) are not included.
        """
        return {
            **{key: self.config.get(key) for key in ("task", "model", "data")},
            "script": self.program,
            "training": without(self.section("training"), (*SPEEDLESS, *SAME_RESULT)),
            "optimizer": without(self.section("optimizer"), optimizer_without),
        }

    @property
    def machine(self) -> tuple[object, ...]:
        """The kind of device: its name, the cores of its process, and how many packed runs share it.

        A part that is not recorded is None.
        """
        cores = self.section("launcher").get("cpus_per_device")
        runs = self.section("sweep").get("runs_per_gpu")
        return self.run.ran_on.device, self.on_cpu, repr(cores), repr(runs or 1)


@dataclass(frozen=True)
class Gathered:
    """The content of a report."""

    folders: Sequence[Path]
    rows: Sequence[Row]
    left_out: Sequence[tuple[str, str]] = ()  # overrides that did not run, and why
    commands: Sequence[tuple[str, str]] = ()  # folder name and command of each sweep


def identity(config: Mapping[Any, Any]) -> str:
    """A text that is the same for the same values in any order.

    It omits defaults, because a run that is older than a key lacks it.
    """
    values, usual = flatten(config), defaults()
    return repr(sorted(
        (key, repr(value)) for key, value in values.items() if key not in usual or usual[key] != value
    ))  # fmt: skip


def gather(folders: Sequence[Path]) -> Gathered:
    """Read each run once: from run folders, sweep folders, and folders that contain such folders."""
    runs = list({run.path: run for folder in folders for run in find_runs(folder)}.values())
    labels = labels_of(runs, [str(Layout(**_layout(run))) for run in runs])
    rows = [
        _row(run, state=state.name, ended=state.ended, names=label)
        for run, state, label in zip(runs, states(runs), labels, strict=True)
    ]
    paths = {run.path for run in runs}
    manifests = sorted({path for folder in folders for at in SWEEPS for path in folder.glob(at + MANIFEST)})
    sweeps = {at.parent: sweep for at in manifests if (sweep := sweep_of(at.parent)) is not None}
    return Gathered(
        folders,
        _with_repeats(rows),
        left_out=[skipped for sweep in sweeps.values() for skipped in _left_out(sweep, paths)],
        commands=[  # as typed, without values that may hold a credential: others may read the report
            (path.name, shlex.join((*RUN_COMMAND, *without_secret_values(sweep.command))))
            for path, sweep in sweeps.items()
        ],
    )


def _with_repeats(rows: Sequence[Row]) -> list[Row]:
    groups: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if row.completed:
            groups[row.repeated, row.machine].append(row)
    return [replace(row, repeats=groups.get((row.repeated, row.machine), ())) for row in rows]


def timeline(row: Row) -> list[RankTimeline]:
    """The ranks of `timeline.json`, by rank; empty if it is missing or invalid."""
    ranks = StepTimeline.read(row.run.folder)
    return sorted(ranks, key=lambda rank: rank.rank) if all(map(_is_drawable, ranks)) else []


def _is_drawable(rank: RankTimeline) -> bool:
    length_s, busy_s = number(rank.length_s) or 0.0, 0.0
    for start_s, end_s, stage, _, microbatch in rank.chunks:
        if None in (number(start_s), number(end_s)) or start_s > end_s:
            return False
        if not is_count(stage + 1) or not (microbatch is None or is_count(microbatch + 1)):
            return False
        busy_s += end_s - start_s
    return length_s > 0 and busy_s <= MAX_OVERLAP * length_s


def _row(run: RecordedRun, *, state: str, ended: bool, names: Label) -> Row:
    summary = run.summary or _summary_so_far(run)
    figures = {key: _figure(key, summary.get(key)) for key in FIGURES}
    measured = {part: _figure(part, run.totals.step_parts_s.get(part)) for part in PARTS}
    parts = {part: time_s for part, time_s in measured.items() if time_s is not None}
    recorded: Any = summary.get("layout")
    layout = recorded if _is_layout(recorded) else _layout(run)
    devices = _devices(run.nodes, run.gpus_per_node)
    figures["device_hours"] = device_hours(run, devices=devices)
    share, step_s = figures["exposed_communication_share"], figures["step_time_s"]
    figures["state_bytes"] = fullest(run.totals)
    figures["exposed_communication_s"] = None if share is None or step_s is None else share * step_s
    return Row(
        run, state=state, ended=ended, names=names, layout=layout and with_all_axes(layout),
        devices=devices, figures=figures, parts=parts if len(parts) == len(PARTS) else None,
        spread=throughput_spread(of_newest_layout(run.logged, summary)),
    )  # fmt: skip


def _figure(key: str, value: Any) -> float | None:
    figure = number(value)
    return None if figure is not None and figure < 0 and not key.endswith("_loss") else figure


def _is_layout(layout: Any) -> bool:
    """Whether `layout` is valid. It may lack axes that did not exist when the run was recorded."""
    has_axes = isinstance(layout, dict) and bool(layout) and set(layout) <= set(AXES)
    return has_axes and all(map(is_count, layout.values()))


def _devices(nodes: Any, gpus_per_node: Any) -> int | None:
    devices = nodes * gpus_per_node if is_count(nodes) and is_count(gpus_per_node) else None
    return devices if is_count(devices) else None


def _summary_so_far(run: RecordedRun) -> dict[str, Any]:
    """The summary that a run without a summary would have now."""
    history, config = asdict(run.attempts), run.config or {}
    try:
        history = asdict(attempts.history(run.folder, layout=computed_as(config, run.environment or {})))
        return summarise(config, outcome="", lines=run.logged, history=history, environment=run.environment)
    except (OSError, KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError):
        return history


def _layout(run: RecordedRun) -> dict[str, int]:
    if run.task == SCRIPT:
        return {}
    try:
        strategy = recorded_strategy(run.config or {})
        layout = layout_of(strategy, devices=_devices(run.nodes, run.gpus_per_node) or 0).degrees
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        return {}
    return layout if _is_layout(layout) else {}


def device_hours(run: RecordedRun, *, devices: int | None) -> float | None:
    """The hours from each launch to its end, times the devices and spares; None if an end is unknown.

    The hours of a run that still runs or was interrupted end at its last line of metrics.
    """
    try:
        starts = _held_from(run)
        ends = [at for end in attempts.ends(run.folder) if (at := time_of(end.ended))]
        if len(starts) + len(ends) > MAX_STARTS:
            return None
        last = time_of(run.totals.ended or (run.newest_line and run.newest_line.time))
        ends += [last] if last else []
        hours, spares = 0.0, table((run.config or {}).get("launcher")).get("spares") or 0
        for (start, layout), following in zip(starts, [*starts[1:], None], strict=True):
            ends_between = [end for end in ends if end >= start and (not following or end <= following[0])]
            if not ends_between:
                return None
            held = _devices(layout.get("nodes"), layout.get("gpus_per_node")) or devices or 0
            held += _devices(spares, run.gpus_per_node) or 0
            hours += (min(ends_between) - start).total_seconds() / 3600 * held
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError):
        return None
    return number(hours) if starts and devices else None


def _held_from(run: RecordedRun) -> list[tuple[datetime, dict[str, Any]]]:
    """From when each start held its devices, and its layout: from its launch; from its begin if unknown."""
    starts: list[tuple[datetime, dict[str, Any]]] = []
    begun = True
    for event in read_lines(run.folder.attempts):
        if (launched := time_of(event.get("launched"))) is not None:
            starts.append((launched, {}))
            begun = False
        elif (began := time_of(event.get("began"))) is not None:
            starts.append((began if begun else starts.pop()[0], table(event.get("layout"))))
            begun = True
    return starts


def _left_out(sweep: Sweep, paths: Set[Path]) -> Iterable[tuple[str, str]]:
    """For each run of the sweep that the report lacks: its distinct overrides, and the reason."""
    for skipped in sweep.skipped:
        yield sweep.distinct_overrides(skipped.overrides), " ".join(skipped.problems)
    for run in sweep.runs:
        if run.run_dir.absolute() not in paths:
            yield sweep.distinct_overrides(run.overrides), f"{run.run_dir} is not there (any more)"
