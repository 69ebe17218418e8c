"""The page of a plan, before there is a run: figures, memory, one step, and different numbers of nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hpc_parallel.record.timeline_file import RankTimeline
from hpc_parallel.report.page import fill

if TYPE_CHECKING:
    from hpc_parallel.report.drawing import Plot


class PlannedFigure(Protocol):
    """One figure: its key in JSON, and its label, text and formula for a reader."""

    @property
    def key(self) -> str: ...
    @property
    def label(self) -> str: ...
    @property
    def value(self) -> float | None: ...
    @property
    def text(self) -> str: ...
    @property
    def formula(self) -> str: ...


@dataclass(frozen=True)
class RoleBytes:
    """Devices that hold the same, and the bytes that they hold of each kind."""

    label: str
    kinds: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.kinds.values())


@dataclass(frozen=True)
class ScalingPoint:
    """The plan on a number of nodes. efficiency: tokens/s per device, relative to the fewest nodes."""

    nodes: int
    devices: int
    layout: str
    step_text: str
    tokens_per_s: float
    mfu: float
    efficiency: float


@dataclass(frozen=True)
class PlanPage:
    """What the page shows.

    lines: the text below the title. ranks: the ranks of one step. left_out: why some numbers of nodes are not
    in `sizes`. notes: what the plan assumes.
    """

    title: str
    lines: Sequence[str]
    command: str
    figures: Sequence[PlannedFigure]
    roles: Sequence[RoleBytes]
    device_memory_bytes: float
    ranks: Sequence[RankTimeline]
    sizes: Sequence[ScalingPoint]
    verdict: str
    left_out: Sequence[str]
    notes: Sequence[str]


def render(page: PlanPage, plots: Sequence[Plot]) -> str:
    """The HTML page, self-contained."""
    roles = page.roles
    kinds = [kind for kind in (roles[0].kinds if roles else ()) if any(role.kinds[kind] for role in roles)]
    values: dict[str, Any] = {"title": page.title, "page": page, "plots": plots, "kinds": kinds}
    return fill("plan.html.j2", values)
