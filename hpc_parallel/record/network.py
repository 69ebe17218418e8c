"""The network of a run as text: what carries its data, and how the parts of its hosts are connected.

Anybody may have written `environment.json`, so each value is checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from hpc_parallel.problems import printable

PAIRS = ("inside a node", "across nodes")
MOST_HOSTS, MOST_PARTS, MOST_SHAPES, MOST_LETTERS = 6, 64, 8, 40


@dataclass(frozen=True)
class Transport:
    """What carries the data: `transport` in `environment.json`. None: unknown, or NCCL is not used."""

    library: str = "NCCL"
    version: str | None = None
    network: str | None = None
    channels: int | None = None
    nvls_channels: int | None = None
    nvls_available: bool | None = None
    rings: bool | None = None
    trees: bool | None = None
    pairs: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # pair -> carrier -> channels
    gpudirect: Mapping[str, str] = field(default_factory=dict)  # pair (in PAIRS) -> state
    problem: str | None = None


def _cell(value: Any) -> str:
    return printable(value[:MOST_LETTERS]) if isinstance(value, str) else ""


@dataclass(frozen=True)
class RecordedPart:
    """A GPU or a network card."""

    name: Annotated[str, _cell] = ""
    numa: int | None = None
    model: Annotated[str, _cell] = ""


@dataclass(frozen=True)
class Topology:
    """Hosts with the same parts, and the connection between each two parts."""

    hosts: tuple[str, ...] = ()
    parts: tuple[RecordedPart, ...] = ()
    links: tuple[tuple[Annotated[str, _cell], ...], ...] = ()


def transport_lines(transport: Transport) -> list[tuple[str, str]]:
    """What carries the data, as titles and texts; empty for runs of one device or of an older version."""
    lines = []
    for pair in PAIRS:
        carriers = transport.pairs.get(pair, {})
        counted = [f"{name} ({count} channels)" for name, count in carriers.items() if count]
        if counted:
            lines.append((pair, ", ".join(map(printable, counted))))
    if lines:
        version = f"{transport.library} {transport.version}" if transport.version else ""
        parts = [version, transport.network or "", "connected so far"]
        lines.insert(0, ("transport", ", ".join(printable(part) for part in parts if part)))
        lines += _built(transport)
    if transport.problem:
        lines.append(("network", printable(transport.problem)))
    return lines


def _built(transport: Transport) -> Iterator[tuple[str, str]]:
    """Yields what NCCL has built, a line for each part that the record has."""
    direct = transport.gpudirect
    if states := [f"{state} {pair}" for pair in PAIRS if (state := direct.get(pair))]:
        yield "GPUDirect RDMA", printable(", ".join(states))
    if transport.channels:
        yield "channels", str(transport.channels)
    for part, connected in (("rings", transport.rings), ("trees", transport.trees)):
        if connected is not None:
            yield part, "connected" if connected else "not connected so far"
    if transport.nvls_channels:
        yield "NVLS", f"{transport.nvls_channels} channels"
    elif transport.nvls_available is not None:
        yield "NVLS", "available, not used" if transport.nvls_available else "not available"


def topology_lines(shapes: tuple[Topology, ...]) -> list[str]:
    """The connections inside the hosts, as text; hosts that are alike share a table."""
    lines: list[str] = []
    for shape in shapes:
        if drawn := list(_drawn(shape)):
            more = f" and {len(shape.hosts) - MOST_HOSTS} more" * (len(shape.hosts) > MOST_HOSTS)
            lines += ["", printable(", ".join(shape.hosts[:MOST_HOSTS]) + more), *drawn]
    return lines[1:]


def _drawn(shape: Topology) -> Iterator[str]:
    """Yields the lines of one table; none if it is malformed."""
    parts, rows = shape.parts, shape.links
    if not 1 < len(parts) <= MOST_PARTS or [len(row) for row in rows] != [len(parts)] * len(parts):
        return
    cells = [["", *(part.name for part in parts), "NUMA", "model"]]
    for part, row in zip(parts, rows, strict=True):
        cells.append([part.name, *row, "" if part.numa is None else str(part.numa), part.model])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        yield "  ".join(map(str.ljust, line, widths)).rstrip()
