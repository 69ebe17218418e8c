"""`task=calibrate`: measure what a plan needs of devices and links, and write a file of `hardware/`."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
import torch.distributed as dist

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.site_schema import MachineConfig
from hpc_parallel.config.task_schema import CalibrateConfig, CollectivesConfig
from hpc_parallel.measure import collectives
from hpc_parallel.measure.collective_cases import Group
from hpc_parallel.measure.collectives import Bench, largest_size, measure_cell, named_groups
from hpc_parallel.measure.collectives_plan import ROW_S, CollectivesPlan, Measure
from hpc_parallel.measure.device_probes import probes
from hpc_parallel.measure.machine_profile import machine_profile
from hpc_parallel.measure.storage_rates import StorageRow, gigabytes
from hpc_parallel.planning.collective_times import ACROSS, INSIDE, with_measured_links
from hpc_parallel.planning.device_fit import PRODUCT, DeviceRow, Machine, device_hardware, rate
from hpc_parallel.planning.hardware import MEASURED_BY, Hardware, hardware_text, named_hardware
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_text
from hpc_parallel.record.task_files import CalibrationFile
from hpc_parallel.strategies.exchange import all_gather, all_gather_numbers
from hpc_parallel.training.writers import FileWriter
from hpc_parallel.worker.session import TaskContext, complete, note_stop
from hpc_parallel.worker.stop import StopFlag
from hpc_parallel.worker.time_budget import TimeBudget, advice

DEVICES_SHARE = 0.5  # the devices' share of the time; the links have the rest
LINKS = CollectivesConfig(
    operations=["all_reduce", "send_recv"], dtypes=["float32"], min_bytes=1024, factor=16
)
MOST_LINK_BYTES = {"cuda": 2**28, "cpu": 2**24}
BASES = {"cpu": "cpu", "cuda": "h100_sxm_node8_3200gbit"}  # for the values that are not measured here
LEAST_SPREAD = 1e-3
WORLD = "world"  # the group of all ranks
SOURCES = {
    "device.peak_flops": "the fastest product of each type, not a data sheet",
    "device.memory_bytes_per_s": "elementwise work on the largest array",
    "products": "peak_share and depth: fitted to products by size",
    "traffic": "kernel_s, elementwise, optimizer_bytes: fitted to launches, blocks and updates",
    "host": "forward_s, backward_s, microbatch_s, step_s: fitted to blocks and updates",
    "storage": "files of the run folder; null: not measured",
    "network.spread": "of the devices' speeds",
    "shared_cores": "all devices are processes of one machine",
}


def calibrate(context: TaskContext) -> None:
    """Measure on all ranks of the default process group.

    Rank 0 writes a line of `metrics.jsonl` as soon as a row is measured. At the end it writes `hardware.yaml`
    and `calibration.json`, then `summary.json`. After a signal it writes `stopped.json`, and no profile.
    """
    config, folder, device = context.config, context.folder, context.device
    assert isinstance(config.task, CalibrateConfig)
    context.begin()
    budget = TimeBudget(config.task.seconds)
    devices = DeviceRows(device, turns=turns_of(config, context.environment, device=device))
    groups = link_groups(named_groups(config, device=device))
    most_bytes = min(MOST_LINK_BYTES[device.type], largest_size(LINKS, device=device))
    storage = StorageRow(folder.path, device=device)
    links = CollectivesPlan.of(LINKS, groups=groups, most_bytes=most_bytes)
    writer = FileWriter(folder, steps=0)
    done = 0
    with StopFlag(step=0, period_s=0.0) as stop:
        measure = partial(measure_cell, device=device, groups=groups)
        for line in _lines(devices, storage, links, budget, measure=measure):
            done += 1
            if dist.get_rank() == 0:
                writer.write({**line, "step": done, "time": datetime.now(UTC).isoformat()})
            if (signalled := stop.after(done)) is not None:
                about = {"kept": f"{done} rows, and no profile"}
                note_stop(folder, [], signalled=signalled, about=about)
                return
        spread = speed_spread(devices.rows, device=device)
        if dist.get_rank() == 0:
            measured = HardwareMeasurement(devices, storage, links, spread)
            write_profile(folder, config=config, measured=measured)
        complete(context)
    context.print_results()


def _lines(
    devices: DeviceRows, storage: StorageRow, links: CollectivesPlan, budget: TimeBudget, *, measure: Measure
) -> Iterator[dict[str, Any]]:
    """Measure everything; yields the line of each row."""
    total = len(devices.probes) + 1 + len(links.cells)
    for row in devices.measure(budget):
        yield {"steps": total, "measured": cells(row), "time_left_s": _left_s(budget), **vars(row)}
    for texts in storage.measure(budget):
        yield {"steps": total, "measured": texts, "time_left_s": _left_s(budget), "kind": "storage"}
    if links.cells:
        for _ in links.measure(measure, budget):
            yield {**links.metrics_line(budget), "steps": total}


def _left_s(budget: TimeBudget) -> float:
    return max(0.0, budget.seconds - budget.used_s)


class DeviceRows:
    """The rows of the devices. All devices measure at the same time, and the slowest counts.

    turns: the result of `turns_of`. A row has the time of a device that has a core to itself.
    """

    def __init__(self, device: torch.device, *, turns: tuple[float, int | None]) -> None:
        self.device, (self.turns, self.shared_cores) = device, turns
        self.probes = list(probes(device))
        self.rows: list[DeviceRow] = []
        self.left_out: str | None = None

    def measure(self, budget: TimeBudget) -> Iterator[DeviceRow]:
        """Yields each row when it is measured. The smallest row of each kind is always measured."""
        times: dict[tuple[str, int], float] = {}
        measured: set[tuple[str, str]] = set()
        skipped = 0
        for number, probe in enumerate(self.probes):
            left_s = DEVICES_SHARE * budget.seconds - budget.seconds + budget.left_s()
            if left_s < 0 and (probe.kind, probe.precision) in measured:
                skipped += 1
                continue
            seconds = min(ROW_S, max(0.0, left_s) / (len(self.probes) - number) / 2)
            time_s = Bench(device=self.device, seconds=seconds).time(probe.prepare()).time_s / self.turns
            # Without the parts that other rows measure. At least a tenth, because noise may make it smaller.
            alone_s = max(time_s - sum(times[kind, probe.size] for kind in probe.less), time_s / 10)
            times[probe.kind, probe.size] = alone_s
            measured.add((probe.kind, probe.precision))
            self.rows.append(DeviceRow(probe.kind, probe.precision, probe.size, alone_s, probe.tokens))
            yield self.rows[-1]
        if skipped:
            reason = advice(budget, needed_s=budget.used_s * skipped / max(1, len(self.rows)))
            self.left_out = f"left out: {skipped} of {len(self.probes)} rows of devices: {reason}"


def link_groups(groups: Mapping[str, Group]) -> dict[str, Group]:
    """The groups inside a node and across nodes. If there are none, the group of all ranks."""
    both = {name: groups[name] for name in (INSIDE, ACROSS) if name in groups}
    return both or {name: group for name, group in groups.items() if name == WORLD and group.ranks > 1}


def cells(row: DeviceRow) -> list[str]:
    """A row for the screen."""
    speed = f"{rate(row) / 1e9:.2f} GFLOP/s" if row.kind == PRODUCT else ""
    return [
        row.kind.ljust(18), row.precision.ljust(8), str(row.size).rjust(10),
        f"{row.time_s * 1e6:.1f} us".rjust(13), speed.rjust(16),
    ]  # fmt: skip


def turns_of(
    config: RunConfig, environment: Mapping[str, str], *, device: torch.device
) -> tuple[float, int | None]:
    """How many ranks take turns on each core, and the number of cores if all nodes of the run share them.

    Several nodes on one machine share its cores, as the processes of a local run do. A job on one node does
    not show whether other nodes share its cores.
    """
    machines = all_gather(Path("/proc/sys/kernel/random/boot_id").read_text())
    cores = len(os.sched_getaffinity(0))
    if device.type == "cuda":
        return 1.0, None
    turns = max(1.0, machines.count(machines[dist.get_rank()]) / cores)
    one_machine = len(set(machines)) == 1
    shared = one_machine and (config.nodes > 1 or "SLURM_JOB_ID" not in environment)
    return turns, cores if shared else None


def speed_spread(rows: Sequence[DeviceRow], *, device: torch.device) -> float:
    """The relative standard deviation of the devices' speeds, in a product of middle size."""
    products = [row for row in rows if row.kind == PRODUCT]
    probe = next(one for one in probes(device) if (one.kind, one.size) == (PRODUCT, products[-1].size))
    run = probe.prepare()
    times = [_own_time_s(run, device) for _ in range(5)]
    (by_rank,) = all_gather_numbers([sorted(times)[2]], device=torch.device("cpu"))
    return max(LEAST_SPREAD, pstdev(by_rank) / fmean(by_rank))


def _own_time_s(run: Callable[[], object], device: torch.device) -> float:
    clock = time.thread_time if device.type == "cpu" else time.perf_counter  # others may use the core
    collectives.synchronize(device)
    began = clock()
    run()
    collectives.synchronize(device)
    return clock() - began


@dataclass(frozen=True)
class HardwareMeasurement:
    """What the ranks have measured. spread: the relative standard deviation of the devices' speeds."""

    devices: DeviceRows
    storage: StorageRow
    links: CollectivesPlan
    spread: float

    @property
    def left_out(self) -> list[str]:
        return [*filter(None, (part.left_out for part in (self.devices, self.storage, self.links)))]


def write_profile(folder: RunFolder, *, config: RunConfig, measured: HardwareMeasurement) -> None:
    """Write `hardware.yaml`, and write the rows and the lines to print to `calibration.json`."""
    devices, links = measured.devices, measured.links
    machine = _machine(config, devices, spread=measured.spread)
    base = named_hardware(BASES[devices.device.type], user_folder=None)
    hardware = replace(device_hardware(devices.rows, machine, base=base), storage=measured.storage.storage)
    hardware, names = with_measured_links(hardware, _link_profile(config, links), turns=devices.turns)
    today = datetime.now(UTC).date().isoformat()
    head = [
        f"Measured by {MEASURED_BY} on {today}: {config.nodes} nodes x {config.gpus_per_node} devices.",
        f"Links: {', '.join(names) or 'not measured'}.",
        f"Values without a source are taken from {BASES[devices.device.type]}.yaml.",
    ]
    sources = SOURCES | ({"node": "links: measured", "network": "measured"} if names else {})
    write_text(folder.hardware, hardware_text(hardware, head=head, sources=sources))
    lines = [*_summary(hardware, names), *measured.left_out]
    lines.append(
        f"profile: {folder.hardware}. Copy it to FOLDER/hardware/NAME.yaml, then "
        "`plan --config-dir FOLDER hardware=NAME`"
    )
    CalibrationFile(tuple(lines), tuple(map(vars, devices.rows))).write(folder)


def _machine(config: RunConfig, devices: DeviceRows, *, spread: float) -> Machine:
    device = devices.device
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory, processors = properties.name, properties.total_memory, properties.multi_processor_count
    else:
        name = platform.processor() or platform.machine()
        ranks = dist.get_world_size() if devices.shared_cores else config.gpus_per_node
        memory, processors = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks, 1
    return Machine(
        f"{name}, measured", device.type, float(memory), processors, config.gpus_per_node,
        dist.get_world_size(), devices.shared_cores, spread,
    )  # fmt: skip


def _link_profile(config: RunConfig, links: CollectivesPlan) -> MachineConfig:
    """The fits of the links. On one node all ranks count as inside a node, on several as across nodes."""
    names = {WORLD: INSIDE if config.nodes == 1 else ACROSS}
    rows = [replace(row, group=names.get(row.group, row.group)) for row in links.sorted_rows()]
    profile = machine_profile(rows, site=config.cluster.name, device_type="", measured="")
    return MachineConfig(collectives=profile["collectives"])


def _summary(hardware: Hardware, links: Sequence[str]) -> Iterator[str]:
    device, host, traffic = hardware.device, hardware.host, hardware.traffic
    for precision, peak in device.peak_flops.items():
        yield f"products, {precision:<9} {peak / 1e9:12,.1f} GFLOP/s"
    yield f"memory               {device.memory_bytes_per_s / 1e9:12,.1f} GB/s"
    yield f"launch               {traffic.kernel_s * 1e6:12,.1f} us"
    yield f"block, launches      {host.forward_s * 1e6:12,.1f} us forward"
    yield f"                     {host.backward_s * 1e6:12,.1f} us backward"
    storage = hardware.storage
    if storage.write_bytes_per_s is not None:
        rates = {"one rank": storage.write_bytes_per_s, "all ranks": storage.together_bytes_per_s}
        yield f"storage, written     {', '.join(f'{name} {gigabytes(rate)}' for name, rate in rates.items())}"
        yield f"storage, read        {gigabytes(storage.read_bytes_per_s)} per rank, in pieces"
    if hardware.shared_cores:
        yield f"all devices share {hardware.shared_cores} cores"
    if links:
        for name, link in (("inside a node", hardware.node.collective), ("across nodes", hardware.network)):
            yield f"links {name:<15}{link.bytes_per_s / 1e9:12,.3f} GB/s, {link.latency_s * 1e6:,.1f} us"
