"""Runs as rows: what their folders say, in SI units, and a label that tells them apart.

A folder may be half-written, running, failed or damaged: what it does not say is None, never a guess.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hpc_parallel.config.layout import AXES, Layout, layout_of
from hpc_parallel.problems import printable, spell
from hpc_parallel.record import attempts
from hpc_parallel.record.credentials import without_secret_values
from hpc_parallel.record.recorded import RecordedRun, find_runs
from hpc_parallel.record.recorded import number as finite
from hpc_parallel.record.safe_read import read_json
from hpc_parallel.record.sweep_folder import MANIFEST, Sweep, read_sweep
from hpc_parallel.supervise.run_state import states
from hpc_parallel.supervise.summary import summarise

COMPLETED = "completed"
FIGURES = (  # of summary.json: keys and units are the contract's
    "samples_per_s", "tokens_per_s", "latency_s", "step_time_s", "peak_memory_bytes", "bubble_share",
    "exposed_communication_share", "traffic_bytes", "busiest_rank_traffic_bytes", "final_loss", "restarts",
    "steps", "samples",
)  # fmt: skip
PARTS = ("compute", "communication", "bubble", "data", "other")  # of a step's time
# Of training: what changes how long a run trains or what it writes, and not how fast a step is.
SPEEDLESS = (
    "steps", "log_every", "validate_every", "validation_samples", "measure_steps", "checkpoint_every",
    "checkpoint_async", "keep_last", "keep_every", "tensorboard", "wandb",
)  # fmt: skip
# What tells runs of one command apart without changing what is computed.
BESIDE = ("name", "run_dir", "resume", "dry_run", "launcher", "sweep", "nodes", "gpus_per_node", "jobs")
CLASS = "._target_"
STRATEGY = ("name", "execution", *AXES)
MOST_COUNT = 2**31  # of devices, samples of a batch, degrees of an axis
LARGEST, SMALLEST = 1e18, 1e-18  # of a figure: ratios and sums of such are finite
MOST_STARTS, MOST_RANKS, MOST_CHUNKS = 1000, 256, 10_000
MOST_AT_ONCE = 4  # chunks of a rank: its compute, and what it sends meanwhile
SWEEPS = ("", "*/", "*/*/")  # where sweep folders lie in a folder of runs


@dataclass(frozen=True)
class Row:
    """One run. `figures`: of `FIGURES`, `device_hours` and `exposed_communication_s` (of a step); None where
    it is not measured. `parts`: seconds of a watched step by `PARTS`; `layout`: axis -> degree; `differs`:
    options that set it apart from most of its strategy."""

    run: RecordedRun
    state: str
    ended: bool
    label: str
    layout: Mapping[str, int]
    devices: int | None
    figures: Mapping[str, float | None]
    parts: Mapping[str, float] | None
    differs: Sequence[str] = ()

    @property
    def completed(self) -> bool:
        return self.state == COMPLETED

    @property
    def folder(self) -> str:
        """From where the report is made, if it lies below: a report may be passed on."""
        path, here = self.run.path, Path.cwd()
        return str(path.relative_to(here) if path.is_relative_to(here) else path)

    @property
    def strategy(self) -> str:
        return printable(self.run.strategy or "unknown")

    @property
    def shape(self) -> str:
        """Nodes and devices of each."""
        nodes, gpus = self.run.nodes, self.run.gpus_per_node
        return "unknown" if nodes is None or gpus is None else f"{nodes} x {gpus}"

    @property
    def processes(self) -> int:
        said = self.run.summary or {}
        return int(number(said.get("world_size")) or self.devices or 1)

    @property
    def on_cpu(self) -> bool:
        """Whether its devices were a CPU's processes, as far as is known."""
        return (self.run.environment or {}).get("cuda", "unknown") is None

    @property
    def config(self) -> dict[str, Any]:
        return self.run.config or {}

    def section(self, name: str) -> dict[str, Any]:
        """A table of the configuration, empty where a stranger's file has none."""
        said = self.config.get(name)
        return said if isinstance(said, dict) else {}

    @property
    def layout_text(self) -> str:
        if not self.layout:
            return "unknown"
        server = "a server and " * (self.processes > math.prod(self.layout.values()))
        return f"{server}{Layout(**self.layout)}"

    @property
    def cause(self) -> str | None:
        """Why it failed, in one line."""
        said = (self.run.failure or self.run.stopped or {}).get("line")
        return said if isinstance(said, str) else None

    @property
    def notes(self) -> list[str]:
        damaged = ", ".join(f"{name} ({why})" for name, why in self.run.damaged.items())
        return [text for text in (damaged and f"can't be read: {damaged}", self.cause) if text]

    @property
    def workload(self) -> tuple[str, str, str]:
        """What it computes: figures of one workload compare."""
        kept = (self.config.get(key) for key in ("task", "model", "data"))
        task, model, data = (repr(_flat(value)) if isinstance(value, dict) else repr(value) for value in kept)
        return task, model, data

    def is_alike(self, other: Row) -> bool:
        """Whether two strategies came to one and the same: as many of each axis, and the same options."""
        said = [
            {key: value for key, value in row.section("strategy").items() if key not in ("name", *AXES)}
            for row in (self, other)
        ]
        return self.layout == other.layout and self.shape == other.shape and said[0] == said[1]

    @property
    def global_batch_size(self) -> int | None:
        size = self.section("training").get("global_batch_size")
        return size if is_count(size) else None

    @property
    def work(self) -> tuple[object, ...]:
        """What a step of it is: times, bytes and shares of the same work compare."""
        return *self.workload, self.global_batch_size


@dataclass(frozen=True)
class Gathered:
    """All that a report is about. `left_out`: what a sweep did not run, and why; `commands`: that of each
    sweep, with its folder's name."""

    folders: Sequence[Path]
    rows: Sequence[Row]
    left_out: Sequence[tuple[str, str]] = field(default_factory=list)
    commands: Sequence[tuple[str, str]] = field(default_factory=list)


def number(value: Any) -> float | None:
    """A figure that can be shown and calculated with; None for what is none."""
    shown = finite(value)
    return shown if shown is not None and (shown == 0 or SMALLEST <= abs(shown) <= LARGEST) else None


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST_COUNT


def identity(config: Mapping[Any, Any]) -> str:
    """The same text for the same values, whatever their order."""
    return repr(sorted((key, repr(value)) for key, value in _flat(config).items()))


def gather(folders: Sequence[Path]) -> Gathered:
    """The runs of run folders, sweep folders and folders that hold some, each once."""
    runs = list({run.path: run for folder in folders for run in find_runs(folder)}.values())
    labels, differs = _labels(runs)
    rows = [
        _row(run, state=state.word, ended=state.ended, label=label, differs=said)
        for run, state, label, said in zip(runs, states(runs), labels, differs, strict=True)
    ]
    known = {run.path for run in runs}
    sweeps = _sweeps(folders)
    return Gathered(
        folders,
        rows,
        left_out=[left for sweep in sweeps.values() for left in _left_out(sweep, known)],
        commands=[
            (
                path.name,
                shlex.join(("python", "-m", "hpc_parallel.run", *without_secret_values(sweep.command))),
            )
            for path, sweep in sweeps.items()
        ],
    )


def _command(sweep: Sweep) -> str:
    """As it was typed, but for what may be a credential: a report may be passed on."""
    return shlex.join(("python", "-m", "hpc_parallel.run", *without_secret_values(sweep.command)))


def timeline(row: Row) -> list[dict[str, Any]]:
    """The ranks of `timeline.json` by rank: `rank`, `length_s`, `chunks` of (start_s, end_s, stage, kind,
    microbatch); none where it is not there or is another's."""
    try:
        ranks = (read_json(row.run.folder.timeline) or {})["ranks"]
        found = [
            {"rank": int(rank["rank"]), "length_s": rank["length_s"], "chunks": rank["chunks"]}
            for rank in ranks[:MOST_RANKS]
        ]
        sound = all(_is_drawable(rank) for rank in found)
        few = sum(len(rank["chunks"]) for rank in found) <= MOST_CHUNKS
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError):
        return []
    return sorted(found, key=lambda rank: rank["rank"]) if sound and few else []


def _is_drawable(rank: Mapping[str, Any]) -> bool:
    """Raises TypeError and ValueError for what is no timeline at all."""
    length_s, busy_s = number(rank["length_s"]) or 0.0, 0.0
    for start, end, stage, kind, microbatch in rank["chunks"]:
        times = number(start), number(end)
        if None in times or start > end or not isinstance(kind, str):
            return False
        if not is_count(stage + 1) or not (microbatch is None or is_count(microbatch + 1)):
            return False
        busy_s += end - start
    return length_s > 0 and busy_s <= MOST_AT_ONCE * length_s


def _row(run: RecordedRun, *, state: str, ended: bool, label: str, differs: Sequence[str]) -> Row:
    said = run.summary or _so_far(run)
    figures = {key: _figure(key, said.get(key)) for key in FIGURES}
    parts = said.get("step_parts_s")
    parts = {part: _figure(part, parts.get(part)) for part in PARTS} if isinstance(parts, dict) else {}
    layout: Any = said.get("layout")
    if not _is_layout(layout):
        layout = _layout(run)
    devices = _devices(run)
    figures["device_hours"] = device_hours(run, devices=devices)
    share, step_s = figures["exposed_communication_share"], figures["step_time_s"]
    figures["exposed_communication_s"] = None if share is None or step_s is None else share * step_s
    return Row(
        run, state=state, ended=ended, label=label, layout=layout, devices=devices, figures=figures,
        parts=None if not parts or None in parts.values() else parts,
        differs=differs,
    )  # fmt: skip


def _figure(key: str, value: Any) -> float | None:
    """None for a negative one, other than a loss."""
    figure = number(value)
    return None if figure is not None and figure < 0 and key != "final_loss" else figure


def _is_layout(layout: Any) -> bool:
    return isinstance(layout, dict) and set(layout) == set(AXES) and all(map(is_count, layout.values()))


def _devices(run: RecordedRun) -> int | None:
    counts = run.nodes, run.gpus_per_node
    devices = math.prod(count for count in counts if count is not None)
    return devices if all(map(is_count, counts)) and is_count(devices) else None


def _so_far(run: RecordedRun) -> dict[str, Any]:
    """What the summary would say of a run that has none (yet)."""
    try:
        return summarise(run.config or {}, outcome="", lines=run.metrics, history=run.attempts)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError):
        return dict(run.attempts)


def _layout(run: RecordedRun) -> dict[str, int]:
    try:
        strategy = SimpleNamespace(**(run.config or {})["strategy"])
        layout = layout_of(strategy, devices=_devices(run) or 0).degrees
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        return {}
    return layout if _is_layout(layout) else {}


def device_hours(run: RecordedRun, *, devices: int | None) -> float | None:
    """Hours from each start to its end, times the devices it held; None where an end is not known.

    A run that goes on, or broke off, is counted to its last line of metrics.
    """
    try:
        starts = [_time(line["began"]) for line in attempts.starts(run.folder)]
        ends = [_time(line["ended"]) for line in attempts.ends(run.folder)]
        if len(starts) + len(ends) > MOST_STARTS:
            return None
        last = (run.summary or {}).get("ended") or (run.last_metrics or {}).get("time")
        ends += [_time(last)] if last else []
        spans = []
        for start, following in zip(starts, [*starts[1:], None], strict=True):
            until = [end for end in ends if end >= start and (following is None or end <= following)]
            if not until:
                return None
            spans.append((min(until) - start).total_seconds())
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError):
        return None
    return number(sum(spans) / 3600 * devices) if spans and devices else None


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)


def _labels(runs: Sequence[RecordedRun]) -> tuple[list[str], list[Sequence[str]]]:
    """`pipeline 2 x 1`, and the options in which a run departs from most others of its strategy; where most
    have no value in common, each run says its own. Where that is not enough also the layout, then the id."""
    flat = [_options(run) for run in runs]
    counts: dict[tuple[str | None, str], Counter[str]] = defaultdict(Counter)
    for run, options in zip(runs, flat, strict=True):
        for key, value in options.items():
            counts[run.strategy, key][spell(value)] += 1
    usual = {
        key: value
        for key, found in counts.items()
        for value, count in found.most_common(1)
        if 2 * count > found.total()
    }
    differs: list[Sequence[str]] = []
    for run, options in zip(runs, flat, strict=True):
        apart = {
            key: value for key, value in options.items() if usual.get((run.strategy, key)) != spell(value)
        }
        differs.append(tuple(map(printable, _said(apart))))
    labels = []
    for run, said in zip(runs, differs, strict=True):
        shape = f"{run.nodes or '?'} x {run.gpus_per_node or '?'}"
        labels.append(", ".join([printable(f"{run.strategy or run.run_id} {shape}"), *said]))
    layouts = [str(Layout(**_layout(run))) for run in runs]
    labels = _told_apart(labels, [f", {layout}" for layout in layouts])
    return _told_apart(labels, [printable(f" ({run.run_id})") for run in runs]), differs


def _told_apart(labels: Sequence[str], more: Sequence[str]) -> list[str]:
    """Labels that several have with `more` after them, where that tells them apart."""
    said: dict[str, set[str]] = defaultdict(set)
    for label, words in zip(labels, more, strict=True):
        said[label].add(words)
    return [
        label + words if len(said[label]) > 1 else label for label, words in zip(labels, more, strict=True)
    ]


def _said(apart: Mapping[str, Any]) -> Iterable[str]:
    """`microbatches=8`; of another class its name alone, which tells more than all of its keys."""
    classes = {key.removesuffix(CLASS): value for key, value in apart.items() if key.endswith(CLASS)}
    for key, value in apart.items():
        section = key.partition(".")[0]
        if section not in classes:
            yield f"{key.removesuffix('.name').rpartition('.')[2]}={spell(value)}"
        elif key == section + CLASS:
            yield f"{section}={str(value).rpartition('.')[2]}"


def _options(run: RecordedRun) -> dict[str, Any]:
    """What may tell a run apart, beside its strategy and its devices."""
    config = {key: value for key, value in (run.config or {}).items() if key not in BESIDE}
    speedless = [key for key in SPEEDLESS if key != "steps" or run.task not in (None, "train")]
    left_out = {f"strategy.{key}" for key in STRATEGY} | {f"training.{key}" for key in speedless}
    return {key: value for key, value in _flat(config).items() if key not in left_out}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        found |= _flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return found


def _sweeps(folders: Sequence[Path]) -> dict[Path, Sweep]:
    """The sweeps of these folders, by their own."""
    found = {}
    for path in sorted({path for folder in folders for at in SWEEPS for path in folder.glob(at + MANIFEST)}):
        try:
            found[path.parent] = read_sweep(path.parent)
        except (OSError, ValueError):
            continue
    return found


def _left_out(sweep: Sweep, known: Set[Path]) -> Iterable[tuple[str, str]]:
    """The overrides that not all of the sweep have, and the reason."""
    for skipped in sweep.skipped:
        yield sweep.distinct_overrides(skipped.overrides), " ".join(skipped.problems)
    for run in sweep.runs:
        if run.run_dir.absolute() not in known:
            yield sweep.distinct_overrides(run.overrides), f"{run.run_dir} is not there (any more)"
