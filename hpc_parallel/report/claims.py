"""What overviews of parallel training say of each approach, beside the figure of these runs that backs or
contradicts it; and where what is often said is wrong whatever is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_parallel.report.gather import Row
from hpc_parallel.report.tables import Series, digits, unit_of

BACKED, CONTRADICTED, EVEN, OPEN = "backed", "contradicted", "no difference seen", "not measured here"
UNTOLD = "no verdict on a CPU"  # a process has the interpreter, its libraries, what malloc keeps
NOISE = 0.05  # relative: two figures nearer than this tell nothing
CLOSE_TO_IDEAL = 0.8  # efficiency that still counts as "n times as fast"
MUCH = 0.1  # share of a step that counts as a high overhead
FEW_DEVICES = 8  # as far as the claim of near-ideal speed-up goes
WORDS = {
    "samples_per_s": ("throughput", "rate"),
    "peak_memory_bytes": ("memory per device", "bytes"),
    "bubble_share": ("bubble", "share"),
    "exposed_communication_share": ("exposed communication", "share"),
    "exposed_communication_s": ("exposed communication of a step", "seconds"),  # shares: of unequal steps
    "traffic_bytes": ("traffic per step", "bytes"),
    "busiest_rank_traffic_bytes": ("traffic of the busiest rank", "bytes"),
}


@dataclass(frozen=True)
class Evidence:
    verdict: str = OPEN
    figure: str = ""


@dataclass(frozen=True)
class Runs:
    rows: Sequence[Row]
    series: Sequence[Series]


Measure = Callable[[Runs], Evidence]


@dataclass(frozen=True)
class Claim:
    """`side`: pro or con. `measure`: the figure for it; None where none would be."""

    side: str
    text: str
    measure: Measure | None = None
    correction: str = ""


@dataclass(frozen=True)
class Approach:
    name: str
    strategy: str  # `strategy=` of it
    feature: str
    claims: Sequence[Claim]


def versus(mine: str, other: str, key: str, *, more: bool) -> Measure:
    """Whether one strategy has more (or less) of a figure than another, on as many devices and the same
    work; those of most devices tell, if there are any."""

    def measure(runs: Runs) -> Evidence:
        pairs = [
            (a, b)
            for a in _measured(runs.rows, mine, key)
            for b in _measured(runs.rows, other, key)
            if a.work == b.work and (a.devices == b.devices or other == "single")
        ]
        if not pairs:
            return Evidence()
        a, b = max(pairs, key=lambda pair: pair[0].devices or 0)
        x, y = a.figures[key] or 0.0, b.figures[key] or 0.0
        name, kind = WORDS[key]
        unit = unit_of(kind, (x, y))
        figure = (
            f"{name}: {unit.show(x)} {unit.name} ({a.label}) against {unit.show(y)} {unit.name} ({b.label})"
        )
        if key == "peak_memory_bytes" and (a.on_cpu or b.on_cpu):
            return Evidence(UNTOLD, figure)
        if abs(x - y) <= NOISE * max(x, y):
            return Evidence(EVEN, figure)
        return Evidence(BACKED if (x > y) == more else CONTRADICTED, figure)

    return measure


def level(mine: str, key: str, *, above: float) -> Measure:
    """Whether a share is above a bound in this strategy's run on most devices."""

    def measure(runs: Runs) -> Evidence:
        found = [row for row in _measured(runs.rows, mine, key) if row.processes > 1]
        if not found:
            return Evidence()
        row = max(found, key=lambda row: row.devices or 0)
        value = row.figures[key] or 0.0
        name, kind = WORDS[key]
        unit = unit_of(kind, (value,))
        figure = (
            f"{name}: {unit.show(value)} % ({row.label}); {digits(100 * above, 2)} % or more would be much"
        )
        return Evidence(BACKED if value >= above else CONTRADICTED, figure)

    return measure


def near_ideal(mine: str) -> Measure:
    """Whether more devices give nearly as many times the throughput, as far as the claim goes."""

    def measure(runs: Runs) -> Evidence:
        points = [
            (point, series)
            for series in runs.series
            if series.points[0].runs[0].strategy == mine
            for point in series.points[1:]
            if point.devices <= FEW_DEVICES
        ]
        if not points:
            return Evidence()
        point, series = max(points, key=lambda found: (found[0].devices, found[0].efficiency))
        figure = (
            f"efficiency {point.efficiency:.0%} on {point.devices} devices, from {series.points[0].devices} "
            f"({series.kind} scaling, {series.label}); {CLOSE_TO_IDEAL:.0%} would be close"
        )
        return Evidence(BACKED if point.efficiency >= CLOSE_TO_IDEAL else CONTRADICTED, figure)

    return measure


def ahead_of_all(mine: str, key: str, *, best: Callable[..., Any]) -> Measure:
    """Whether a strategy is the best of all strategies on as many devices."""

    def measure(runs: Runs) -> Evidence:
        for row in sorted(_measured(runs.rows, mine, key), key=lambda row: -(row.devices or 0)):
            rivals = [
                other
                for strategy in {each.strategy for each in runs.rows} - {mine}
                for other in _measured(runs.rows, strategy, key)
                if other.devices == row.devices and row.work == other.work and not other.is_alike(row)
            ]
            if rivals:
                first = best(rivals, key=lambda other: other.figures[key])
                x, y = row.figures[key] or 0.0, first.figures[key] or 0.0
                name, kind = WORDS[key]
                unit = unit_of(kind, (x, y))
                figure = f"{name}: {unit.show(x)} {unit.name} ({row.label}), "
                figure += f"best of the others {unit.show(y)} {unit.name} ({first.label})"
                if abs(x - y) <= NOISE * max(x, y):
                    return Evidence(EVEN, figure)
                won = best(x, y) == x
                return Evidence(BACKED if won else CONTRADICTED, figure)
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
        "a whole model on each device, each takes a part of the batch; gradients are averaged",
        (
            Claim("pro", "close to n times as fast on up to 8 devices", near_ideal("data")),
            Claim("pro", "simple: the model's code stays as it is"),
            Claim("pro", "moves less than a parameter server does",
                  versus("data", "parameter_server", "busiest_rank_traffic_bytes", more=False),
                  "Not '1 x the weights': a ring all-reduce sends 2(n-1)/n x the weights from each device. "
                  "What it saves is the server's link, through which 2 x the weights of every worker go."),
            Claim("con", "high communication overhead",
                  level("data", "exposed_communication_share", above=MUCH),
                  "Bytes alone say little: buckets go out while the backward pass still runs, and only what "
                  "is exposed costs time."),
            Claim("con", "the model must fit on one device: no memory is saved",
                  versus("fsdp", "data", "peak_memory_bytes", more=False),
                  "True of replicas only; fsdp is data parallel too and slices all of it (the figure "
                  "compares them)."),
        ),
    ),
    Approach(
        "data parallel, parameter server", "parameter_server",
        "workers send gradients to one that has the weights and the optimizer, and get weights back",
        (
            Claim("pro", "workers hold no optimizer state", None,
                  "About half with AdamW in float32 (weights and gradients without two moments), activations "
                  "aside; but the server holds it all, and memory here is the largest of all ranks."),
            Claim("con", "synchronisation is slow with many devices",
                  versus("parameter_server", "data", "exposed_communication_s", more=True)),
            Claim("con", "moves 2 x the weights for every worker, all through the server",
                  versus("parameter_server", "data", "busiest_rank_traffic_bytes", more=True)),
        ),
    ),
    Approach(
        "data parallel, threads (nn.DataParallel)", "dataparallel",
        "one process drives all devices of a node and hands out batch and weights through the first",
        (
            Claim("pro", "one line of code, no launcher"),
            Claim("con", "the first device is the bottleneck",
                  versus("dataparallel", "data", "samples_per_s", more=False),
                  "Its better successor does not 'synchronise only the weights': it averages gradients, and "
                  "the weights stay equal because all began alike."),
        ),
    ),
    Approach(
        "model parallel", "model",
        "layers cut over the devices, which work one after another",
        (
            Claim("pro", "trains models that one device can't hold",
                  versus("model", "single", "peak_memory_bytes", more=False)),
            Claim("pro", "uses what single devices are good at", None,
                  "Wrong of today's clusters: devices are alike, and cuts are chosen to make stages equal."),
            Claim("con", "devices stand idle", level("model", "bubble_share", above=MUCH)),
            Claim("con", "dependencies between devices"),
        ),
    ),
    Approach(
        "pipeline parallel", "pipeline",
        "the same cut, with microbatches that keep all stages at work at once",
        (
            Claim("pro", "less idle time than layers in turn",
                  versus("pipeline", "model", "bubble_share", more=False)),
            Claim("pro", "uses the devices well", versus("pipeline", "model", "samples_per_s", more=True)),
            Claim("pro", "moves little: activations at the cuts",
                  versus("pipeline", "data", "traffic_bytes", more=False)),
            Claim("con", "still a bubble, (P-1)/(M+P-1) of the schedule with GPipe and 1F1B",
                  level("pipeline", "bubble_share", above=MUCH),
                  "'Processed in sequence' holds of a sample, not of a batch: stages work on several "
                  "microbatches at once."),
            Claim("con", "schedules and the flow of data are complex"),
        ),
    ),
    Approach(
        "tensor parallel", "tensor",
        "every layer split over the devices, which exchange activations in each",
        (
            Claim("pro", "less memory for each device",
                  versus("tensor", "data", "peak_memory_bytes", more=False)),
            Claim("con", "communicates in every layer, hidden by nothing: for fast links only",
                  versus("tensor", "data", "exposed_communication_s", more=True),
                  "Often pictured as 'model parallel': it is not the one whose devices wait in turn."),
        ),
    ),
    Approach(
        "hybrid", "hybrid",
        "pipeline over nodes, tensor inside a node, replicas of both",
        (
            Claim("pro", "least overhead",
                  ahead_of_all("hybrid", "exposed_communication_s", best=min),
                  "Not in general: a product has each factor's overhead, and wins where no single factor "
                  "fits the model or the links."),
            Claim("pro", "highest efficiency", ahead_of_all("hybrid", "samples_per_s", best=max)),
            Claim("con", "complex, and wants fast links inside a node"),
        ),
    ),
    Approach(
        "tile parallel", "tile",
        "images cut into tiles, one a device, with the same weights",
        (
            Claim("pro", "images that one device can't hold",
                  versus("tile", "single", "peak_memory_bytes", more=False)),
            Claim("con", "borders need care: halos go between neighbours",
                  level("tile", "exposed_communication_share", above=MUCH),
                  "Tiles that are computed apart and put together are wrong at every border and in "
                  "BatchNorm; here they equal one device."),
        ),
    ),
)  # fmt: skip


def judged(runs: Runs) -> list[tuple[Approach, list[tuple[Claim, Evidence]]]]:
    """Every claim with what these runs say to it."""
    return [
        (
            approach,
            [(claim, claim.measure(runs) if claim.measure else Evidence()) for claim in approach.claims],
        )
        for approach in APPROACHES
    ]
