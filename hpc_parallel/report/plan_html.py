"""The page of a plan, before there is a run: figures, memory, one step, and different numbers of nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpc_parallel.planning.memory import Held
from hpc_parallel.planning.ranking import Size, seconds
from hpc_parallel.record.task_files import RankTimeline
from hpc_parallel.report import picture
from hpc_parallel.report.page import fill
from hpc_parallel.report.plots import bars_of, scaling_graphs, scaling_panel

if TYPE_CHECKING:
    from hpc_parallel.report.drawing import Plot


GIB = 2**30
PARTS = (  # of a bar: their fill, and their kinds of bytes
    ((picture.BLUE, "", "parameters"), ("parameters",)),
    ((picture.ORANGE, "//", "gradients"), ("gradients",)),
    ((picture.GREEN, "..", "optimizer state"), ("optimizer",)),
    ((picture.PURPLE, "xx", "activations"), ("activations", "gradients of results", "recomputation")),
    ((picture.SKY, "\\\\", "logits and loss"), ("logits and loss",)),
    ((picture.VERMILION, "++", "weights in use"), ("cast weights", "gathered weights")),
    (
        ("#F0E442", "oo", "messages"),
        ("gradients in messages", "gradients of the ends", "buffers between stages"),
    ),
    (
        ("#999999", "--", "workspaces, context, slack"),
        ("rounded update", "workspaces", "device context", "allocator slack"),
    ),
)
MAX_RANKS, MAX_CHUNKS = 16, 800  # in the drawing of a step: more would be too narrow to be seen


@dataclass(frozen=True)
class PlanPage:
    """What the page shows.

    lines: the text below the title. figures: each with key, label, value, text and formula. ranks: the ranks
    of one step. left_out: why some numbers of nodes are not in `sizes`. notes: what the plan assumes.
    """

    title: str
    lines: Sequence[str]
    command: str
    figures: Sequence[object]
    roles: Sequence[Held]
    device_memory_bytes: float
    ranks: Sequence[RankTimeline]
    sizes: Sequence[Size]
    verdict: str
    left_out: Sequence[str]
    notes: Sequence[str]


def render(page: PlanPage, plots: Sequence[Plot]) -> str:
    """The HTML page, self-contained."""
    roles = page.roles
    kinds = [kind for kind in (roles[0].kinds if roles else ()) if any(role.kinds[kind] for role in roles)]
    values: dict[str, Any] = {"title": page.title, "page": page, "plots": plots, "kinds": kinds}
    values["seconds"] = seconds
    return fill("plan.html.j2", values)


def pictures(page: PlanPage) -> list[picture.Picture]:
    return [*_memory(page), *_step(page), *_scaling(page)]


def _memory(page: PlanPage) -> Iterator[picture.Picture]:
    if page.roles:
        yield picture.Picture(
            "memory", "memory", "Memory of a device at its fullest",
            "A bar for the devices of each role, and the memory of a device as a line."
            + picture.first_of(picture.MAX_BARS, len(page.roles)),
            _bars(page.roles[:picture.MAX_BARS], page.device_memory_bytes),
        )  # fmt: skip


def _bars(roles: Sequence[Held], room: float) -> picture.Bars:
    bars = [
        picture.Bar(
            role.role,
            picture.stacked((sum(role.kinds[kind] for kind in kinds) / GIB, fill) for fill, kinds in PARTS),
            f"{role.total / GIB:.1f}",
        )
        for role in roles
    ]
    end = 1.12 * max(room / GIB, *(role.total / GIB for role in roles))
    scale = picture.PlotAxis("memory, GiB (dashed: of a device)", picture.FROM_ZERO, (end,))
    return picture.Bars([("", bars)], scale, [fill for fill, _ in PARTS], marked=(room / GIB, "--"))


def _step(page: PlanPage) -> Iterator[picture.Picture]:
    ranks, cut_s = drawable(page.ranks)
    caption = (
        "What the stages of each rank of the pipeline do, as simulated. Numbers are microbatches "
        "(stage:microbatch if a rank has several stages), where there is room. Blank is idle."
    )
    if len(ranks) < len(page.ranks):
        caption += f" {len(ranks)} of {len(page.ranks)} ranks."
    if cut_s is not None:
        caption += " Only the beginning of the step: it has more actions than a picture shows."
    yield picture.Picture("step", "timeline", "One step, planned", caption, bars_of(ranks))


def drawable(ranks: Sequence[RankTimeline]) -> tuple[list[RankTimeline], float | None]:
    """At most MAX_RANKS ranks, evenly spaced. If they have more than MAX_CHUNKS chunks, the step is cut.

    Returns the ranks and the time of the cut, or None without a cut.
    """
    last = len(ranks) - 1
    chosen = sorted({round(at * last / (MAX_RANKS - 1)) for at in range(MAX_RANKS)})
    kept = [ranks[at] for at in chosen]
    starts = sorted(chunk.start_s for rank in kept for chunk in rank.chunks)
    if len(starts) <= MAX_CHUNKS:
        return kept, None
    cut_s = starts[MAX_CHUNKS]
    return [
        replace(rank, length_s=cut_s, chunks=tuple(chunk for chunk in rank.chunks if chunk.end_s <= cut_s))
        for rank in kept
    ], cut_s


def _scaling(page: PlanPage) -> Iterator[picture.Picture]:
    if len(page.sizes) > 1:
        points = [(size.devices, size.tokens_per_s, size.efficiency(page.sizes[0])) for size in page.sizes]
        yield picture.Picture(
            "scaling", "scaling", "More and fewer nodes: the same batch",
            "Tokens/s and efficiency by the number of devices. Dotted: in proportion to devices.",
            scaling_graphs([("", scaling_panel([(0, "", points)], rate="tokens/s"))]),
        )  # fmt: skip
