"""One profiled step of a pipeline: what the stages of each device did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpc_parallel.record.timeline_file import RankTimeline, StageWork
from hpc_parallel.report import picture
from hpc_parallel.report.gather import Row, timeline
from hpc_parallel.report.labels import short
from hpc_parallel.report.tables import Unit, unit_of

MAX_TIMELINES = 12
KINDS = {  # of a stage's work
    "forward": (picture.BLUE, "", "forward"),
    "loss": (picture.PURPLE, "xx", "loss"),
    "backward": (picture.ORANGE, "//", "backward"),
    "weights": (picture.GREEN, "..", "gradients of weights"),
    "average": (picture.SKY, "\\\\", "average of gradients"),
    "update": (picture.VERMILION, "++", "update"),
}
OTHER = ("#999999", "--", "other work")  # a kind that this version does not know


def pictures(rows: Sequence[Row]) -> Iterator[picture.Picture]:
    """A plot for each of the first runs that have a timeline."""
    timelines = [(row, ranks) for row in rows if (ranks := timeline(row))]
    for index, (row, ranks) in enumerate(timelines[:MAX_TIMELINES], start=1):
        yield picture.Picture(
            f"timeline_{index}", "timeline", f"One step of {row.label}",
            "What the stages of each device did in one profiled step. Numbers are microbatches "
            "(stage:microbatch if a device has several stages), where there is room. Blank is idle."
            + picture.first_of(MAX_TIMELINES, len(timelines)),
            bars_of(ranks),
        )  # fmt: skip


def bars_of(ranks: Sequence[RankTimeline]) -> picture.Bars:
    """A bar for each rank."""
    length_s = max(rank.length_s for rank in ranks)
    unit = unit_of("seconds", [length_s])
    stages = [sorted({chunk.stage for chunk in rank.chunks}) for rank in ranks]
    with_stage = any(len(rank_stages) > 1 for rank_stages in stages)
    bars = [
        picture.Bar(
            short(f"rank {rank.rank}, stage {' '.join(map(str, rank_stages))}"),
            [_block(chunk, unit, with_stage=with_stage) for chunk in rank.chunks],
        )
        for rank, rank_stages in zip(ranks, stages, strict=True)
    ]
    scale = picture.PlotAxis(
        f"time since the step's start, {unit.name}", picture.FROM_ZERO, [length_s / unit.size]
    )
    return picture.Bars([("", bars)], scale, [*KINDS.values(), OTHER])


def _block(chunk: StageWork, unit: Unit, *, with_stage: bool) -> picture.Block:
    number = "" if chunk.microbatch is None else f"{chunk.microbatch}"
    text = f"{chunk.stage}:{number}" if number and with_stage else number
    fill = KINDS.get(chunk.kind, OTHER)
    return picture.Block(chunk.start_s / unit.size, chunk.end_s / unit.size, fill, text)
