"""Where everything of a run stands: its hosts, their devices, and what each device holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hpc_parallel.config.layout import AXES, PARAMETER_SERVER, Layout, layout_of, processes_per_node, servers
from hpc_parallel.launch.recorded import RecordedRun

if TYPE_CHECKING:
    from rich.console import RenderableType

HOSTS = 8  # that are drawn; the others are alike
WORDS = {"replicate": "replica"}  # an axis whose places have a name of their own


@dataclass(frozen=True)
class Device:
    """`rank`: of the process that drives it; `holds`: `stage` -> `0`, `tensor` -> `1`, ..."""

    rank: int
    name: str | None  # cuda:0; None before the run has started
    holds: dict[str, str]


@dataclass(frozen=True)
class Host:
    node: int
    name: str | None
    devices: tuple[Device, ...]


def ranks(run: RecordedRun) -> int | None:
    """How many the run has; None where its configuration does not tell."""
    try:
        strategy = _strategy(run)
        return int(run.head["nodes"] * processes_per_node(strategy, gpus_per_node=run.head["gpus_per_node"]))
    except (KeyError, TypeError, AttributeError):
        return None


def layout(run: RecordedRun) -> Layout | None:
    """None where the configuration does not tell."""
    try:
        return layout_of(_strategy(run), devices=run.head["nodes"] * run.head["gpus_per_node"])
    except (KeyError, TypeError, AttributeError, ValueError):
        return None


def hosts(run: RecordedRun) -> list[Host]:
    """By node; empty where the configuration does not tell."""
    degrees, count = layout(run), ranks(run)
    if degrees is None or count is None:
        return []
    strategy, nodes, devices = _strategy(run), run.head["nodes"], run.head["gpus_per_node"]
    places = _places(run, ranks=count)
    found = []
    for node in range(nodes):
        held = []
        for device in range(devices):
            place = node * devices + device
            rank = place * count // (nodes * devices)  # one process may drive a node's devices
            # Of a process that drives several, the run tells the first.
            name = places[rank].get("device") if count == nodes * devices else None
            held.append(Device(rank, name, _holds(place - servers(strategy), degrees, strategy)))
        found.append(Host(node, places[node * count // nodes].get("host"), tuple(held)))
    return found


def _strategy(run: RecordedRun) -> Any:
    return SimpleNamespace(**run.head["strategy"])


def _places(run: RecordedRun, *, ranks: int) -> list[dict[str, Any]]:
    """What `environment.json` says of each rank; nothing before the run has started in this layout."""
    known = (run.environment or {}).get("ranks")
    if isinstance(known, list) and len(known) == ranks and all(isinstance(each, dict) for each in known):
        return known
    return [{}] * ranks


def _holds(place: int, degrees: Layout, strategy: Any) -> dict[str, str]:
    """Of the device at a place of the layout; those before the first only serve."""
    if place < 0:
        return {"server": ""}
    from hpc_parallel.config.schedules import schedule_of, stages_of, stages_per_rank  # imports Hydra

    both = strategy.execution == PARAMETER_SERVER and place == 0 and not servers(strategy)
    held = {"server": ""} if both else {}
    for axis, index in degrees.coordinates(place).items():
        if getattr(degrees, axis) == 1:
            continue
        if axis == "pipeline":
            stages = stages_of(
                index, degree=degrees.pipeline, per_rank=stages_per_rank(strategy),
                v_shaped=schedule_of(strategy).v_shaped,
            )  # fmt: skip
            held["stage" if len(stages) == 1 else "stages"] = ", ".join(map(str, stages))
        else:
            held[WORDS.get(axis, axis)] = str(index)
    return {axis: held[axis] for axis in sorted(held, key=_outermost_first)} or {"model": "whole"}


def _outermost_first(word: str) -> int:
    """As the axes are named in a layout; coordinates come innermost first."""
    words = ["server", "stage", "stages", *(WORDS.get(axis, axis) for axis in AXES)]
    return words.index(word)


def draw(found: Sequence[Host]) -> RenderableType:
    """A row a host, a cell a device; of many hosts the first ones."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.ROUNDED, show_lines=True, show_header=False)
    for host in found[:HOSTS]:
        cells = [Text(f"node {host.node}\n{host.name or ''}".strip(), "bold")]
        for device in host.devices:
            holds = [f"{word} {what}".strip() for word, what in device.holds.items()]
            cells.append(
                Text("\n".join([f"rank {device.rank}", *([device.name] if device.name else []), *holds]))
            )
        table.add_row(*cells)
    more = len(found) - HOSTS
    return Group(table, f"and {more} more hosts") if more > 0 else table
