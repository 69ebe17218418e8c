"""The tables of a report: comparison with best figures, and scaling."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from hpc_parallel.failure.summary import OPTIMIZER_SPEEDLESS, SPEEDLESS
from hpc_parallel.layout.axes import AXES
from hpc_parallel.record.values import without
from hpc_parallel.report.figures import NOISE, ROUNDING, meet
from hpc_parallel.report.gather import FIGURES, PARTS, Row, identity
from hpc_parallel.report.labels import RUN_KEYS

UNMEASURED = "not measured"
STRONG, WEAK = "strong", "weak"


@dataclass(frozen=True)
class TableColumn:
    """A figure of the comparison."""

    key: str
    title: str
    kind: str  # the kind of its unit: count, rate, seconds, bytes, share, loss, hours
    best: Callable[[Sequence[float]], float]  # max or min
    competes: Callable[[Row], bool] = lambda row: True  # whether the figure is meaningful for a run
    same_samples: bool = False  # comparable only after the same number of samples
    timed: bool = False  # equal if the ranges of throughput overlap
    noise: float = 0.0  # a relative difference up to this is a tie; 0 for counted figures


def _parallel(row: Row) -> bool:
    """Whether several processes communicate. Transfers inside one process are not measured as waiting."""
    return row.processes > 1


def _sends(row: Row) -> bool:
    """Whether the run's devices have separate weights. Threads on a CPU (dataparallel) share the weights."""
    return (row.devices or 1) > 1 and not (row.on_cpu and row.processes == 1)


def _on_device(row: Row) -> bool:
    """Whether the peak is the memory of the device. On a CPU it is the memory of the whole process."""
    return not row.on_cpu


def _pipelined(row: Row) -> bool:
    return row.layout.get("pipeline", 1) > 1


COLUMNS = (
    TableColumn("samples_per_s", "throughput", "rate", max, timed=True),
    TableColumn("latency_s", "latency", "seconds", min, noise=NOISE),
    TableColumn("step_time_s", "step time", "seconds", min, timed=True),
    TableColumn("peak_memory_bytes", "memory per device", "bytes", min, _on_device, noise=NOISE),
    TableColumn("state_bytes", "state per device", "bytes", min),
    TableColumn("bubble_share", "bubble", "share", min, _pipelined, noise=NOISE),
    TableColumn("exposed_communication_share", "exposed communication", "share", min, _parallel, noise=NOISE),
    TableColumn("traffic_bytes", "traffic per step", "bytes", min, _sends),
    TableColumn("final_loss", "final loss", "loss", min, same_samples=True, noise=ROUNDING),
    TableColumn("restarts", "restarts", "count", min, same_samples=True),
    TableColumn("device_hours", "device-hours", "hours", min, same_samples=True, noise=NOISE),
)
SCALES = {
    "seconds": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "bytes": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")),
}
UNITS = {"rate": "samples/s", "loss": "", "count": "", "hours": ""}


@dataclass(frozen=True)
class Unit:
    """A unit in which figures are shown: its size in SI units, its name, significant digits (0: a count)."""

    size: float = 1.0
    name: str = ""
    digits: int = 3

    def show(self, value: float | None) -> str:
        """Format a figure, without the unit's name."""
        return UNMEASURED if value is None else digits(value / self.size, self.digits)


def unit_of(kind: str, values: Iterable[float | None]) -> Unit:
    """One unit for all figures of a column, so that they are easy to compare."""
    if kind == "share":
        return Unit(0.01, "%")
    if kind not in SCALES:
        return Unit(name=UNITS[kind], digits={"loss": 4, "count": 0}.get(kind, 3))
    largest = max((abs(value) for value in values if value is not None), default=0.0)
    fitting = (scale for scale in SCALES[kind] if largest >= scale[0])
    size, name = next(fitting, SCALES[kind][-1] if largest else SCALES[kind][0])
    return Unit(size, name)


def digits(value: float, count: int) -> str:
    """Format with `count` significant digits (0: as many as a count has) and without an exponent."""
    if value == 0 or not count or not math.isfinite(value):
        return f"{value:g}"
    rounded = float(f"{value:.{count - 1}e}")
    return f"{rounded:.{max(0, count - 1 - math.floor(math.log10(abs(rounded))))}f}"


@dataclass(frozen=True)
class FigureCell:
    """One figure of one run."""

    value: float | None
    text: str
    spread: str = ""  # the range of a throughput
    best: bool = False


@dataclass(frozen=True)
class Comparison:
    """The comparison table: `cells[row][column]` in `units[column]`."""

    rows: Sequence[Row]
    columns: Sequence[TableColumn]  # those with a figure of at least one run
    units: Sequence[Unit]
    cells: Sequence[Sequence[FigureCell]]
    settings: int  # different settings in the table; the best is marked within each

    def titles(self) -> list[str]:
        pairs = zip(self.columns, self.units, strict=True)
        return [f"{column.title}, {unit.name}" if unit.name else column.title for column, unit in pairs]


def compare(rows: Sequence[Row]) -> Comparison:
    """Compare all rows; mark in each column the best of the completed runs with the same settings."""
    columns = [column for column in COLUMNS if any(_has_figure(column, row) for row in rows)]
    units = [unit_of(column.kind, [row.figures[column.key] for row in rows]) for column in columns]
    best = [_starred(column, rows, unit) for column, unit in zip(columns, units, strict=True)]
    cells = [
        [
            FigureCell(
                row.figures[column.key],
                _shown(column, row, unit),
                spread_text(row, column.key),
                best=index in marked,
            )
            for column, unit, marked in zip(columns, units, best, strict=True)
        ]
        for index, row in enumerate(rows)
    ]
    return Comparison(rows, columns, units, cells, len({row.settings for row in rows}))


def column_of(key: str) -> TableColumn:
    return next(column for column in COLUMNS if column.key == key)


def _has_figure(column: TableColumn, row: Row) -> bool:
    """Whether the figure is measured. A zero does not count if the figure has no meaning for the run."""
    value = row.figures[column.key]
    return value is not None and (value != 0 or column.competes(row))


def _shown(column: TableColumn, row: Row, unit: Unit) -> str:
    value = row.figures[column.key]
    return "-" if value is not None and not _has_figure(column, row) else unit.show(value)


def spread_text(row: Row, key: str) -> str:
    """The range of the middle half of the speeds of a run; empty if unknown, or for another figure."""
    if key != "samples_per_s" or row.spread.limits is None:
        return ""
    low, high = row.spread.limits
    unit = unit_of("rate", ())
    return f"{unit.show(low)} to {unit.show(high)}"


def best_of(column: TableColumn, rows: Sequence[Row], unit: Unit) -> set[int]:
    """Indices of the best rows in each group with the same settings, and of the rows that are tied with them.

    A figure that only one run has is never the best. Runs that are equal in the digits shown are tied.
    Speeds are also tied if their ranges overlap. Other measured figures are also tied if they differ by less
    than the noise. If all runs are equal in the digits shown, none is the best.
    """
    return {index for leaders, _ in _races(column, rows, unit) for index in leaders}


def _starred(column: TableColumn, rows: Sequence[Row], unit: Unit) -> set[int]:
    """Indices of the rows that get a star: the best row of each group, if no other row is tied with it.

    Equal counts share the star. A speed gets a star only if its spread and those of all others are known.
    """
    exact = not column.timed and not column.noise
    return {
        index
        for leaders, others in _races(column, rows, unit)
        for index in leaders
        if exact
        or (
            len(leaders) == 1
            and not (column.timed and any(rows[at].spread.limits is None for at in (index, *others)))
        )
    }


def _races(column: TableColumn, rows: Sequence[Row], unit: Unit) -> Iterator[tuple[set[int], set[int]]]:
    """The leaders and the others of each group of rows with the same settings."""
    groups: dict[Any, dict[int, str]] = defaultdict(dict)
    for index, row in enumerate(rows):
        value = row.figures[column.key]
        if row.completed and value is not None and column.competes(row):
            key = (row.settings, *((row.loss_settings, row.figures["samples"]) * column.same_samples))
            groups[key][index] = unit.show(value)
    for texts in groups.values():
        best = column.best([float(text) for text in texts.values()])
        first = {index for index, text in texts.items() if float(text) == best}
        if len(first) == len(texts):
            continue
        leaders = {
            index
            for index in texts
            if index in first
            or any(are_even(column.key, rows[index], rows[at], noise=column.noise) for at in first)
        }
        yield leaders, set(texts) - leaders


def are_even(key: str, a: Row, b: Row, *, noise: float) -> bool:
    """Whether two figures differ by no more than the noise, their spread, or what repeated runs differ by."""
    one, other = a.range_of(key), b.range_of(key)
    return one is not None and other is not None and meet(one, other, noise=noise)


@dataclass(frozen=True)
class Point:
    """Runs of one configuration on the same number of devices."""

    devices: int
    global_batch_size: int
    samples_per_s: float  # median of the runs
    speedup: float  # over the fewest devices of the series
    efficiency: float  # speedup divided by the ratio of devices
    runs: Sequence[Row]

    @property
    def runs_text(self) -> str:
        """The number of runs and the range of their throughput."""
        rates = sorted(row.figures["samples_per_s"] or 0 for row in self.runs)
        return "1" if len(rates) == 1 else f"{len(rates)}: {digits(rates[0], 3)} to {digits(rates[-1], 3)}"


@dataclass(frozen=True)
class Series:
    """One configuration on increasing numbers of devices along one axis."""

    kind: str  # strong (same global batch) or weak (same batch per device)
    words: Sequence[str]  # its label
    points: Sequence[Point]

    @property
    def label(self) -> str:
        return ", ".join(self.words)


# kind, axis, configuration, batch and shape -> number of devices -> runs
Groups = dict[tuple[str, str, str, str, str], dict[int, list[Row]]]


def scaling(rows: Sequence[Row]) -> list[Series]:
    """Every group of completed runs that differ only in their number of devices."""
    groups: Groups = defaultdict(lambda: defaultdict(list))
    for row in rows:
        batch, devices = row.global_batch_size, row.devices
        if not row.completed or not row.layout or batch is None or not devices or devices < 1:
            continue
        if not row.figures["samples_per_s"]:
            continue
        config = _identity_without_devices(row)
        for axis in AXES:
            others = json.dumps({other: row.layout[other] for other in AXES if other != axis})
            groups[STRONG, axis, config + others, f"{batch}", ""][devices].append(row)
            groups[WEAK, axis, config + others, f"{batch / devices:g}", ""][devices].append(row)
    by_axis = [
        (axis, _series(kind, axis, by_devices, shape))
        for (kind, axis, _, _, shape), by_devices in _by_shape(groups).items()
        if len(by_devices) > 1
    ]
    counts = Counter((series.kind, series.label) for _, series in by_axis)
    return [
        replace(series, words=(*series.words, f"by {axis}"))
        if counts[series.kind, series.label] > 1
        else series
        for axis, series in by_axis
    ]


def _by_shape(groups: Groups) -> Groups:
    """Divide each group in which the same number of devices has different shapes, such as 1 x 4 and 4 x 1."""
    divided: Groups = defaultdict(lambda: defaultdict(list))
    for key, by_devices in groups.items():
        ambiguous = any(len({row.shape for row in rows}) > 1 for rows in by_devices.values())
        for devices, rows in by_devices.items():
            for row in rows:
                shape = f"{row.run.gpus_per_node} a node" if ambiguous else ""
                divided[*key[:-1], shape][devices].append(row)
    return divided


def records(rows: Sequence[Row], series: Sequence[Series]) -> list[dict[str, Any]]:
    """One flat object per run, in the SI units and names of `summary.json`; None if not measured."""
    efficiency = _efficiency(series)
    return [
        {
            "run": row.label,
            "folder": row.folder,
            "state": row.state,
            "strategy": row.strategy,
            "layout": row.layout_text,
            "nodes": row.run.nodes,
            "gpus_per_node": row.run.gpus_per_node,
            **{key: row.figures[key] for key in (*FIGURES, "device_hours", "state_bytes")},
            **row.spread.as_record(),
            **{f"{part}_s": (row.parts or {}).get(part) for part in PARTS},
            **{f"{kind}_efficiency": efficiency.get((kind, row.run.path)) for kind in (STRONG, WEAK)},
        }
        for row in rows
    ]


def _efficiency(series: Sequence[Series]) -> dict[tuple[str, Path], float | None]:
    """(kind, run folder) -> efficiency of the run in the series that begins with the fewest devices.

    None if several such series, by different axes, have different values.
    """
    found: dict[tuple[str, Path], dict[int, set[float]]] = defaultdict(lambda: defaultdict(set))
    for one_series in series:
        fewest = one_series.points[0].devices
        for point in one_series.points:
            for row in point.runs:
                rate = row.figures["samples_per_s"] or 0
                value = point.efficiency * rate / point.samples_per_s
                found[one_series.kind, row.run.path][fewest].add(value)
    first = {key: by_fewest[min(by_fewest)] for key, by_fewest in found.items()}
    return {key: next(iter(values)) if len(values) == 1 else None for key, values in first.items()}


def _series(kind: str, axis: str, by_devices: dict[int, list[Row]], shape: str) -> Series:
    rates = {n: median(row.figures["samples_per_s"] or 0 for row in rows) for n, rows in by_devices.items()}
    fewest = min(rates)
    points = []
    for devices, rate in sorted(rates.items()):
        rows = by_devices[devices]
        speedup = rate / rates[fewest]
        efficiency = speedup / (devices / fewest)
        points.append(Point(devices, rows[0].global_batch_size or 0, rate, speedup, efficiency, rows))
    first, batch = by_devices[fewest][0], points[0].global_batch_size
    degrees = [f"{other} {degree}" for other, degree in first.layout.items() if other != axis and degree > 1]
    common = set.intersection(*(set(row.names.options) for point in points for row in point.runs))
    options = [
        option
        for option in first.names.options
        if option in common and not option.startswith("global_batch_size=")
    ]
    constant = f"batch {batch}" if kind == STRONG else f"batch {batch / fewest:g} per device"
    return Series(kind, (first.strategy, *degrees, *options, *filter(None, [shape]), constant), points)


def _identity_without_devices(row: Row) -> str:
    """All that determines the speed of a step, without the number of devices.

    It leaves out the optimizer's numbers, such as the learning rate: they are often scaled with the batch.
    """
    parts = {
        "training": without(row.section("training"), (*SPEEDLESS, "global_batch_size")),
        "strategy": without(row.section("strategy"), AXES),
        "optimizer": without(row.section("optimizer"), OPTIMIZER_SPEEDLESS),
    }
    return f"{row.machine} {identity({**without(row.config, (*RUN_KEYS, 'seed')), **parts})}"


def parts_of(rows: Sequence[Row]) -> list[str]:
    """The parts of a step that took any time in one of these runs."""
    return [part for part in PARTS if any((row.parts or {}).get(part) for row in rows)]
