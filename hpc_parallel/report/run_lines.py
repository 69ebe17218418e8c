"""Lines for people about the machine of a run: its network, hosts and devices, and its slow ranks.

Anybody may have written the files of the run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median, median_low

from hpc_parallel.problems import printable
from hpc_parallel.record.environment_file import PAIRS, Topology, Transport
from hpc_parallel.record.metrics_file import aligned, duration, figure, size
from hpc_parallel.record.recorded_preflight import Preflight, difference_table
from hpc_parallel.record.recorded_slow_ranks import MOST_SLOW, TimedSteps, states_of_script
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.time_use import CAUSES
from hpc_parallel.slurm.records import consumed_joules

MOST_HOSTS, MOST_PARTS = 6, 64  # of a topology
# Figure -> its title, its text, and which value is the worst.
FIGURES: Mapping[str, tuple[str, Callable[[float], str], Callable[..., tuple[float, int]]]] = {
    "utilisation": ("utilisation", "{:.0%}".format, min),
    "memory_bytes": ("memory", size, max),
    "power_w": ("power", "{:.0f} W".format, max),
    "temperature_c": ("temperature", "{:.0f} °C".format, max),
    "cpu_cores": ("CPU", "{:.1f} cores".format, min),
    "resident_bytes": ("resident memory", size, max),
}


def time_lines(use: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """Where the time of a run went: the cause, how long, and its share; without causes that took no time."""
    total_s = sum(use.get(cause, 0.0) for cause in CAUSES)
    return [
        (text, duration(use[cause]), f"{use[cause] / total_s:.1%}")
        for cause, text in CAUSES.items()
        if use.get(cause, 0.0) >= 0.5
    ]


def energy_lines(energy: Mapping[str, float], jobs: Sequence[str] = ()) -> list[tuple[str, str]]:
    """What the GPUs have used (`time_use.energy_use`), and what Slurm accounts for the jobs."""
    lines = []
    if (gpu_kwh := energy.get("gpu_kwh")) is not None:
        counted, all_gpus = energy.get("gpus", 0), energy.get("of_gpus", 0)
        part = f", of {counted:.0f} of {all_gpus:.0f} GPUs: the others have no counter" * (counted < all_gpus)
        lines.append(("energy of the GPUs", f"{figure(gpu_kwh, digits=3)} kWh{part}"))
    if jobs and (joules := consumed_joules(jobs)) is not None:
        lines.append(("energy by Slurm", f"{figure(joules / 3.6e6, digits=3)} kWh"))
    return lines


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
    yield from aligned(cells, right=())


def device_lines(folder: RunFolder) -> list[tuple[str, str]]:
    """Title and text of each figure: the median of all devices, and the worst value with its rank.

    The value of a device is the median of its timed steps. The list is empty if no device was measured.
    """
    timed = TimedSteps.read(folder).samples
    states = states_of_script(folder) if timed is None else [state for step in timed for state in step.ranks]
    hosts = {state.rank: state.host for state in states}
    values: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for state in states:
        for key in FIGURES:
            if (value := getattr(state, key)) is not None:
                values[key][state.rank].append(float(value))
    return [(FIGURES[key][0], _device_line(key, values[key], hosts)) for key in FIGURES if values[key]]


def _device_line(key: str, by_rank: Mapping[int, list[float]], hosts: Mapping[int, str]) -> str:
    _, to_text, worst_of = FIGURES[key]
    medians = {rank: median_low(values) for rank, values in by_rank.items()}
    if len(medians) == 1:
        return to_text(next(iter(medians.values())))
    worst, rank = worst_of((value, rank) for rank, value in medians.items())
    usual = to_text(median(medians.values()))
    return printable(f"median {usual}, worst {to_text(worst)} (rank {rank} on {hosts[rank]})")


def finding_lines(folder: RunFolder) -> list[tuple[str, str]]:
    """Each host and its problem; empty if there is no problem or the file can't be read."""
    findings = Preflight.read(folder).findings
    return [
        (printable(finding.host), printable(finding.what))
        for finding in findings
        if finding.host and finding.what
    ]


def difference_lines(folder: RunFolder) -> list[str]:
    """The table of versions that differ between the hosts; empty if none does."""
    return difference_table(Preflight.read(folder).differences)


def slow_lines(folder: RunFolder) -> list[str]:
    """One line for each rank that was slow when it was last timed, the slowest first."""
    return [printable(rank.line) for rank in TimedSteps.read(folder).slow if rank.line]


def accused_lines(folder: RunFolder) -> list[str]:
    """One line for each rank that was ever slow, with the steps."""
    return [
        printable(f"{rank.line}, from step {rank.first_step} to {rank.last_step}")
        for rank in (TimedSteps.read(folder).accused or ())[:MOST_SLOW]
    ]
