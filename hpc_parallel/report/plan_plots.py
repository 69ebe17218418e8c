"""The plots of a plan: memory of each role, one step, and tokens/s over numbers of nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from hpc_parallel.record.timeline_file import RankTimeline
from hpc_parallel.report.drawing import (
    BLUE,
    GREEN,
    MAX_BARS,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    Plot,
    add_legend,
    add_patch_legend,
    bar_style,
    canvas,
    first_of,
    ink,
    logarithmic,
    name_bars,
    plot,
    style,
)
from hpc_parallel.report.plan_html import PlanPage, RoleBytes, ScalingPoint
from hpc_parallel.report.scaling_curves import IDEAL, count_devices
from hpc_parallel.report.timeline_drawing import timeline_figure

GIB = 2**30
PARTS = {  # what a bar shows -> its kinds, colour, hatch
    "parameters": (("parameters",), BLUE, ""),
    "gradients": (("gradients",), ORANGE, "//"),
    "optimizer state": (("optimizer",), GREEN, ".."),
    "activations": (("activations", "recomputation"), PURPLE, "xx"),
    "logits and loss": (("logits and loss",), SKY, "\\\\"),
    "weights in use": (("cast weights", "gathered weights"), VERMILION, "++"),
    "messages": (
        ("gradients in messages", "gradient of the embedding", "buffers between stages"), "#F0E442", "oo",
    ),
    "workspaces, context, slack": (("workspaces", "device context", "allocator slack"), "#999999", "--"),
}  # fmt: skip
MAX_RANKS, MAX_CHUNKS = 16, 800  # in the drawing of a step: more would be too narrow to be seen


def draw(page: PlanPage) -> list[Plot]:
    """All plots for which the plan has figures."""
    return [*_memory(page), *_step(page), *_scaling(page)]


def _memory(page: PlanPage) -> Iterator[Plot]:
    if page.roles:
        yield plot(
            "memory", "memory", "Memory of a device at its fullest",
            "A bar for the devices of each role, and the memory of a device as a line."
            + first_of(MAX_BARS, len(page.roles)),
            partial(_bars, page.roles[:MAX_BARS], page.device_memory_bytes),
        )  # fmt: skip


def _bars(roles: Sequence[RoleBytes], room: float) -> Figure:
    figure, ((axes,),) = canvas(1.1 + 0.36 * len(roles))
    drawn = [name for name, (kinds, _, _) in PARTS.items() if any(r.kinds[k] for r in roles for k in kinds)]
    for y, role in enumerate(roles):
        left = 0.0
        for name in drawn:
            kinds, colour, hatch = PARTS[name]
            width = sum(role.kinds[kind] for kind in kinds) / GIB
            axes.barh(y, width, left=left, height=0.7, **bar_style(colour, hatch))
            left += width
        axes.annotate(
            f"{left:.1f}", (left, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9
        )
    axes.axvline(room / GIB, color=ink(), linewidth=1.5, linestyle="--")
    axes.set_xlim(0, 1.12 * max(room / GIB, *(role.total / GIB for role in roles)))
    axes.set_xlabel("memory, GiB (dashed: of a device)")
    name_bars(axes, [role.label for role in roles])
    add_patch_legend(figure, [PARTS[name][1:] for name in drawn], drawn)
    return figure


def _step(page: PlanPage) -> Iterator[Plot]:
    ranks, cut_s = drawable(page.ranks)
    caption = (
        "What the stages of each rank of the pipeline do, as simulated. Numbers are microbatches "
        "(stage:microbatch if a rank has several stages), where there is room. Blank is idle."
    )
    if len(ranks) < len(page.ranks):
        caption += f" {len(ranks)} of {len(page.ranks)} ranks."
    if cut_s is not None:
        caption += " Only the beginning of the step: it has more actions than a picture shows."
    yield plot("step", "timeline", "One step, planned", caption, partial(timeline_figure, ranks))


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


def _scaling(page: PlanPage) -> Iterator[Plot]:
    if len(page.sizes) > 1:
        yield plot(
            "scaling", "scaling", "More and fewer nodes: the same batch",
            "Tokens/s and efficiency by the number of devices. Dotted: in proportion to devices.",
            partial(_curve, page.sizes),
        )  # fmt: skip


def _curve(sizes: Sequence[ScalingPoint]) -> Figure:
    figure, ((rates, efficiencies),) = canvas(3.4, columns=2)
    devices, first = [size.devices for size in sizes], sizes[0]
    ideal = [first.tokens_per_s * count / first.devices for count in devices]
    logarithmic(rates.yaxis, [*ideal, *(size.tokens_per_s for size in sizes)], name="tokens/s")
    rates.plot(devices, [size.tokens_per_s for size in sizes], **style(0))
    dotted: dict[str, Any] = {**IDEAL, "color": ink()}
    (line,) = rates.plot(devices, ideal, **dotted)
    efficiencies.plot(devices, [100 * size.efficiency for size in sizes], **style(0))
    efficiencies.axhline(100, **dotted)
    efficiencies.set_ylim(bottom=0)
    efficiencies.set_ylabel(f"efficiency, % of {first.devices} device{'s' * (first.devices > 1)}")
    for axes in (rates, efficiencies):
        count_devices(axes, devices)
    add_legend(figure, [line], ["ideal"])
    return figure
