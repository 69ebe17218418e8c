"""What carried the data of each run, how its devices fared, which were slow, and how hosts are connected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_parallel.record.device_states import device_lines
from hpc_parallel.record.network import topology_lines, transport_lines
from hpc_parallel.record.recorded_slow_ranks import accused_lines
from hpc_parallel.report.gather import Row

MOST_TOPOLOGIES = 6


@dataclass(frozen=True)
class Networks:
    """transports: runs with their lines of (title, text); topologies: different drawings, as text."""

    transports: Sequence[tuple[Row, Sequence[tuple[str, str]]]]
    topologies: Sequence[str]


def networks(rows: Sequence[Row]) -> Networks | None:
    """None if no run has recorded anything."""
    lines = [
        [
            *transport_lines(row.run.ran_on.transport),
            *((f"devices: {title}", line) for title, line in device_lines(row.run.folder)),
            *(("slow rank", line) for line in accused_lines(row.run.folder)),
        ]
        for row in rows
    ]
    drawings = ["\n".join(topology_lines(row.run.ran_on.topology)) for row in rows]
    transports = [(row, row_lines) for row, row_lines in zip(rows, lines, strict=True) if row_lines]
    topologies = list(dict.fromkeys(filter(None, drawings)))[:MOST_TOPOLOGIES]
    return Networks(transports, topologies) if transports or topologies else None
