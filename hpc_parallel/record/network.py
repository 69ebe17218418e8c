"""The network of a run as text: what carries its data, and how the parts of its hosts are connected.

`environment.json` may come from anybody, so that each value is checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpc_parallel.problems import printable
from hpc_parallel.record.values import integer, table, text

PAIRS = ("inside a node", "across nodes")
MOST_HOSTS, MOST_PARTS, MOST_SHAPES = 6, 64, 8


def transport_lines(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What carries the data, as titles and texts; empty for runs of one device or of an older version."""
    transport = table(environment.get("transport"))
    lines = []
    pairs = table(transport.get("pairs"))
    for pair in PAIRS:
        carriers = table(pairs.get(pair))
        counted = [f"{name} ({count} channels)" for name, count in carriers.items() if integer(count)]
        if counted:
            lines.append((pair, ", ".join(map(printable, counted))))
    if lines:
        version, network = text(transport.get("version")), text(transport.get("network"))
        library = text(transport.get("library")) or "NCCL"
        parts = [f"{library} {version}" if version else "", network or "", "connected so far"]
        lines.insert(0, ("transport", ", ".join(printable(part) for part in parts if part)))
        lines += _built(transport)
    if problem := text(transport.get("problem")):
        lines.append(("network", printable(problem)))
    return lines


def _built(transport: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields what NCCL has built, a line for each part that the record has."""
    direct = table(transport.get("gpudirect"))
    if states := [f"{state} {pair}" for pair in PAIRS if (state := text(direct.get(pair)))]:
        yield "GPUDirect RDMA", printable(", ".join(states))
    if channels := integer(transport.get("channels")):
        yield "channels", str(channels)
    for part in ("rings", "trees"):
        if isinstance(connected := transport.get(part), bool):
            yield part, "connected" if connected else "not connected so far"
    available = transport.get("nvls_available")
    if channels := integer(transport.get("nvls_channels")):
        yield "NVLS", f"{channels} channels"
    elif isinstance(available, bool):
        yield "NVLS", "available, not used" if available else "not available"


def topology_lines(environment: Mapping[str, Any]) -> list[str]:
    """The connections inside the hosts, as text; hosts that are alike share a table."""
    lines: list[str] = []
    shapes = environment.get("topology")
    for shape in shapes[:MOST_SHAPES] if isinstance(shapes, list) else []:
        if drawn := list(_drawn(table(shape))):
            hosts = [name for name in table(shape).get("hosts", []) if isinstance(name, str)]
            more = f" and {len(hosts) - MOST_HOSTS} more" * (len(hosts) > MOST_HOSTS)
            lines += ["", printable(", ".join(hosts[:MOST_HOSTS]) + more), *drawn]
    return lines[1:]


def _drawn(shape: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of one table; none if it is malformed."""
    parts, links = shape.get("parts"), shape.get("links")
    if not isinstance(parts, list) or not isinstance(links, list) or not 1 < len(parts) <= MOST_PARTS:
        return
    names = [_text(table(part).get("name")) for part in parts]
    rows = [row if isinstance(row, list) else [] for row in links]
    if len(rows) != len(parts) or any(len(row) != len(parts) for row in rows):
        return
    cells = [["", *names, "NUMA", "model"]]
    for name, part, row in zip(names, map(table, parts), rows, strict=True):
        numa = integer(part.get("numa"))
        cells.append([name, *map(_text, row), "" if numa is None else str(numa), _text(part.get("model"))])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        yield "  ".join(map(str.ljust, line, widths)).rstrip()


def _text(value: Any) -> str:
    return printable(value[:40]) if isinstance(value, str) else ""
