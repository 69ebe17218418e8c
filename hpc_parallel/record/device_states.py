"""How busy, full and hot the devices of a run were: from `rank_times.json`, which may hold anything.

If the run is a script, each rank has its own file instead, which may hold anything too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median, median_low

from hpc_parallel.problems import printable
from hpc_parallel.record.metrics_file import size
from hpc_parallel.record.recorded_slow_ranks import DeviceState, TimedSteps
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.typed import read_if_possible

MOST_RANKS = 4096
# Figure -> its title, its text, and which value is the worst.
FIGURES: Mapping[str, tuple[str, Callable[[float], str], Callable[..., tuple[float, int]]]] = {
    "utilisation": ("utilisation", "{:.0%}".format, min),
    "memory_bytes": ("memory", size, max),
    "power_w": ("power", "{:.0f} W".format, max),
    "temperature_c": ("temperature", "{:.0f} °C".format, max),
    "cpu_cores": ("CPU", "{:.1f} cores".format, min),
    "resident_bytes": ("resident memory", size, max),
}


def device_lines(folder: RunFolder) -> list[tuple[str, str]]:
    """Title and text of each figure: the median of all devices, and the worst value with its rank.

    The value of a device is the median of its timed steps. The list is empty if no device was measured.
    """
    samples = TimedSteps.read(folder).samples
    states = _of_script(folder) if samples is None else [state for step in samples for state in step.ranks]
    hosts = {state.rank: state.host for state in states}
    values: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for state in states:
        for key in FIGURES:
            if (value := getattr(state, key)) is not None:
                values[key][state.rank].append(float(value))
    return [(FIGURES[key][0], _line(key, values[key], hosts)) for key in FIGURES if values[key]]


def device_file(folder: RunFolder, *, rank: int) -> Path:
    """The file in which the parent process of a script's rank keeps the figures of the rank's device."""
    return folder.logs / f"rank-{rank}.device.json"


def _of_script(folder: RunFolder) -> list[DeviceState]:
    files = sorted(folder.logs.glob("rank-*.device.json"))[:MOST_RANKS]
    return [state for file in files if (state := read_if_possible(DeviceState, file)) is not None]


def _line(key: str, by_rank: Mapping[int, list[float]], hosts: Mapping[int, str]) -> str:
    _, to_text, worst_of = FIGURES[key]
    medians = {rank: median_low(values) for rank, values in by_rank.items()}
    if len(medians) == 1:
        return to_text(next(iter(medians.values())))
    worst, rank = worst_of((value, rank) for rank, value in medians.items())
    usual = to_text(median(medians.values()))
    return printable(f"median {usual}, worst {to_text(worst)} (rank {rank} on {hosts[rank]})")
