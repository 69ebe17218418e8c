"""Draws a layout: what each device holds, and which device sends what to which, in the order of a step.

In each bar, the whole bar is the whole model (or all samples of a step), and the coloured part is what the
device holds. A vertical line goes down from each device. A row of lines with dots is a collective among the
devices with dots. An arrow is a message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap

from docs.svg import Svg, width_of
from hpc_parallel.layout.exchanges import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    COPY,
    DIRECTED,
    REDUCE_SCATTER,
    SEND,
    Exchange,
    Phase,
    exchanges,
)
from hpc_parallel.layout.holdings import (
    BATCH,
    COLUMN,
    EXPERT_SLICE,
    EXPERTS,
    GRADIENTS,
    LAYER,
    MEAN,
    ROW,
    SEQUENCE,
    SHARED,
    SLICE,
    STAGE,
    STATE,
    WEIGHTS,
    Holding,
    Part,
    Setup,
    holdings,
)
from hpc_parallel.layout.holdings import (
    COPY as COPY_OF_WEIGHTS,
)
from hpc_parallel.layout.layout import DATAPARALLEL

MOST_DEVICES = 8
LABELS = 252  # the width of the column on the left
MARGIN, PAD, GAP = 16, 8, 10
WIDE, NARROW = 120, 112  # the width of a device: for up to four devices, and for more
LEAST = 560  # the smallest width of a drawing
BAR = 20
LINE = 14  # of small text
TRACK = 11  # between two lines of one exchange
ROWS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    # the label of the bar, its colour, and what a device keeps (any of these) if its bar is coloured
    ("weights", "weights", (WEIGHTS, COPY_OF_WEIGHTS, SHARED)),
    ("gradients", "gradients", (GRADIENTS, MEAN)),
    ("optimizer state", "state", (STATE,)),
)
PHASES = {
    Phase.FORWARD: "forward pass",
    Phase.BACKWARD: "backward pass",
    Phase.UPDATE: "update of the weights",
}
KINDS = {
    ALL_REDUCE: "all-reduce: each of the devices gets the sum or the mean of what all have",
    ALL_GATHER: "all-gather: each of the devices gets the parts of all",
    REDUCE_SCATTER: "reduce-scatter: each of the devices gets its part of the sum or the mean",
    ALL_TO_ALL: "all-to-all: each of the devices sends every other one what that one needs",
    SEND: "send: an arrow is a message from one device to another",
    COPY: "copy: one process copies between its devices",
}
Unit = tuple[float, float, float, float]  # left, top, right, bottom of a part of a bar, from 0 to 1


@dataclass(frozen=True)
class DrawnPlace:
    """Where a device is drawn."""

    x: float
    width: float
    node: int

    @property
    def small(self) -> float:
        """The size of small text."""
        return 10.5 if self.width == WIDE else 9.5

    @property
    def centre(self) -> float:
        return self.x + self.width / 2


def draw(setup: Setup, *, devices_per_node: int, title: str) -> str:
    """The drawing as the text of an SVG file. Raises ValueError for more than MOST_DEVICES devices."""
    rows = holdings(setup)
    if len(rows) > MOST_DEVICES:
        raise ValueError(f"{len(rows)} devices can't be drawn, only {MOST_DEVICES}")
    places = _places(len(rows), devices_per_node)
    sent = exchanges(setup)
    width = max(LEAST, places[-1].x + places[-1].width + PAD + MARGIN)
    svg = Svg(width=width, title=title, description=_description(rows, sent))
    svg.text(MARGIN, 26, title, size=15, bold=True, within=width - 2 * MARGIN)
    noun = "device" if setup.strategy.execution == DATAPARALLEL else "rank"
    bottom = _draw_devices(svg, rows, places, noun=noun)
    svg.height = _draw_exchanges(svg, sent, places, top=bottom)
    svg.height = _draw_legend(svg, rows, sent, top=svg.height)
    return str(svg)


def _places(count: int, devices_per_node: int) -> list[DrawnPlace]:
    width, places = WIDE if count <= 4 else NARROW, []
    x: float = LABELS + MARGIN + PAD
    for device in range(count):
        node = device // devices_per_node
        if device and device % devices_per_node == 0:
            x += GAP + 2 * PAD - GAP / 2
        places.append(DrawnPlace(x, width, node))
        x += width + GAP / 2
    return places


def _description(rows: Sequence[Holding], sent: Sequence[Exchange]) -> str:
    """The content of the drawing in words."""
    held = [
        f"{row.devices[0]}{f' ({row.role})' * bool(row.role)} has {row.model_text}, {row.samples_text}"
        for row in rows
    ]
    messages = [f"{row.phase.value}: {row.what}, {row.how}, {row.often.value}, {row.groups}" for row in sent]
    return "; ".join(held + messages)


def _draw_devices(svg: Svg, rows: Sequence[Holding], places: Sequence[DrawnPlace], *, noun: str) -> float:
    """Draw the nodes, devices and their bars; returns the lower edge."""
    top = 44.0
    role = LINE * any(row.role for row in rows)
    model_lines = max(len(_model_lines(row)) for row in rows)
    sample_lines = max(len(_sample_lines(row)) for row in rows)
    bars = top + 42 + role
    samples = bars + len(ROWS) * (BAR + 6) + model_lines * LINE + 8
    bottom = samples + BAR + 8 + sample_lines * LINE + 4
    for node in sorted({place.node for place in places}):
        node_places = [place for place in places if place.node == node]
        left, right = node_places[0].x - PAD, node_places[-1].x + node_places[-1].width + PAD
        svg.box(left, top, (right - left, bottom - top + PAD), "node", round_by=6)
        svg.text(left + PAD, top + 14, f"node {node}", size=11, kind="faint", within=right - left - PAD)
    for number, (label, _, _) in enumerate(ROWS):
        _label(svg, bars + number * (BAR + 6) + 14, label)
    _label(svg, samples + 14, "samples of a step")
    for row, place in zip(rows, places, strict=True):
        with svg.group("of-device"):
            svg.box(place.x, top + 20, (place.width, bottom - top - 20), "device", round_by=4)
            inside = place.width - 12
            svg.text(place.x + 6, top + 36, f"{noun} {row.devices[0]}", size=12, bold=True, within=inside)
            if row.role:
                svg.text(place.x + 6, top + 36 + LINE, row.role, size=10.5, within=inside)
            _draw_model(svg, row, place, top=bars)
            _draw_samples(svg, row, place, top=samples)
    return bottom + PAD


def _label(svg: Svg, y: float, text: str) -> None:
    svg.text(MARGIN, y, text, size=12, bold=True, within=LABELS - PAD)


def _draw_model(svg: Svg, row: Holding, place: DrawnPlace, *, top: float) -> None:
    """Draw one bar each for weights, gradients and optimizer state, and text about the coloured part."""
    for label, kind, kept in ROWS:
        svg.box(place.x + 6, top, (place.width - 12, BAR), "empty")
        if any(keep in kept for keep in row.keeps):
            faint = label == "weights" and not {WEIGHTS} & set(row.keeps)
            _fill(svg, _model_units(row), place, top=top, kind=kind, faint=faint)
        top += BAR + 6
    for line in _model_lines(row):
        svg.text(place.x + 6, top + 8, line, size=place.small, kind="faint", within=place.width - 12)
        top += LINE


def _draw_samples(svg: Svg, row: Holding, place: DrawnPlace, *, top: float) -> None:
    svg.box(place.x + 6, top, (place.width - 12, BAR), "empty")
    if row.samples is not None:
        _fill(svg, _sample_units(row.samples), place, top=top, kind="samples")
    for number, line in enumerate(_sample_lines(row)):
        y = top + BAR + 14 + number * LINE
        svg.text(place.x + 6, y, line, size=place.small, kind="faint", within=place.width - 12)


def _fill(
    svg: Svg, units: Sequence[Unit], place: DrawnPlace, *, top: float, kind: str, faint: bool = False
) -> None:
    width = place.width - 12
    for left, upper, right, lower in units:
        size = (max(2.0, (right - left) * width), max(2.0, (lower - upper) * BAR))
        svg.box(place.x + 6 + left * width, top + upper * BAR, size, kind, round_by=1, faint=faint)


def _model_units(row: Holding) -> list[Unit]:
    """The coloured parts of a bar: stages from left to right, parts and slices of each layer from the top."""
    whole = Part((0,), 1)
    if EXPERTS in row.model:  # the left half is what all devices have, the right half is the experts
        others, of_experts = (_spans(row.model.get(kind, whole)) for kind in (SLICE, EXPERT_SLICE))
        experts = [(0.5 + a / 2, 0.5 + b / 2) for a, b in _spans(row.model[EXPERTS])]
        return [
            *((0.0, c, 0.48, d) for c, d in others),
            *((a, c, b, d) for a, b in experts for c, d in of_experts),
        ]  # fmt: skip
    stages = _spans(row.model.get(STAGE, whole))
    layer = _spans(row.model.get(LAYER, whole))
    slices = _spans(row.model.get(SLICE, whole))
    return [
        (left, a + (b - a) * c, right, a + (b - a) * d)
        for left, right in stages for a, b in layer for c, d in slices
    ]  # fmt: skip


def _sample_units(samples: dict[str, Part]) -> list[Unit]:
    """Samples from top to bottom, and the positions of each from left to right; for images, the tiles."""
    full = Part((0,), 1)
    batch, rows = samples.get(BATCH, full), samples.get(ROW, full)
    columns = samples.get(COLUMN, samples.get(SEQUENCE, full))
    return [
        (left, a + (b - a) * c, right, a + (b - a) * d)
        for left, right in _spans(columns) for a, b in _spans(batch) for c, d in _spans(rows)
    ]  # fmt: skip


def _spans(part: Part) -> list[tuple[float, float]]:
    return [(index / part.of, (index + 1) / part.of) for index in part.indices]


def _model_lines(row: Holding) -> list[str]:
    formats = {STAGE: "stage {}", LAYER: "layer part {}", SLICE: "slice {}", EXPERTS: "experts: {}"}
    formats[EXPERT_SLICE] = "their slice {}"
    lines = [formats[kind].format(part) for kind, part in row.model.items()] or ["whole model"]
    if COPY_OF_WEIGHTS in row.keeps:
        return ["copy of the model"]
    return ["shared model"] if SHARED in row.keeps else lines


def _sample_lines(row: Holding) -> list[str]:
    if row.samples is None:
        return ["none"]
    formats = {BATCH: "part {}", SEQUENCE: "slices {}", ROW: "row {}", COLUMN: "column {}"}
    return [formats[kind].format(part) for kind, part in row.samples.items()] or ["all"]


def _draw_exchanges(svg: Svg, sent: Sequence[Exchange], places: Sequence[DrawnPlace], *, top: float) -> float:
    """Draw the rows below the devices; returns the lower edge."""
    y, first = top + 8, {row.phase: row for row in reversed(sent)}
    start = top
    marks: list[tuple[float, Exchange]] = []
    for exchange in sent:
        if first[exchange.phase] is exchange:
            svg.text(MARGIN, y + 14, PHASES[exchange.phase], size=11, kind="faint", within=LABELS - PAD)
            svg.line((MARGIN, y + 20), (svg.width - MARGIN, y + 20), "empty")
            y += 28
        marks.append((y, exchange))
        y += max(34, 14 + TRACK * len(_tracks(exchange)))
    for place in places:
        svg.line((place.centre, start), (place.centre, y if sent else start), "empty", width=1.5)
    for row_y, exchange in marks:
        _draw_exchange(svg, exchange, places, y=row_y)
    if not sent:
        svg.text(MARGIN, y + 14, "nothing is sent", size=12, bold=True, within=LABELS)
        y += 24
    return y + 6


def _draw_exchange(svg: Svg, exchange: Exchange, places: Sequence[DrawnPlace], *, y: float) -> None:
    kind, how = colour(exchange.what), exchange.how.replace("_", "-")
    svg.text(MARGIN, y + 10, exchange.what, size=12, bold=True, within=LABELS - PAD)
    often = ", ".join(filter(None, (how, exchange.often.value, exchange.only_if)))
    svg.text(MARGIN, y + 24, often, size=10.5, kind="faint", within=LABELS)
    for number, track in enumerate(_tracks(exchange)):
        track_y = y + 10 + number * TRACK
        for group in track:
            xs = [places[member].centre for member in group]
            if exchange.how in DIRECTED:
                svg.arrow(xs[0], track_y, xs[1], kind)
                continue
            svg.line((xs[0], track_y), (xs[-1], track_y), kind, width=2)
            for x in xs:
                svg.dot(x, track_y, kind)


def _tracks(exchange: Exchange) -> list[list[Sequence[int]]]:
    """The groups in rows, so that no two groups of a row overlap."""
    tracks: list[list[Sequence[int]]] = []
    for group in exchange.groups:
        for track in tracks:
            if all(max(group) <= min(other) or max(other) <= min(group) for other in track):
                track.append(group)
                break
        else:
            tracks.append([group])
    return tracks


def colour(what: str) -> str:
    """The colour of what is sent: the colour of the bar to which it belongs. Numbers are grey."""
    if any(word in what for word in ("norm of", "sums", "moments")):
        return "numbers"
    if what.startswith("weights"):
        return "weights"
    return "gradients" if what.startswith("gradient") else "samples"


def _draw_legend(svg: Svg, rows: Sequence[Holding], sent: Sequence[Exchange], *, top: float) -> float:
    svg.line((MARGIN, top), (svg.width - MARGIN, top), "empty")
    y = top + 4
    within = svg.width - 2 * MARGIN
    for sentence in _legend(rows, sent):
        for line in wrap(sentence, int(within / width_of(" ", size=10.5))):
            y += LINE + 1
            svg.text(MARGIN, y, line, size=10.5, kind="faint", within=within)
    return y + 12


def _legend(rows: Sequence[Holding], sent: Sequence[Exchange]) -> Iterator[str]:
    model, samples = rows[-1].model, rows[-1].samples or {}
    if EXPERTS in model:
        yield (
            "A bar: on the left the weights that all devices have, on the right the experts. "
            "Coloured: what the device holds."
        )
    else:
        yield (
            "A bar is the whole model: its blocks from left to right, and each layer from top to bottom. "
            "Coloured: what the device holds."
        )
    if ROW in samples:
        yield "The samples: a bar is one image, cut into tiles."
    elif SEQUENCE in samples:
        yield "The samples: a bar is all sequences of a step, each from left to right."
    elif samples:
        yield "The samples: a bar is all samples of a step, one below the other."
    if any(COPY_OF_WEIGHTS in row.keeps for row in rows):
        yield "Faint: a copy, which another device updates."
    for how in dict.fromkeys(exchange.how for exchange in sent):
        yield KINDS[how]
