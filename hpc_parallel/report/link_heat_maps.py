"""The links between hosts that `task=preflight` measured, as a heat map of each run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from matplotlib.figure import Figure

from hpc_parallel.record.machine_check_table import MeasuredMachine, links
from hpc_parallel.record.typed import read_if_possible
from hpc_parallel.report.drawing import NARROW, WIDTH, Plot, is_wide, plot, short
from hpc_parallel.report.figures import number
from hpc_parallel.report.gather import Row

MOST_PLOTS, MOST_HOSTS, MOST_NUMBERS = 6, 128, 12
GIGA = 1e9


def plots(rows: Sequence[Row]) -> Iterator[Plot]:
    """Yields a heat map for each run with links."""
    measured = [(row, rates) for row in rows if (rates := _rates(row))]
    for index, (row, rates) in enumerate(measured[:MOST_PLOTS], start=1):
        yield plot(
            f"links_{index}", "links", f"Links of {row.label}",
            "Bytes per second in each direction between two hosts, both directions at the same time.",
            partial(_figure, rates),
        )  # fmt: skip


def _rates(row: Row) -> dict[tuple[str, str], float]:
    measured = read_if_possible(MeasuredMachine, row.run.folder.machine_check) or MeasuredMachine()
    rates = links(measured)
    hosts = {host for pair in rates for host in pair}
    return {pair: rate for pair, rate in rates.items() if number(rate)} if len(hosts) <= MOST_HOSTS else {}


def _figure(rates: Mapping[tuple[str, str], float]) -> Figure:
    hosts = sorted({host for pair in rates for host in pair})
    table = [[math.nan] * len(hosts) for _ in hosts]
    for (one, other), rate in rates.items():
        a, b = hosts.index(one), hosts.index(other)
        table[a][b] = table[b][a] = rate / GIGA
    width = WIDTH * 0.7 if is_wide() else NARROW
    figure = Figure(figsize=(width, width * 0.86), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(table, cmap="cividis", vmin=0)
    axes.grid(visible=False)
    labels = [short(host) for host in hosts]
    axes.set_xticks(range(len(hosts)), labels=labels, rotation=90)
    axes.set_yticks(range(len(hosts)), labels=labels)
    if len(hosts) <= MOST_NUMBERS:
        middle = max(rates.values()) / GIGA / 2
        for a, row in enumerate(table):
            for b, rate in enumerate(row):
                if not math.isnan(rate):
                    colour = "black" if rate > middle else "white"
                    axes.annotate(f"{rate:.3g}", (b, a), ha="center", va="center", fontsize=9, color=colour)
    figure.colorbar(image, label="GB/s in each direction")
    return figure
