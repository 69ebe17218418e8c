"""The machines of runs: what `task=preflight` measured, and the network and devices that each run used."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpc_parallel.record.recorded_preflight import MeasuredMachine, links, machine_lines
from hpc_parallel.record.typed import read_if_possible
from hpc_parallel.report.figures import number
from hpc_parallel.report.gather import Row
from hpc_parallel.report.labels import short
from hpc_parallel.report.picture import HeatMap, Picture
from hpc_parallel.report.run_lines import (
    accused_lines,
    device_lines,
    energy_lines,
    topology_lines,
    transport_lines,
)

MOST_LINES = 40  # of a run
MOST_TOPOLOGIES, MOST_PLOTS, MOST_HOSTS = 6, 6, 128
GIGA = 1e9


def machines(rows: Sequence[Row]) -> list[tuple[Row, list[str]]]:
    """The runs that measured their machines, with the lines of each run."""
    measured = [(row, _lines(row)) for row in rows]
    return [(row, lines) for row, lines in measured if lines]


def _lines(row: Row) -> list[str]:
    measured = read_if_possible(MeasuredMachine, row.run.folder.machine_check)
    lines = machine_lines(measured) if measured is not None else []
    hidden = len(lines) - MOST_LINES
    return lines[:MOST_LINES] + [f"and {hidden} more"] * (hidden > 0)


def pictures(rows: Sequence[Row]) -> Iterator[Picture]:
    """Yields a heat map of the links between hosts for each run that measured them."""
    maps = [(row, links_map) for row in rows if (links_map := _links_map(row)) is not None]
    for index, (row, links_map) in enumerate(maps[:MOST_PLOTS], start=1):
        yield Picture(
            f"links_{index}", "links", f"Links of {row.label}",
            "Bytes per second in each direction between two hosts, both directions at the same time.",
            links_map,
        )  # fmt: skip


def _links_map(row: Row) -> HeatMap | None:
    measured = read_if_possible(MeasuredMachine, row.run.folder.machine_check) or MeasuredMachine()
    of_pairs = links(measured)
    rates = {pair: rate for pair, rate in of_pairs.items() if number(rate)}
    if not rates or len({host for pair in of_pairs for host in pair}) > MOST_HOSTS:
        return None
    hosts = sorted({host for pair in rates for host in pair})
    table = [[math.nan] * len(hosts) for _ in hosts]
    for (one, other), rate in rates.items():
        a, b = hosts.index(one), hosts.index(other)
        table[a][b] = table[b][a] = rate / GIGA
    return HeatMap([short(host) for host in hosts], table, "GB/s in each direction")


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
            *energy_lines(row.run.totals.energy),
            *(("slow rank", line) for line in accused_lines(row.run.folder)),
        ]
        for row in rows
    ]
    drawings = ["\n".join(topology_lines(row.run.ran_on.topology)) for row in rows]
    transports = [(row, row_lines) for row, row_lines in zip(rows, lines, strict=True) if row_lines]
    topologies = list(dict.fromkeys(filter(None, drawings)))[:MOST_TOPOLOGIES]
    return Networks(transports, topologies) if transports or topologies else None
