"""`task=collectives`: check and time the collectives of torch, inside nodes, across nodes and over each axis.

Bandwidths are defined as in NVIDIA's nccl-tests (PERFORMANCE.md). The algorithm bandwidth is size / time. The
bus bandwidth is the algorithm bandwidth times a factor that depends on the operation and the number of ranks.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.task_schema import CollectivesConfig
from hpc_parallel.layout.layout import SPMD, layout_of
from hpc_parallel.measure.collective_cases import (
    OPERATIONS,
    CollectiveCase,
    Group,
    Patterns,
    elements,
    group_of,
    same_ranks,
)
from hpc_parallel.measure.collectives_plan import (
    BATCHES,
    ROW_S,
    WARM_UP,
    CollectivesPlan,
    PlannedRow,
    RowTime,
)
from hpc_parallel.measure.machine_profile import compare, machine_profile
from hpc_parallel.planning.collective_times import bus_factor
from hpc_parallel.record.collectives_file import CollectiveRow, Collectives, as_csv, full_table
from hpc_parallel.record.results import first_line
from hpc_parallel.record.safe_write import write_text
from hpc_parallel.start.start_times import synchronize
from hpc_parallel.strategies.exchange import all_gather, all_gather_numbers
from hpc_parallel.strategies.groups import backend_of
from hpc_parallel.strategies.mesh import axis_of, build_host_mesh, build_mesh
from hpc_parallel.training.writers import FileWriter
from hpc_parallel.worker.run_plots import draw_plots
from hpc_parallel.worker.session import TaskContext, complete, note_stop
from hpc_parallel.worker.stop import StopFlag
from hpc_parallel.worker.time_budget import TimeBudget

FEW_BATCHES = 3  # of a row that would take too much of the budget; without warm-up
MOST_ROUNDS = 2000  # in a batch
BUFFERS = 4  # arrays of the largest size that a check holds at the same time
PROFILE_HEAD = """\
# Measured by task=collectives: time = latency_s + bytes on the bus / bandwidth_bytes_per_s.
# Copy it to FOLDER/machine/NAME.yaml: `--config-dir FOLDER machine=NAME` compares another run with it.
"""
LARGEST_BYTES = {"cuda": 2**30, "cpu": 2**26}  # if `task.max_bytes` is null
SUM_ELEMENTS = 2**20  # of the first all-reduce


class WrongResultError(RuntimeError):
    """A collective returned wrong values."""


@dataclass(frozen=True)
class Times:
    """`time_s`: of one round, the median of all batches. `spread`: their (largest - smallest) / median."""

    time_s: float
    spread: float
    rounds: int


def measure_collectives(context: TaskContext) -> None:
    """Measure as `task` of the configuration says, on all ranks of the default process group.

    Rank 0 writes a line of `metrics.jsonl` as soon as a row is measured. At the end or after a signal it
    writes `collectives.json`, `collectives.csv` and `machine.yaml`. Then it writes `summary.json`, or
    `stopped.json` after a signal.

    Raises WrongResultError on all ranks.
    """
    config, folder, device = context.config, context.folder, context.device
    task = config.task
    assert isinstance(task, CollectivesConfig)
    began = time.monotonic()
    rank = dist.get_rank()
    context.begin()
    groups = named_groups(config, device=device)
    most_bytes = largest_size(task, device=device)
    bench = Bench(device=device, seconds=ROW_S)
    writer = FileWriter(folder, steps=0)
    with StopFlag(step=0, period_s=0.0) as stop:  # until all files are written
        first = bench.measure("all_reduce", group=("world", groups["world"]), dtype=torch.float32,
                              size_bytes=4 * SUM_ELEMENTS)  # fmt: skip
        say(first_line(first))
        plan = CollectivesPlan.of(task, groups=groups, most_bytes=most_bytes)
        budget = TimeBudget(task.seconds)
        signalled = None
        for _ in plan.measure(partial(measure_cell, device=device, groups=groups), budget):
            if rank == 0:
                writer.write(plan.metrics_line(budget))
            if (signalled := stop.after(len(plan.rows))) is not None:
                plan.stopped_by(signalled.name)
                break
        if rank == 0:
            write_results(context, first=first, plan=plan)
        if signalled is not None:
            kept = f"{len(plan.rows)} of {len(plan.cells)} rows"
            note_stop(folder, [], signalled=signalled, about={"kept": kept})
            return
        complete(context)
    context.print_results()
    if rank == 0:
        draw_plots(folder, lasted_s=time.monotonic() - began)


def write_results(context: TaskContext, *, first: CollectiveRow, plan: CollectivesPlan) -> None:
    """Write the rows with the times that a machine profile predicts, and the machine profile of this run."""
    config, folder, device = context.config, context.folder, context.device
    rows = plan.sorted_rows()
    comparison = compare(rows, machine=config.machine, device_type=device.type)
    if config.machine.collectives:
        pairs = zip(rows, comparison.predicted_s, strict=True)
        rows = [replace(row, predicted_s=time_s) for row, time_s in pairs]
    measured = Collectives(
        device.type, backend_of(device.type), first, tuple(rows), plan.left_out, tuple(comparison.warnings)
    )
    measured.write(folder, with_predictions=bool(config.machine.collectives))
    write_text(folder.collectives_table, full_table(rows))
    write_text(folder.collectives.with_suffix(".csv"), as_csv(rows))
    today = datetime.now(UTC).date().isoformat()
    profile = machine_profile(rows, site=config.cluster.name, device_type=device.type, measured=today)
    write_text(folder.machine, PROFILE_HEAD + OmegaConf.to_yaml(profile))


def measure_cell(
    cell: PlannedRow, time: RowTime, *, device: torch.device, groups: Mapping[str, Group]
) -> CollectiveRow:
    name, kind, dtype = cell.series
    bench = Bench(device=device, seconds=time.seconds, limit_s=time.limit_s)
    return bench.measure(
        kind, group=(name, groups[name]), dtype=getattr(torch, dtype), size_bytes=cell.size_bytes
    )


def named_groups(config: RunConfig, *, device: torch.device) -> dict[str, Group]:
    """The groups of all ranks, inside a node, across nodes and of each axis; no set of ranks twice.

    All ranks create the groups in the same order, and each rank is in one group of each name.
    """
    world = dist.group.WORLD
    assert world is not None
    groups = {"world": group_of(world)}
    per_node = dist.get_world_size() // config.nodes
    if per_node * config.nodes == dist.get_world_size() and config.nodes > 1 and per_node > 1:
        hosts = build_host_mesh(config.nodes, device_type=device.type)
        for name in ("inside a node", "across nodes"):
            groups[name] = group_of(hosts[name].get_group())
    if config.strategy.execution == SPMD:
        layout = layout_of(config.strategy, devices=config.devices)
        mesh = build_mesh(layout, device_type=device.type)
        for name in layout.degrees:
            if (axis := axis_of(mesh, name)) is not None:
                add_axis(groups, f"axis {name}", group_of(axis.get_group()))
    return groups


def add_axis(groups: dict[str, Group], name: str, group: Group) -> None:
    """Add a group. If another group has the same ranks, add only the name to it: they are measured once."""
    for other_name, other in groups.items():
        if all(all_gather(same_ranks(other, group))):
            groups[other_name] = replace(other, also=(*other.also, name))
            return
    groups[name] = group


def largest_size(task: CollectivesConfig, *, device: torch.device) -> int:
    """The largest size in bytes for which every rank has the memory; at most `requested_bytes`."""
    requested = requested_bytes(task, device=device)
    (by_rank,) = all_gather_numbers([free_bytes(device)], device=device)
    fits = int(min(by_rank)) // BUFFERS
    if fits < requested:
        say(f"WARNING: sizes above {fits:,} bytes are left out: a rank has {int(min(by_rank)):,} bytes free")
    return max(min(requested, fits), task.min_bytes)


def requested_bytes(task: CollectivesConfig, *, device: torch.device) -> int:
    """The largest size that the configuration asks for on this kind of device."""
    return LARGEST_BYTES[device.type] if task.max_bytes is None else task.max_bytes


def free_bytes(device: torch.device) -> float:
    """Free memory of the device; on a CPU, this rank's share of the machine's available memory."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    machines = all_gather(Path("/proc/sys/kernel/random/boot_id").read_text())
    available = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
    return int(available[1]) * 1024 / machines.count(machines[dist.get_rank()]) if available else 0.0


@dataclass(frozen=True)
class Bench:
    """Checks and times one collective after another; `seconds` and `limit_s` are those of `RowTime`."""

    device: torch.device
    seconds: float
    limit_s: float = math.inf

    def measure(
        self, kind: str, *, group: tuple[str, Group], dtype: torch.dtype, size_bytes: int
    ) -> CollectiveRow:
        """Returns the row of one collective; all groups of the name work at the same time.

        Raises WrongResultError on all ranks if a result before or after the timed rounds is wrong.
        """
        name, members = group
        operation = OPERATIONS[kind]
        patterns = Patterns(members, dtype=dtype, device=self.device)
        count = elements(size_bytes, operation=operation, group=members, dtype=dtype)
        case = operation.prepare(members, patterns, count)
        what = f"{kind} of {case.size_bytes:,} bytes of {str(dtype).removeprefix('torch.')}, {name}"
        self.require_right(case, what)
        times = self.time(case.run)
        self.require_right(case, what)
        rate = case.size_bytes / times.time_s
        return CollectiveRow(
            group=name,
            also=members.also,
            ranks=members.ranks,
            operation=kind,
            dtype=str(dtype).removeprefix("torch."),
            size_bytes=case.size_bytes,
            count=case.size_bytes // dtype.itemsize // (members.ranks if operation.by_slices else 1),
            redop="sum" if operation.sums else "none",
            wrong=0,  # otherwise the run has ended
            time_s=times.time_s,
            spread=times.spread,
            rounds=times.rounds,
            algbw_bytes_per_s=rate,
            busbw_bytes_per_s=rate * bus_factor(kind, members.ranks),
        )

    def require_right(self, case: CollectiveCase, what: str) -> None:
        by_rank = all_gather(case.is_right())
        if wrong := [str(rank) for rank, right in enumerate(by_rank) if not right]:
            raise WrongResultError(f"{what}: rank {', '.join(wrong)} got wrong values")

    def time(self, run: Callable[[], object]) -> Times:
        """Time rounds of `run`. The slowest rank's time counts, because a training waits for all ranks."""
        estimate_s, batches = self.elapsed_s(run, rounds=1), FEW_BATCHES
        if (WARM_UP + BATCHES) * estimate_s <= self.limit_s:
            self.elapsed_s(run, rounds=WARM_UP)
            estimate_s, batches = self.elapsed_s(run, rounds=1), BATCHES
        rounds = max(1, min(MOST_ROUNDS, int(self.seconds / BATCHES / estimate_s)))
        times = [self.elapsed_s(run, rounds=rounds) / rounds for _ in range(batches)]
        middle = median(times)
        return Times(middle, (max(times) - min(times)) / middle, rounds * batches)

    def elapsed_s(self, run: Callable[[], object], *, rounds: int) -> float:
        """Seconds from a common start to the end of `rounds` on the slowest rank; the same on all ranks."""
        dist.barrier()
        synchronize(self.device)
        started = time.perf_counter()
        for _ in range(rounds):
            run()
        synchronize(self.device)
        (by_rank,) = all_gather_numbers([time.perf_counter() - started], device=self.device)
        return max(by_rank)


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)
