"""What carried the data of each run, which ranks were slow, and how its hosts are connected inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_parallel.record.network import topology_lines, transport_lines
from hpc_parallel.record.slow_ranks import slow_lines
from hpc_parallel.report.gather import Row

MOST_TOPOLOGIES = 6


@dataclass(frozen=True)
class Networks:
    """transports: runs with their lines of (title, text); topologies: different drawings, as text."""

    transports: Sequence[tuple[Row, Sequence[tuple[str, str]]]]
    topologies: Sequence[str]


def networks(rows: Sequence[Row]) -> Networks | None:
    """None if no run has recorded anything."""
    environments = [row.run.environment or {} for row in rows]
    lines = [
        [*transport_lines(environment), *(("slow rank", line) for line in slow_lines(row.run.folder))]
        for row, environment in zip(rows, environments, strict=True)
    ]
    drawings = ["\n".join(topology_lines(environment)) for environment in environments]
    transports = [(row, found) for row, found in zip(rows, lines, strict=True) if found]
    topologies = list(dict.fromkeys(filter(None, drawings)))[:MOST_TOPOLOGIES]
    return Networks(transports, topologies) if transports or topologies else None
