"""Common claims about each approach to parallel training, with the measured figure for or against each.

Claims that are wrong in general have a correction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_parallel.report.gather import Row
from hpc_parallel.report.tables import Series, digits, unit_of

BACKED, CONTRADICTED, EVEN, OPEN = "backed", "contradicted", "no difference seen", "not measured here"
NO_VERDICT = "no verdict on a CPU"  # its figure includes the interpreter, libraries and malloc's cache
NOISE = 0.05  # relative: a smaller difference between two figures shows nothing
CLOSE_TO_IDEAL = 0.8  # smallest efficiency that counts as "n times as fast"
MUCH = 0.1  # share of a step that counts as a high overhead
FEW_DEVICES = 8  # largest number of devices for the claim of near-ideal speed-up
FIGURE_NAMES = {  # key -> name, kind of unit
    "samples_per_s": ("throughput", "rate"),
    "peak_memory_bytes": ("memory per device", "bytes"),
    "bubble_share": ("bubble", "share"),
    "exposed_communication_share": ("exposed communication", "share"),
    # Not the share, which would compare steps of unequal length.
    "exposed_communication_s": ("exposed communication of a step", "seconds"),
    "traffic_bytes": ("traffic per step", "bytes"),
    "busiest_rank_traffic_bytes": ("traffic of the busiest rank", "bytes"),
}


@dataclass(frozen=True)
class Evidence:
    """The verdict on a claim, and the measured figure as text."""

    verdict: str = OPEN
    figure: str = ""


@dataclass(frozen=True)
class Runs:
    """The runs of a report."""

    rows: Sequence[Row]
    series: Sequence[Series]


Measure = Callable[[Runs], Evidence]


@dataclass(frozen=True)
class Claim:
    """A claim about an approach."""

    side: str  # pro or con
    text: str
    measure: Measure | None = None  # None if no figure could decide it
    correction: str = ""


@dataclass(frozen=True)
class Approach:
    """An approach to parallel training, and the claims about it."""

    name: str
    strategy: str  # the value of `strategy=`
    feature: str
    claims: Sequence[Claim]


def versus(strategy: str, other: str, key: str, *, more: bool) -> Measure:
    """Whether one strategy has a larger (or smaller) figure than another.

    Runs of the same work on the same number of devices are compared; the pair with most devices counts.
    """

    def measure(runs: Runs) -> Evidence:
        pairs = [
            (a, b)
            for a in _measured(runs.rows, strategy, key)
            for b in _measured(runs.rows, other, key)
            if a.work == b.work and (a.devices == b.devices or other == "single")
        ]
        if not pairs:
            return Evidence()
        a, b = max(pairs, key=lambda pair: pair[0].devices or 0)
        x, y = a.figures[key] or 0.0, b.figures[key] or 0.0
        name, kind = FIGURE_NAMES[key]
        unit = unit_of(kind, (x, y))
        figure = (
            f"{name}: {unit.show(x)} {unit.name} ({a.label}) against {unit.show(y)} {unit.name} ({b.label})"
        )
        if key == "peak_memory_bytes" and (a.on_cpu or b.on_cpu):
            return Evidence(NO_VERDICT, figure)
        if abs(x - y) <= NOISE * max(x, y):
            return Evidence(EVEN, figure)
        return Evidence(BACKED if (x > y) == more else CONTRADICTED, figure)

    return measure


def level(strategy: str, key: str, *, above: float) -> Measure:
    """Whether a share reaches a bound in the strategy's run on most devices."""

    def measure(runs: Runs) -> Evidence:
        rows = [row for row in _measured(runs.rows, strategy, key) if row.processes > 1]
        if not rows:
            return Evidence()
        row = max(rows, key=lambda row: row.devices or 0)
        value = row.figures[key] or 0.0
        name, kind = FIGURE_NAMES[key]
        unit = unit_of(kind, (value,))
        figure = (
            f"{name}: {unit.show(value)} % ({row.label}); {digits(100 * above, 2)} % or more would be much"
        )
        return Evidence(BACKED if value >= above else CONTRADICTED, figure)

    return measure


def near_ideal(strategy: str) -> Measure:
    """Whether throughput grows nearly in proportion to devices, up to FEW_DEVICES."""

    def measure(runs: Runs) -> Evidence:
        points = [
            (point, series)
            for series in runs.series
            if series.points[0].runs[0].strategy == strategy
            for point in series.points[1:]
            if point.devices <= FEW_DEVICES
        ]
        if not points:
            return Evidence()
        point, series = max(points, key=lambda pair: (pair[0].devices, pair[0].efficiency))
        figure = (
            f"efficiency {point.efficiency:.0%} on {point.devices} devices, from {series.points[0].devices} "
            f"({series.kind} scaling, {series.label}); {CLOSE_TO_IDEAL:.0%} would be close"
        )
        return Evidence(BACKED if point.efficiency >= CLOSE_TO_IDEAL else CONTRADICTED, figure)

    return measure


def ahead_of_all(strategy: str, key: str, *, best: Callable[..., Any]) -> Measure:
    """Whether a strategy is the best of all strategies on the same number of devices."""

    def measure(runs: Runs) -> Evidence:
        for row in sorted(_measured(runs.rows, strategy, key), key=lambda row: -(row.devices or 0)):
            rivals = [
                rival
                for other in {row.strategy for row in runs.rows} - {strategy}
                for rival in _measured(runs.rows, other, key)
                if rival.devices == row.devices and row.work == rival.work and not rival.is_alike(row)
            ]
            if rivals:
                first = best(rivals, key=lambda rival: rival.figures[key])
                x, y = row.figures[key] or 0.0, first.figures[key] or 0.0
                name, kind = FIGURE_NAMES[key]
                unit = unit_of(kind, (x, y))
                figure = f"{name}: {unit.show(x)} {unit.name} ({row.label}), "
                figure += f"best of the others {unit.show(y)} {unit.name} ({first.label})"
                if abs(x - y) <= NOISE * max(x, y):
                    return Evidence(EVEN, figure)
                return Evidence(BACKED if best(x, y) == x else CONTRADICTED, figure)
        return Evidence()

    return measure


def _measured(rows: Sequence[Row], strategy: str, key: str) -> list[Row]:
    return [
        row
        for row in rows
        if row.completed
        and row.strategy == strategy
        and row.figures[key] is not None
        and (row.processes > 1 or not key.startswith("exposed_communication"))
    ]


APPROACHES = (
    Approach(
        "data parallel, all-reduce", "data",
        "each device holds the whole model and takes a part of the batch; gradients are averaged",
        (
            Claim("pro", "close to n times as fast on up to 8 devices", near_ideal("data")),
            Claim("pro", "simple: the model's code does not change"),
            Claim("pro", "moves less than a parameter server does",
                  versus("data", "parameter_server", "busiest_rank_traffic_bytes", more=False),
                  "Not '1 x the weights': a ring all-reduce sends 2(n-1)/n x the weights from each device. "
                  "It avoids the server's link, which carries 2 x the weights for every worker."),
            Claim("con", "high communication overhead",
                  level("data", "exposed_communication_share", above=MUCH),
                  "Bytes alone do not show this: buckets are sent while the backward pass still runs, and "
                  "only exposed communication costs time."),
            Claim("con", "the model must fit on one device: no memory is saved",
                  versus("fsdp", "data", "peak_memory_bytes", more=False),
                  "True only for replicas. fsdp is also data parallel and shards all of the model (the "
                  "figure compares them)."),
        ),
    ),
    Approach(
        "data parallel, parameter server", "parameter_server",
        "workers send gradients to a server with the weights and the optimizer, and receive weights",
        (
            Claim("pro", "workers hold no optimizer state", None,
                  "This saves about half with AdamW in float32 (weights and gradients without two moments), "
                  "without activations. But the server holds all, and this report shows the largest rank."),
            Claim("con", "synchronisation is slow with many devices",
                  versus("parameter_server", "data", "exposed_communication_s", more=True)),
            Claim("con", "moves 2 x the weights for every worker, all through the server",
                  versus("parameter_server", "data", "busiest_rank_traffic_bytes", more=True)),
        ),
    ),
    Approach(
        "data parallel, threads (nn.DataParallel)", "dataparallel",
        "one process drives all devices of a node and sends batch and weights from the first device",
        (
            Claim("pro", "one line of code, no launcher"),
            Claim("con", "the first device is the bottleneck",
                  versus("dataparallel", "data", "samples_per_s", more=False),
                  "Its successor, DistributedDataParallel, does not 'synchronise only the weights': it "
                  "averages gradients, and the weights stay equal because they start equal."),
        ),
    ),
    Approach(
        "model parallel", "model",
        "layers split over the devices, which work one after another",
        (
            Claim("pro", "trains models that one device can't hold",
                  versus("model", "single", "peak_memory_bytes", more=False)),
            Claim("pro", "uses the strengths of different devices", None,
                  "Not true today: the devices of a cluster are alike, and cuts make the stages equal."),
            Claim("con", "devices are idle", level("model", "bubble_share", above=MUCH)),
            Claim("con", "dependencies between devices"),
        ),
    ),
    Approach(
        "pipeline parallel", "pipeline",
        "the same split, with microbatches that keep all stages busy at the same time",
        (
            Claim("pro", "less idle time than layers in turn",
                  versus("pipeline", "model", "bubble_share", more=False)),
            Claim("pro", "uses the devices well", versus("pipeline", "model", "samples_per_s", more=True)),
            Claim("pro", "moves little: activations at the cuts",
                  versus("pipeline", "data", "traffic_bytes", more=False)),
            Claim("con", "still a bubble, (P-1)/(M+P-1) of the schedule with GPipe and 1F1B",
                  level("pipeline", "bubble_share", above=MUCH),
                  "'Processed in sequence' is true for a sample, not for a batch: stages work on several "
                  "microbatches at once."),
            Claim("con", "schedules and data flow are complex"),
        ),
    ),
    Approach(
        "tensor parallel", "tensor",
        "every layer split over the devices, which exchange activations in each layer",
        (
            Claim("pro", "less memory for each device",
                  versus("tensor", "data", "peak_memory_bytes", more=False)),
            Claim("con", "communicates in every layer, hidden by nothing: for fast links only",
                  versus("tensor", "data", "exposed_communication_s", more=True),
                  "Often called 'model parallel', but its devices do not wait for each other in turn."),
        ),
    ),
    Approach(
        "hybrid", "hybrid",
        "pipeline over nodes, tensor inside a node, replicas of both",
        (
            Claim("pro", "least overhead",
                  ahead_of_all("hybrid", "exposed_communication_s", best=min),
                  "Not in general: a product has the overhead of each factor. It is best if no single factor "
                  "fits the model or the links."),
            Claim("pro", "highest efficiency", ahead_of_all("hybrid", "samples_per_s", best=max)),
            Claim("con", "complex, and needs fast links inside a node"),
        ),
    ),
    Approach(
        "tile parallel", "tile",
        "images split into tiles, one per device, with the same weights",
        (
            Claim("pro", "images that one device can't hold",
                  versus("tile", "single", "peak_memory_bytes", more=False)),
            Claim("con", "borders need care: neighbours exchange halos",
                  level("tile", "exposed_communication_share", above=MUCH),
                  "Tiles that are computed separately are wrong at every border and in BatchNorm. Here the "
                  "result equals one device."),
        ),
    ),
)  # fmt: skip


def judged(runs: Runs) -> list[tuple[Approach, list[tuple[Claim, Evidence]]]]:
    """Every claim of every approach with the evidence of these runs."""
    return [
        (
            approach,
            [(claim, claim.measure(runs) if claim.measure else Evidence()) for claim in approach.claims],
        )
        for approach in APPROACHES
    ]
