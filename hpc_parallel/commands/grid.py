"""The grid of a run: its hosts and devices, what each device holds, and what it sends to which others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hpc_parallel.config.script import TASK as SCRIPT
from hpc_parallel.layout.axes import AXES, with_all_axes
from hpc_parallel.layout.layout import (
    DATAPARALLEL,
    EXECUTIONS,
    PARAMETER_SERVER,
    Layout,
    layout_of,
    processes_per_node,
    servers,
)
from hpc_parallel.problems import printable
from hpc_parallel.record.environment_file import Place
from hpc_parallel.record.recorded import RecordedRun
from hpc_parallel.record.values import integer, table
from hpc_parallel.terminal import cell

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hpc_parallel.layout.exchanges import Exchange
    from hpc_parallel.layout.holdings import Setup

HOSTS, DEVICES = 8, 64  # drawn at most for a run and for a host; the others look the same
MOST_STAGES = 1024  # of a rank
MOST_DEVICES = 2**16  # of a run that is described
MOST_ROWS = 12  # of the table of holdings
MOST_GROUPS = 4  # groups of ranks in one line
MOST_LISTED = 64  # groups of ranks in --json
COVERED = "train"  # the task whose exchanges are known
WORDS = {"replicate": "replica"}  # axis -> the name of a position on it, if this differs from the axis


@dataclass(frozen=True)
class GridDevice:
    """One device. `rank`: the rank that drives it. `holds`: `stage` -> `0`, `tensor` -> `1`, ..."""

    rank: int
    name: str | None  # cuda:0; None before the run has started
    holds: dict[str, str]


@dataclass(frozen=True)
class GridHost:
    """A node with its devices."""

    node: int
    name: str | None
    devices: tuple[GridDevice, ...]


def world_size(run: RecordedRun) -> int | None:
    """The number of ranks; None if the configuration does not say it."""
    nodes, devices, strategy = run.nodes, run.gpus_per_node, _strategy(run)
    if nodes is None or devices is None or strategy is None or min(nodes, devices) < 1:
        return None
    return nodes * processes_per_node(strategy, gpus_per_node=devices)


def layout(run: RecordedRun) -> Layout | None:
    """The layout; None if the configuration does not say it or contradicts itself."""
    nodes, devices, strategy = run.nodes, run.gpus_per_node, _strategy(run)
    if nodes is None or devices is None or strategy is None:
        return None
    try:
        return layout_of(strategy, devices=nodes * devices)
    except ValueError:
        return None


def hosts(run: RecordedRun) -> list[GridHost]:
    """The hosts in the order of the nodes; empty if the configuration has no layout or too many devices."""
    degrees, count, strategy = layout(run), world_size(run), _strategy(run)
    nodes, devices = run.nodes or 0, run.gpus_per_node or 0
    if degrees is None or count is None or min(nodes, devices) < 1 or nodes * devices > MOST_DEVICES:
        return []
    places = run.ran_on.places
    if len(places) != count:  # before the run has started in this layout
        places = [Place()] * count
    rows = []
    for node in range(nodes):
        held = []
        for device in range(devices):
            place = node * devices + device
            rank = place * count // (nodes * devices)  # one process may drive a node's devices
            # If a process drives several devices, the run records only the first.
            name = places[rank].device if count == nodes * devices else None
            holds = {} if run.task == SCRIPT else _holds(place - servers(strategy), degrees, strategy)
            held.append(GridDevice(rank, name, holds))
        rows.append(GridHost(node, places[node * count // nodes].host, tuple(held)))
    return rows


def _strategy(run: RecordedRun) -> Any:
    """The values of `head["strategy"]`; None if one of them is missing or not legal."""
    values = with_all_axes(table(run.head.get("strategy")))
    degrees = [integer(values.get(axis)) for axis in AXES]
    stages = values.get("stages_per_rank")
    fits = (
        values.get("execution") in EXECUTIONS
        and isinstance(values.get("dedicated_server"), bool)
        and isinstance(values.get("schedule"), str)
        and all(degree is not None and (degree == -1 or degree > 0) for degree in degrees)
        and (stages is None or 0 < (integer(stages) or 0) <= MOST_STAGES)
    )
    return SimpleNamespace(**values) if fits else None


def _holds(place: int, degrees: Layout, strategy: Any) -> dict[str, str]:
    """What the device at a position of the layout holds; a negative position is a parameter server."""
    if place < 0:
        return {"server": ""}
    from hpc_parallel.layout.schedules import schedule_of, stages_of, stages_per_rank  # imports Hydra

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
    order = ["server", "stage", "stages", *(WORDS.get(axis, axis) for axis in AXES)]  # outermost first
    return {axis: held[axis] for axis in sorted(held, key=order.index)} or {"model": "whole"}


def draw(hosts: Sequence[GridHost]) -> RenderableType:
    """Draw one row for each host and one cell for each device; at most HOSTS rows."""
    from rich import box
    from rich.console import Group
    from rich.table import Table

    drawn = Table(box=box.ROUNDED, show_lines=True, show_header=False)
    for host in hosts[:HOSTS]:
        cells = [cell(f"node {host.node}\n{printable(host.name or '')}".strip(), "bold")]
        for device in host.devices[:DEVICES]:
            holds = [f"{word} {what}".strip() for word, what in device.holds.items()]
            name = [printable(device.name)] if device.name else []
            cells.append(cell("\n".join([f"rank {device.rank}", *name, *holds])))
        if len(host.devices) > DEVICES:
            cells.append(cell(f"and {len(host.devices) - DEVICES} more"))
        drawn.add_row(*cells)
    more = len(hosts) - HOSTS
    return Group(drawn, f"and {more} more hosts") if more > 0 else drawn


def setup_of(run: RecordedRun) -> tuple[Setup | None, str | None]:
    """The setup of a training run, or why its exchanges are not known; for other tasks, both are None."""
    if run.task != COVERED or layout(run) is None or not hosts(run):
        return None, None
    devices = (run.nodes or 0) * (run.gpus_per_node or 0)
    config = {**(run.config or {}), "strategy": run.head.get("strategy")}  # which `layout` checked
    places = run.ran_on.places
    kind = places[0].device_kind if places else None
    setup = recorded_setup(config, devices=devices, device=kind)
    if setup is None:
        return None, "the configuration is damaged"
    return (None, setup.uncovered) if setup.uncovered else (setup, None)


def recorded_setup(config: Mapping[str, Any], *, devices: int, device: str | None = None) -> Setup | None:
    """The setup of a recorded configuration, whose values may be of any type; None without a strategy.

    device: the kind of device that the ranks recorded, if the run has started.

    `devices` must be the product that `Layout.resolve` accepts for this configuration.
    """
    from hpc_parallel.config.typed_config import strategy_of  # imports Hydra
    from hpc_parallel.layout.holdings import Setup, model_facts

    strategy = strategy_of(config.get("strategy"))
    if strategy is None:
        return None
    return Setup(
        strategy,
        layout_of(strategy, devices=devices),
        model=model_facts(config.get("model")),
        gpus={"cpu": False, "cuda": True}.get(device or str(config.get("device"))),
    )


def as_values(run: RecordedRun) -> dict[str, Any]:
    """`holdings` and `exchanges` for --json; null where they are not known. Long lists of groups are cut."""
    setup, _ = setup_of(run)
    if setup is None:
        return {"holdings": None, "exchanges": None}
    from hpc_parallel.layout.exchanges import exchanges
    from hpc_parallel.layout.holdings import holdings

    return {
        "holdings": [
            {
                "devices": row.devices, "role": row.role, "keeps": row.keeps, "model": row.model_text,
                "samples": row.samples_text,
            }
            for row in holdings(setup, most=MOST_ROWS)
        ],
        "exchanges": [
            {
                "phase": exchange.phase.value, "what": exchange.what, "how": exchange.how,
                "often": exchange.often.value, "over": exchange.over, "only_if": exchange.only_if,
                "groups": exchange.groups[:MOST_LISTED], "group_count": len(exchange.groups),
            }
            for exchange in exchanges(setup)
        ],
    }  # fmt: skip


def holding_rows(setup: Setup) -> list[tuple[str, ...]]:
    """Devices, what they hold, and their samples; at most MOST_ROWS."""
    from hpc_parallel.layout.holdings import holdings

    noun = "device" if setup.strategy.execution == DATAPARALLEL else "rank"
    rows: list[tuple[str, ...]] = []
    for row in holdings(setup, most=MOST_ROWS):
        first, last = row.devices
        name = f"{noun} {first}" if first == last else f"{noun}s {first}-{last}"
        rows.append((name, row.role, row.model_text, row.samples_text))
    return rows


def exchange_rows(setup: Setup) -> list[tuple[str, ...]]:
    """What is sent, how, how often and among whom. Exchanges that differ only in their phase share a row."""
    from hpc_parallel.layout.exchanges import exchanges

    rows: dict[tuple[str, ...], list[str]] = {}
    for exchange in exchanges(setup):
        what = exchange.what + (f" ({exchange.only_if})" if exchange.only_if else "")
        key = (what, exchange.how, exchange.often.value, groups_text(exchange))
        rows.setdefault(key, []).append(exchange.phase.value)
    return [(", ".join(phases), *key) for key, phases in rows.items()]


def groups_text(exchange: Exchange) -> str:
    """The ranks of each group, or each sender and its receiver: `ranks 0-3; 4-7`, `0 -> 1; 1 -> 2`."""
    from hpc_parallel.layout.exchanges import DIRECTED
    from hpc_parallel.layout.holdings import ranges

    groups: Sequence[Sequence[int]] = exchange.groups
    directed = exchange.how in DIRECTED
    texts = [" -> ".join(map(str, g)) if directed else ranges(g) for g in groups[:MOST_GROUPS]]
    more = len(groups) - MOST_GROUPS
    return "ranks " * (not directed) + "; ".join(texts) + (f"; and {more} more" if more > 0 else "")
