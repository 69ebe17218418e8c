"""The network of a run as text: what carries its data, and how the parts of its hosts are connected.

`environment.json` may come from anybody, so that each value is checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpc_parallel.problems import printable
from hpc_parallel.record.values import integer, table, text

MOST_HOSTS, MOST_PARTS, MOST_SHAPES = 6, 64, 8


def transport_lines(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What carries the data, as titles and texts; empty for runs of one device or of an older version."""
    found = table(environment.get("transport"))
    lines = []
    pairs = table(found.get("pairs"))
    for pair in ("inside a node", "across nodes"):
        carriers = table(pairs.get(pair))
        counted = [f"{name} ({count} channels)" for name, count in carriers.items() if integer(count)]
        if counted:
            lines.append((pair, ", ".join(map(printable, counted))))
    if lines:
        version, network = text(found.get("version")), text(found.get("network"))
        nvls = integer(found.get("nvls_channels"))
        parts = [
            f"NCCL {version}" if version else "",
            network or "",
            f"NVLS on {nvls} channels" if nvls else "",
        ]
        lines.insert(0, ("transport", ", ".join(printable(part) for part in parts if part)))
    if problem := text(found.get("problem")):
        lines.append(("network", printable(problem)))
    return lines


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
