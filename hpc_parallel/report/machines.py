"""The machines of runs: what `task=preflight` measured, and the network and devices that each run used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_parallel.record.device_states import device_lines
from hpc_parallel.record.machine_check_table import MeasuredMachine, machine_lines
from hpc_parallel.record.network import topology_lines, transport_lines
from hpc_parallel.record.recorded_slow_ranks import accused_lines
from hpc_parallel.record.typed import read_if_possible
from hpc_parallel.report.gather import Row

MOST_LINES = 40  # of a run
MOST_TOPOLOGIES = 6


def machines(rows: Sequence[Row]) -> list[tuple[Row, list[str]]]:
    """The runs that measured their machines, with the lines of each run."""
    measured = [(row, _lines(row)) for row in rows]
    return [(row, lines) for row, lines in measured if lines]


def _lines(row: Row) -> list[str]:
    measured = read_if_possible(MeasuredMachine, row.run.folder.machine_check)
    lines = machine_lines(measured) if measured is not None else []
    hidden = len(lines) - MOST_LINES
    return lines[:MOST_LINES] + [f"and {hidden} more"] * (hidden > 0)


@dataclass(frozen=True)
class Networks:
    """transports: runs with their lines of (title, text); topologies: different drawings, as text."""

    transports: Sequence[tuple[Row, Sequence[tuple[str, str]]]]
    topologies: Sequence[str]


def networks(rows: Sequence[Row]) -> Networks | None:
    """The networks of the runs; None if no run has recorded anything."""
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
