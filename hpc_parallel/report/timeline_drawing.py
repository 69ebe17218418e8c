"""One profiled step of a pipeline: what the stages of each device did."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hpc_parallel.record.timeline_file import RankTimeline, StageWork
from hpc_parallel.report.drawing import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    Plot,
    add_patch_legend,
    bar_style,
    canvas,
    first_of,
    is_wide,
    name_bars,
    plot,
    short,
)
from hpc_parallel.report.gather import Row, timeline
from hpc_parallel.report.tables import Unit, unit_of

MAX_TIMELINES = 12
MAX_NUMBERS = 100  # microbatch numbers per rank; more numbers have room only if chunks overlap
KINDS = {  # kind of a stage's work -> colour, hatch, name
    "forward": (BLUE, "", "forward"),
    "loss": (PURPLE, "xx", "loss"),
    "backward": (ORANGE, "//", "backward"),
    "weights": (GREEN, "..", "gradients of weights"),
    "average": (SKY, "\\\\", "average of gradients"),
    "update": (VERMILION, "++", "update"),
}
OTHER = "other"  # a kind that this version does not know
KINDS[OTHER] = ("#999999", "--", "other work")


def plots(rows: Sequence[Row]) -> Iterator[Plot]:
    """A plot for each of the first runs that have a timeline."""
    timelines = [(row, ranks) for row in rows if (ranks := timeline(row))]
    for index, (row, ranks) in enumerate(timelines[:MAX_TIMELINES], start=1):
        yield plot(
            f"timeline_{index}", "timeline", f"One step of {row.label}",
            "What the stages of each device did in one profiled step. Numbers are microbatches "
            "(stage:microbatch if a device has several stages), where there is room. Blank is idle."
            + first_of(MAX_TIMELINES, len(timelines)),
            partial(timeline_figure, ranks),
        )  # fmt: skip


def timeline_figure(ranks: Sequence[RankTimeline]) -> Figure:
    """A row for each rank."""
    figure, ((axes,),) = canvas(0.9 + 0.42 * len(ranks))
    length_s = max(rank.length_s for rank in ranks)
    unit = unit_of("seconds", [length_s])
    stages = [sorted({chunk.stage for chunk in rank.chunks}) for rank in ranks]
    with_stage = any(len(rank_stages) > 1 for rank_stages in stages)
    for y, rank in enumerate(ranks):
        _draw_chunks(axes, rank.chunks, y=y, unit=unit)
        _draw_microbatches(axes, rank.chunks, y=y, unit=unit, length_s=length_s, with_stage=with_stage)
    labels = [
        short(f"rank {rank.rank}, stage {' '.join(map(str, rank_stages))}")
        for rank, rank_stages in zip(ranks, stages, strict=True)
    ]
    name_bars(axes, labels)
    axes.set_xlim(0, length_s / unit.size)
    axes.set_xlabel(f"time since the step's start, {unit.name}")
    drawn = {_known_kind(chunk.kind) for rank in ranks for chunk in rank.chunks}
    styles = [KINDS[kind] for kind in KINDS if kind in drawn]
    add_patch_legend(figure, [style[:2] for style in styles], [name for _, _, name in styles])
    return figure


def _known_kind(kind: str) -> str:
    return kind if kind in KINDS else OTHER


def _draw_chunks(axes: Axes, chunks: Sequence[StageWork], *, y: int, unit: Unit) -> None:
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for start, end, _, kind, _ in chunks:
        spans[_known_kind(kind)].append((start / unit.size, (end - start) / unit.size))
    for kind, of_kind in spans.items():
        colour, hatch, _ = KINDS[kind]
        axes.broken_barh(of_kind, (y - 0.38, 0.76), **bar_style(colour, hatch))


def _draw_microbatches(
    axes: Axes, chunks: Sequence[StageWork], *, y: int, unit: Unit, length_s: float, with_stage: bool
) -> None:
    """Write the number of the microbatch on every chunk that has room, up to MAX_NUMBERS."""
    count, character = 0, 0.011 if is_wide() else 0.03  # a character's width, as a share of the step
    for start, end, stage, _, microbatch in chunks:
        text = "" if microbatch is None else f"{stage}:{microbatch}" if with_stage else f"{microbatch}"
        if (end - start) / length_s > character * (len(text) + 0.4) and count < MAX_NUMBERS:
            count += 1
            axes.annotate(
                text, ((start + end) / 2 / unit.size, y), ha="center", va="center", fontsize=8,
                color="black", bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.6},
            )  # fmt: skip
