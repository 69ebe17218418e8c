"""The tables of a report: what compares, what is best, how it scales, what was predicted."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from hpc_parallel.config.layout import AXES
from hpc_parallel.report.gather import BESIDE, FIGURES, PARTS, SPEEDLESS, Row, identity, number

UNMEASURED = "not measured"
STRONG, WEAK = "strong", "weak"
PREDICTABLE = (
    "step_time_s", "samples_per_s", "latency_s", "peak_memory_bytes", "bubble_share",
    "exposed_communication_share", "traffic_bytes",
)  # fmt: skip


@dataclass(frozen=True)
class Column:
    """A figure of the comparison. `best`: max or min; `competes`: which rows it says something of."""

    key: str
    title: str
    kind: str  # of its unit: count, rate, seconds, bytes, share, loss, hours
    best: Callable[[Sequence[float]], float]
    competes: Callable[[Row], bool] = lambda row: True
    same_samples: bool = False  # comparable only after as many samples


def _parallel(row: Row) -> bool:
    """Whether several processes talk: what one process moves between its devices nobody waits for alone."""
    return row.processes > 1


def _sends(row: Row) -> bool:
    """Whether its devices have weights of their own: threads on a CPU (dataparallel) share theirs."""
    return (row.devices or 1) > 1 and not (row.on_cpu and row.processes == 1)


def _pipelined(row: Row) -> bool:
    return row.layout.get("pipeline", 1) > 1


COLUMNS = (
    Column("samples_per_s", "throughput", "rate", max),
    Column("latency_s", "latency", "seconds", min),
    Column("step_time_s", "step time", "seconds", min),
    Column("peak_memory_bytes", "memory per device", "bytes", min),
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
    """What a figure is divided by to be shown, and the name of that."""

    size: float = 1.0
    name: str = ""
    digits: int = 3

    def show(self, value: float | None) -> str:
        return UNMEASURED if value is None else digits(value / self.size, self.digits)


def unit_of(kind: str, values: Iterable[float | None]) -> Unit:
    """One unit for a whole column, so that its figures compare at sight."""
    if kind == "share":
        return Unit(0.01, "%")
    if kind not in SCALES:
        return Unit(name=UNITS[kind], digits=4 if kind == "loss" else 3)
    largest = max((abs(value) for value in values if value is not None), default=0.0)
    fitting = (scale for scale in SCALES[kind] if largest >= scale[0])
    size, name = next(fitting, SCALES[kind][-1] if largest else SCALES[kind][0])
    return Unit(size, name)


def digits(value: float, count: int) -> str:
    """So many significant ones, and no power of ten."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    rounded = float(f"{value:.{count - 1}e}")
    return f"{rounded:.{max(0, count - 1 - math.floor(math.log10(abs(rounded))))}f}"


@dataclass(frozen=True)
class Cell:
    value: float | None
    text: str
    best: bool = False


@dataclass(frozen=True)
class Comparison:
    """The comparison table: `cells[row][column]`, by `units[column]`."""

    rows: Sequence[Row]
    units: Sequence[Unit]
    cells: Sequence[Sequence[Cell]]
    workloads: int  # how many kinds of runs stand in it; best is told within each

    def titles(self) -> list[str]:
        named = zip(COLUMNS, self.units, strict=True)
        return [f"{column.title}, {unit.name}" if unit.name else column.title for column, unit in named]


def compare(rows: Sequence[Row]) -> Comparison:
    """All rows, and of each column what is best among the completed runs of the same work."""
    units, columns = [], []
    for column in COLUMNS:
        values = [row.figures[column.key] for row in rows]
        unit = unit_of(column.kind, values)
        best = best_of(column, rows, unit)
        units.append(unit)
        columns.append(
            [
                Cell(value, _shown(column, row, unit), best=place in best)
                for place, (row, value) in enumerate(zip(rows, values, strict=True))
            ]
        )
    return Comparison(rows, units, list(zip(*columns, strict=True)), len({row.work for row in rows}))


def _shown(column: Column, row: Row, unit: Unit) -> str:
    value = row.figures[column.key]
    return "-" if value == 0 and not column.competes(row) else unit.show(value)


def best_of(column: Column, rows: Sequence[Row], unit: Unit) -> set[int]:
    """Places of the best rows of each kind of work. What is not measured never is, nor what only one run has;
    runs that read the same to the digits shown are tied, and where all are, none is best."""
    groups: dict[Any, dict[int, str]] = defaultdict(dict)
    for place, row in enumerate(rows):
        value = row.figures[column.key]
        if row.completed and value is not None and column.competes(row):
            key = (row.work, row.figures["samples"] if column.same_samples else None)
            groups[key][place] = unit.show(value)
    found: set[int] = set()
    for shown in groups.values():
        best = column.best([float(text) for text in shown.values()])
        places = {place for place, text in shown.items() if float(text) == best}
        found |= places if len(places) < len(shown) else set()
    return found


@dataclass(frozen=True)
class Point:
    """Runs of one configuration on so many devices. `samples_per_s`: their median; `speedup`: over the
    fewest devices of the series; `efficiency`: that by as many devices more."""

    devices: int
    global_batch_size: int
    samples_per_s: float
    speedup: float
    efficiency: float
    runs: Sequence[Row]

    @property
    def told(self) -> str:
        """How many runs, and between what their throughput lies."""
        rates = sorted(row.figures["samples_per_s"] or 0 for row in self.runs)
        return "1" if len(rates) == 1 else f"{len(rates)}: {digits(rates[0], 3)} to {digits(rates[-1], 3)}"


@dataclass(frozen=True)
class Series:
    """One configuration on more and more devices, of which one axis takes them. `kind`: strong (the same
    global batch) or weak (the same batch a device)."""

    kind: str
    label: str
    points: Sequence[Point]


def scaling(rows: Sequence[Row]) -> list[Series]:
    """Every group of completed runs that are the same but for their number of devices."""
    groups: dict[tuple[str, str, str, str], dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        batch, devices = row.global_batch_size, row.devices
        if not row.completed or not row.layout or batch is None or not devices or devices < 1:
            continue
        if not row.figures["samples_per_s"]:
            continue
        what = _but_for_devices(row)
        for axis in AXES:
            others = json.dumps({other: row.layout[other] for other in AXES if other != axis})
            groups[STRONG, axis, what + others, f"{batch}"][devices].append(row)
            groups[WEAK, axis, what + others, f"{batch / devices:g}"][devices].append(row)
    found = [
        (axis, _series(kind, axis, by_devices))
        for (kind, axis, *_), by_devices in groups.items()
        if len(by_devices) > 1
    ]
    count = Counter((series.kind, series.label) for _, series in found)
    return [
        replace(series, label=f"{series.label}, by {axis}")
        if count[series.kind, series.label] > 1
        else series
        for axis, series in found
    ]


def records(rows: Sequence[Row], series: Sequence[Series]) -> list[dict[str, Any]]:
    """A flat object a run, in SI units, by the names of `summary.json`; None where nothing is measured."""
    efficiency = {
        (each.kind, row.run.path): point.efficiency
        * (row.figures["samples_per_s"] or 0)
        / point.samples_per_s
        for each in series
        for point in each.points
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
            **{key: row.figures[key] for key in (*FIGURES, "device_hours")},
            **{f"{part}_s": (row.parts or {}).get(part) for part in PARTS},
            **{f"{kind}_efficiency": efficiency.get((kind, row.run.path)) for kind in (STRONG, WEAK)},
        }
        for row in rows
    ]


def _series(kind: str, axis: str, by_devices: dict[int, list[Row]]) -> Series:
    rates = {n: median(row.figures["samples_per_s"] or 0 for row in found) for n, found in by_devices.items()}
    first = min(rates)
    points = []
    for devices, rate in sorted(rates.items()):
        found = by_devices[devices]
        speedup = rate / rates[first]
        points.append(
            Point(devices, found[0].global_batch_size or 0, rate, speedup, speedup / (devices / first), found)
        )
    row, batch = by_devices[first][0], points[0].global_batch_size
    fixed = [f"{other} {degree}" for other, degree in row.layout.items() if other != axis and degree > 1]
    alike = set.intersection(*(set(each.differs) for point in points for each in point.runs))
    apart = [said for said in row.differs if said in alike and not said.startswith("global_batch_size=")]
    held = f"batch {batch}" if kind == STRONG else f"batch {batch / first:g} a device"
    return Series(kind, ", ".join([row.strategy, *fixed, *apart, held]), points)


def _but_for_devices(row: Row) -> str:
    """The configuration, as far as it decides how fast a step is, without what devices there are."""
    config = {key: value for key, value in row.config.items() if key not in (*BESIDE, "optimizer", "seed")}
    training = {
        k: v for k, v in row.section("training").items() if k not in (*SPEEDLESS, "global_batch_size")
    }
    strategy = {k: v for k, v in row.section("strategy").items() if k not in AXES}
    return identity({**config, "training": training, "strategy": strategy})


@dataclass(frozen=True)
class Prediction:
    """A figure of a run as the plan had it, and as it was."""

    row: Row
    key: str
    predicted: float
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """Measured by predicted."""
        return self.measured / self.predicted if self.measured and self.predicted else None


def predictions(rows: Sequence[Row]) -> list[Prediction]:
    """Of every run that was planned."""
    found = []
    for row in rows:
        said = (row.run.summary or {}).get("predicted")
        if not isinstance(said, dict):
            continue
        for key in PREDICTABLE:
            if (value := number(said.get(key))) is not None and value >= 0:
                found.append(Prediction(row, key, value, row.figures[key]))
    return found
