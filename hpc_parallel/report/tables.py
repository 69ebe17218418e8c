"""The tables of a report: comparison with best figures, scaling, predictions."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from hpc_parallel.config.axes import AXES
from hpc_parallel.report.figures import number
from hpc_parallel.report.gather import FIGURES, PARTS, RUN_KEYS, SPEEDLESS, Row, identity
from hpc_parallel.report.spread import overlap

UNMEASURED = "not measured"
STRONG, WEAK = "strong", "weak"
PREDICTABLE = (
    "step_time_s", "samples_per_s", "latency_s", "peak_memory_bytes", "bubble_share",
    "exposed_communication_share", "traffic_bytes",
)  # fmt: skip


@dataclass(frozen=True)
class Column:
    """A figure of the comparison."""

    key: str
    title: str
    kind: str  # of its unit: count, rate, seconds, bytes, share, loss, hours
    best: Callable[[Sequence[float]], float]  # max or min
    competes: Callable[[Row], bool] = lambda row: True  # whether the figure is meaningful for a run
    same_samples: bool = False  # comparable only after the same number of samples
    timed: bool = False  # equal if the ranges of throughput overlap


def _parallel(row: Row) -> bool:
    """Whether several processes communicate: transfers inside one process are not measured as waiting."""
    return row.processes > 1


def _sends(row: Row) -> bool:
    """Whether its devices have separate weights: threads on a CPU (dataparallel) share them."""
    return (row.devices or 1) > 1 and not (row.on_cpu and row.processes == 1)


def _pipelined(row: Row) -> bool:
    return row.layout.get("pipeline", 1) > 1


COLUMNS = (
    Column("samples_per_s", "throughput", "rate", max, timed=True),
    Column("latency_s", "latency", "seconds", min),
    Column("step_time_s", "step time", "seconds", min, timed=True),
    Column("peak_memory_bytes", "memory per device", "bytes", min),
    Column("state_bytes", "state per device", "bytes", min),
    Column("bubble_share", "bubble", "share", min, _pipelined),
    Column("exposed_communication_share", "exposed communication", "share", min, _parallel),
    Column("traffic_bytes", "traffic per step", "bytes", min, _sends),
    Column("final_loss", "final loss", "loss", min, same_samples=True),
    Column("restarts", "restarts", "count", min, same_samples=True),
    Column("device_hours", "device-hours", "hours", min, same_samples=True),
)
SCALES = {
    "seconds": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "bytes": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")),
}
UNITS = {"rate": "samples/s", "loss": "", "count": "", "hours": ""}


@dataclass(frozen=True)
class Unit:
    """A unit in which figures are shown: its size in SI units, its name, significant digits."""

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
        return Unit(name=UNITS[kind], digits=4 if kind == "loss" else 3)
    largest = max((abs(value) for value in values if value is not None), default=0.0)
    fitting = (scale for scale in SCALES[kind] if largest >= scale[0])
    size, name = next(fitting, SCALES[kind][-1] if largest else SCALES[kind][0])
    return Unit(size, name)


def digits(value: float, count: int) -> str:
    """Format with `count` significant digits and without an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    rounded = float(f"{value:.{count - 1}e}")
    return f"{rounded:.{max(0, count - 1 - math.floor(math.log10(abs(rounded))))}f}"


@dataclass(frozen=True)
class Cell:
    """One figure of one run."""

    value: float | None
    text: str
    spread: str = ""  # the range of a throughput
    best: bool = False


@dataclass(frozen=True)
class Comparison:
    """The comparison table: `cells[row][column]` in `units[column]`."""

    rows: Sequence[Row]
    columns: Sequence[Column]  # those with a figure of at least one run
    units: Sequence[Unit]
    cells: Sequence[Sequence[Cell]]
    workloads: int  # kinds of work in the table; the best is marked within each

    def titles(self) -> list[str]:
        """The titles of the columns with their units."""
        pairs = zip(self.columns, self.units, strict=True)
        return [f"{column.title}, {unit.name}" if unit.name else column.title for column, unit in pairs]


def compare(rows: Sequence[Row]) -> Comparison:
    """Compare all rows; mark in each column the best of the completed runs of the same work."""
    columns = [column for column in COLUMNS if any(_has_figure(column, row) for row in rows)]
    units = [unit_of(column.kind, [row.figures[column.key] for row in rows]) for column in columns]
    best = [best_of(column, rows, unit) for column, unit in zip(columns, units, strict=True)]
    cells = [
        [
            Cell(
                row.figures[column.key],
                _shown(column, row, unit),
                spread_text(row, column.key),
                best=index in marked,
            )
            for column, unit, marked in zip(columns, units, best, strict=True)
        ]
        for index, row in enumerate(rows)
    ]
    return Comparison(rows, columns, units, cells, len({row.work for row in rows}))


def column_of(key: str) -> Column:
    """The column of this figure."""
    return next(column for column in COLUMNS if column.key == key)


def _has_figure(column: Column, row: Row) -> bool:
    """Whether it is measured, and not the zero of a run for which it has no meaning."""
    value = row.figures[column.key]
    return value is not None and (value != 0 or column.competes(row))


def _shown(column: Column, row: Row, unit: Unit) -> str:
    value = row.figures[column.key]
    return "-" if value is not None and not _has_figure(column, row) else unit.show(value)


def spread_text(row: Row, key: str) -> str:
    """The range of the middle half of the speeds of a run; empty if unknown, or for another figure."""
    if key != "samples_per_s" or row.spread.limits is None:
        return ""
    low, high = row.spread.limits
    unit = unit_of("rate", ())
    return f"{unit.show(low)} to {unit.show(high)}"


def best_of(column: Column, rows: Sequence[Row], unit: Unit) -> set[int]:
    """Indices of the best rows of each kind of work.

    A figure that only one run has is never the best. Runs that are equal in the digits shown are tied, and
    speeds also if their ranges overlap. If all runs are equal in the digits shown, none is the best.
    """
    groups: dict[Any, dict[int, str]] = defaultdict(dict)
    for index, row in enumerate(rows):
        value = row.figures[column.key]
        if row.completed and value is not None and column.competes(row):
            key = (row.work, row.figures["samples"] if column.same_samples else None)
            groups[key][index] = unit.show(value)
    best_rows: set[int] = set()
    for shown in groups.values():
        best = column.best([float(text) for text in shown.values()])
        first = {index for index, text in shown.items() if float(text) == best}
        if len(first) == len(shown):
            continue
        best_rows |= first
        if column.timed:
            best_rows |= {
                index for index in shown if any(equally_fast(rows[index], rows[at]) for at in first)
            }
    return best_rows


def equally_fast(one: Row, other: Row) -> bool:
    """Whether two throughputs can't be told apart. A run without a spread has its throughput alone."""
    ranges = []
    for row in (one, other):
        rate = row.figures["samples_per_s"]
        if row.spread.limits is None and rate is None:
            return False
        ranges.append(row.spread.limits or (rate or 0.0, rate or 0.0))
    return overlap(*ranges)


@dataclass(frozen=True)
class Point:
    """Runs of one configuration on the same number of devices."""

    devices: int
    global_batch_size: int
    samples_per_s: float  # median of the runs
    speedup: float  # over the fewest devices of the series
    efficiency: float  # speedup by the ratio of devices
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
    label: str
    points: Sequence[Point]


def scaling(rows: Sequence[Row]) -> list[Series]:
    """Every group of completed runs that differ only in their number of devices."""
    groups: dict[tuple[str, str, str, str], dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        batch, devices = row.global_batch_size, row.devices
        if not row.completed or not row.layout or batch is None or not devices or devices < 1:
            continue
        if not row.figures["samples_per_s"]:
            continue
        config = _identity_without_devices(row)
        for axis in AXES:
            others = json.dumps({other: row.layout[other] for other in AXES if other != axis})
            groups[STRONG, axis, config + others, f"{batch}"][devices].append(row)
            groups[WEAK, axis, config + others, f"{batch / devices:g}"][devices].append(row)
    by_axis = [
        (axis, _series(kind, axis, by_devices))
        for (kind, axis, *_), by_devices in groups.items()
        if len(by_devices) > 1
    ]
    counts = Counter((series.kind, series.label) for _, series in by_axis)
    return [
        replace(series, label=f"{series.label}, by {axis}")
        if counts[series.kind, series.label] > 1
        else series
        for axis, series in by_axis
    ]


def records(rows: Sequence[Row], series: Sequence[Series]) -> list[dict[str, Any]]:
    """One flat object per run, in the SI units and names of `summary.json`; None if not measured."""
    efficiency = {
        (one_series.kind, row.run.path): point.efficiency
        * (row.figures["samples_per_s"] or 0)
        / point.samples_per_s
        for one_series in series
        for point in one_series.points
        for row in point.runs
    }
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


def _series(kind: str, axis: str, by_devices: dict[int, list[Row]]) -> Series:
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
    common = set.intersection(*(set(row.differs) for point in points for row in point.runs))
    options = [
        option for option in first.differs if option in common and not option.startswith("global_batch_size=")
    ]
    constant = f"batch {batch}" if kind == STRONG else f"batch {batch / fewest:g} per device"
    return Series(kind, ", ".join([first.strategy, *degrees, *options, constant]), points)


def _identity_without_devices(row: Row) -> str:
    """The part of the configuration that determines the speed of a step, without the devices."""
    config = {key: value for key, value in row.config.items() if key not in (*RUN_KEYS, "optimizer", "seed")}
    training = {
        k: v for k, v in row.section("training").items() if k not in (*SPEEDLESS, "global_batch_size")
    }
    strategy = {k: v for k, v in row.section("strategy").items() if k not in AXES}
    return identity({**config, "training": training, "strategy": strategy})


@dataclass(frozen=True)
class Prediction:
    """A planned figure of a run, and the measured figure."""

    row: Row
    key: str
    predicted: float
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """Measured divided by predicted."""
        return self.measured / self.predicted if self.measured and self.predicted else None


def predictions(rows: Sequence[Row]) -> list[Prediction]:
    """The predictions of every run that has a plan."""
    result = []
    for row in rows:
        predicted = (row.run.summary or {}).get("predicted")
        if not isinstance(predicted, dict):
            continue
        for key in PREDICTABLE:
            if (value := number(predicted.get(key))) is not None and value >= 0:
                result.append(Prediction(row, key, value, row.figures[key]))
    return result
