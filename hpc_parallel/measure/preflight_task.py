"""`task=preflight`: measure devices, storage, and the links of all hosts, and name what is slow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, median_low
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.task_schema import PreflightTaskConfig
from hpc_parallel.machine.host_findings import SLOW, Finding, join_shared, product_takes
from hpc_parallel.machine.world import World
from hpc_parallel.measure.storage_rates import copy_rates, read_rates
from hpc_parallel.planning.collective_times import bus_factor
from hpc_parallel.profiling.links import Rates, fastest_s, link_rates, rounds, slow_hosts, slow_pairs
from hpc_parallel.record.endings import Summary
from hpc_parallel.record.recorded_preflight import (
    COPIES,
    DirectReads,
    HostLink,
    MeasuredMachine,
    RankRates,
    machine_lines,
)
from hpc_parallel.record.results import results
from hpc_parallel.record.run_folder import RunFolder, note_phase
from hpc_parallel.start.start_checks import act_on
from hpc_parallel.start.start_times import SIDES, matrix_times_s
from hpc_parallel.strategies import exchange
from hpc_parallel.strategies.mesh import build_host_mesh
from hpc_parallel.training.writers import FileWriter
from hpc_parallel.worker.run_plots import draw_plots
from hpc_parallel.worker.session import TaskContext, complete
from hpc_parallel.worker.time_budget import TimeBudget, advice

MOST_TRIES = 3  # of the all-reduce inside hosts, which is measured again while a host seems slow
SLOW_COPY = 2.0  # times slower than the median host, in copies and all-reduces inside a host
SLOW_READ = 4.0  # times slower than the median: file systems vary more than links
NODE = ", node "  # between the name of a machine and a number; no host name has it


def check_machine(context: TaskContext) -> None:
    """Measure as `task` of the configuration says, on all ranks.

    Rank 0 writes `machine_check.json` and `summary.json`; after each part, it writes what is measured so far
    and a line of `metrics.jsonl`.

    Raises PreflightError or FollowerError after that, as `preflight.act` says.
    """
    began = time.monotonic()
    config, folder, rank = context.config, context.folder, dist.get_rank()
    context.begin()
    names = host_names(config, context.environment)
    simulated = any(NODE in name for name in names)  # nodes that share the cores of one machine
    check = MachineProbe(config, names=names, folder=folder, device=context.device)
    report = PreflightReport(folder, check, judged=not simulated) if rank == 0 else None
    for number, count, name in check.measure():
        if report is not None:
            report.before(number, count, name)
    findings = [] if simulated else machine_findings(check.measured)
    if report is not None:
        report.end(findings)
        print(*results(folder, Summary()), sep="\n", flush=True)
        draw_plots(folder, lasted_s=time.monotonic() - began)
    dist.barrier()  # a rank that fails ends the others
    act_on(findings, act=config.preflight.act, host=names[rank], hosts=check.hosts)
    complete(context)


class PreflightReport:
    """Writes on rank 0 each part when it is measured, then all parts with the findings."""

    def __init__(self, folder: RunFolder, check: MachineProbe, *, judged: bool) -> None:
        self._folder, self._check, self._judged = folder, check, judged
        self._writer = FileWriter(folder, steps=0)
        self._said: list[str] = []
        self._part = (0, 0)

    def before(self, number: int, count: int, name: str) -> None:
        """Write the part that has ended, and note that the part `name` begins."""
        self._write_part()
        self._part = number, count
        note_phase(self._folder, f"measuring {name}")

    def end(self, findings: Sequence[Finding]) -> None:
        self._write_part()
        self._write(findings=findings, judged=self._judged)

    def _write_part(self) -> None:
        number, count = self._part
        if number == 0:
            return
        lines = machine_lines(self._write(findings=[], judged=None))
        budget = self._check.budget
        left_s = max(0.0, budget.seconds - budget.used_s) if number < count else 0.0
        for line in lines:
            if line not in self._said:
                self._writer.write({
                    "step": number, "steps": count, "measured": [line],
                    "time_left_s": left_s,
                    "time": datetime.now(UTC).isoformat(),
                })  # fmt: skip
        self._said = lines

    def _write(self, *, findings: Sequence[Finding], judged: bool | None) -> MeasuredMachine:
        left_out = None
        if names := self._check.left_out:
            reason = advice(self._check.budget, needed_s=self._check.budget.used_s)
            left_out = f"left out: {', '.join(names)}: {reason}"
        recorded = tuple(finding.recorded for finding in findings)
        measured = replace(
            self._check.measured.recorded(), findings=recorded, judged=judged, left_out=left_out
        )
        measured.write(self._folder)
        return measured


class MachineProbe:
    """Measures one part after another until the time is used up. The storage is last: it may be slow."""

    def __init__(
        self, config: RunConfig, *, names: Sequence[str], folder: RunFolder, device: torch.device
    ) -> None:
        """names: host of each rank."""
        assert isinstance(config.task, PreflightTaskConfig)
        self.config, self.task, self.names, self.device = config, config.task, names, device
        self.storage = Path(config.task.storage or folder.path)
        self.measured = MachineMeasurement(device_type=device.type, names=names)
        self.hosts = self.measured.hosts
        self.budget = TimeBudget(config.task.seconds)
        self.left_out: list[str] = []
        self._parts: dict[str, Callable[[], dict[str, Any]]] = {
            "matrix products": lambda: {"matrix_s": matrix_times_s(device)},
            "copies between host and device": lambda: {"copies": exchange.all_gather(copy_rates(device))},
            "an all-reduce inside each host": self._inside,
            "links between hosts": self._links,
            "reads from the storage": self._reads,
        }

    def measure(self) -> Iterator[tuple[int, int, str]]:
        """Yields the number of a part, their count, and the part's name before it is measured.

        `measured` and `left_out` are the same on all ranks. The first part is always measured.
        """
        for number, (name, part) in enumerate(self._parts.items(), start=1):
            if number > 1 and self._is_late():
                self.left_out.append(name)
                continue
            yield number, len(self._parts), name
            self.measured = replace(self.measured, **part())

    def _is_late(self) -> bool:
        return self.budget.left_s() < 0

    def _inside(self) -> dict[str, Any]:
        rates = inside_rates(self.config, device=self.device, size_bytes=self.task.message_bytes)
        return {"inside": dict(zip(self.hosts, rates, strict=True))}

    def _links(self) -> dict[str, Any]:
        pairs = rounds(len(self.hosts))
        rates = link_rates(
            [self.names.index(host) for host in self.hosts], rounds=pairs, device=self.device,
            size_bytes=self.task.message_bytes, is_late=self._is_late,
        )  # fmt: skip
        if missing := sum(map(len, pairs)) - len(rates):
            self.left_out.append(f"{missing} links between hosts")
        return {"links": rates}

    def _reads(self) -> dict[str, Any]:
        reads, direct = read_rates(
            self.storage, names=self.names, size_bytes=self.task.read_bytes, device=self.device,
            is_late=self._is_late,
        )  # fmt: skip
        return {"reads": reads, "direct": direct}


def host_names(config: RunConfig, environment: Mapping[str, str]) -> list[str]:
    """The host of each rank, by rank. If one machine simulates several nodes, the name has a number."""
    names = exchange.all_gather(World.discover(environment).host)  # the name that Slurm can exclude
    per_node = len(names) // config.nodes
    if len(set(names)) == config.nodes:
        return names
    return [f"{name}{NODE}{rank // per_node + 1}" for rank, name in enumerate(names)]


def inside_rates(config: RunConfig, *, device: torch.device, size_bytes: int) -> list[float | None]:
    """The bus bandwidth of an all-reduce of each host's ranks; None for hosts with one rank.

    All hosts run it at the same time.
    """
    per_node = dist.get_world_size() // config.nodes
    if per_node < 2:
        return [None] * config.nodes
    group = build_host_mesh(config.nodes, device_type=device.type)["inside a node"].get_group()
    array = torch.ones(size_bytes // 4, device=device)
    best = [0.0] * config.nodes
    for _ in range(MOST_TRIES):
        time_s = fastest_s(lambda: dist.all_reduce(array.fill_(1.0), group=group), device=device)
        rates = exchange.all_gather(array.nbytes / time_s * bus_factor("all_reduce", per_node))
        slowest = [min(rates[at : at + per_node]) for at in range(0, len(rates), per_node)]
        best = [max(pair) for pair in zip(best, slowest, strict=True)]
        if not slow_rates(dict(enumerate(best))):
            break
    return [*best]


Host = TypeVar("Host", str, int)


@dataclass(frozen=True)
class MachineMeasurement:
    """Figures of all ranks and hosts; a part that was left out is empty.

    names: the host of each rank. matrix_s: the time of one product on each rank. copies: what `copy_rates`
    returned on each rank. reads, direct: what `read_rates` returned. inside: host -> bus bandwidth; None for
    a host with one rank. links: what `link_rates` returned.
    """

    device_type: str
    names: Sequence[str]
    matrix_s: Sequence[float] = ()
    copies: Sequence[Mapping[str, float]] = ()
    reads: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    direct: DirectReads = field(default_factory=DirectReads)
    inside: Mapping[str, float | None] = field(default_factory=dict)
    links: Rates = field(default_factory=dict)

    @property
    def hosts(self) -> list[str]:
        """Each host once, in the order of the ranks."""
        return list(dict.fromkeys(self.names))

    def recorded(self) -> MeasuredMachine:
        """The content of `machine_check.json` without findings."""
        hosts = self.hosts
        copies = self.copies or [{}] * len(self.names)
        flops = 2 * SIDES[self.device_type] ** 3
        return MeasuredMachine(
            device=self.device_type,
            hosts=tuple(hosts),
            ranks=tuple(
                RankRates(host, flops / time_s, **copied)
                for host, time_s, copied in zip(self.names, self.matrix_s, copies, strict=True)
            ),
            reads_bytes_per_s=self.reads,
            direct_reads=self.direct,
            inside_busbw_bytes_per_s=self.inside,
            links=tuple(HostLink((hosts[a], hosts[b]), rate) for (a, b), rate in self.links.items()),
        )


def machine_findings(measured: MachineMeasurement) -> list[Finding]:
    shares_cores = len(measured.hosts) == 1 and measured.device_type == "cpu"
    findings = [
        *([] if shares_cores else slow_devices(measured.names, measured.matrix_s)),
        *slow_copies(measured.names, measured.copies),
        *slow_storage(measured.reads),
        *slow_inside(measured.inside),
        *slow_links(measured.hosts, measured.links),
    ]
    return join_shared(findings, hosts=len(measured.hosts))


def slow_devices(names: Sequence[str], matrix_s: Sequence[float]) -> Iterator[Finding]:
    """names: host of each rank; matrix_s: the time of a product on each."""
    usual_s = median_low(matrix_s)
    for rank, (host, time_s) in enumerate(zip(names, matrix_s, strict=True)):
        if time_s > SLOW * usual_s:
            yield Finding(host, f"rank {rank}: a {product_takes(time_s, usual_s)}", about="matrix product")


def slow_rates(by_host: Mapping[Host, float], *, factor: float = SLOW_COPY) -> dict[Host, float]:
    """The hosts more than `factor` times slower than the median; empty for fewer than three hosts."""
    usual = median(by_host.values()) if len(by_host) > 2 else 0.0
    return {host: rate for host, rate in by_host.items() if rate * factor < usual}


def slow_copies(names: Sequence[str], copies: Sequence[Mapping[str, float]]) -> Iterator[Finding]:
    """The slowest device of a host counts. names: the host of each rank; copies: its `copy_rates`."""
    for title, key in COPIES.items() if copies else ():
        slowest: dict[str, float] = {}
        for host, rates in zip(names, copies, strict=True):
            if key in rates:
                slowest[host] = min(rates[key], slowest.get(host, rates[key]))
        yield from _slow_hosts(title, slowest)


def slow_inside(inside: Mapping[str, float | None]) -> Iterator[Finding]:
    """inside: host -> the bus bandwidth that `inside_rates` returned."""
    measured = {host: rate for host, rate in inside.items() if rate is not None}
    yield from _slow_hosts("an all-reduce inside the host", measured)


def _slow_hosts(title: str, by_host: Mapping[str, float]) -> Iterator[Finding]:
    slow = slow_rates(by_host)
    usual = median(by_host.values()) / 1e9 if by_host else 0.0
    for host, rate in slow.items():
        rates = f"{rate / 1e9:.3f} GB/s, and {usual:.3f} elsewhere"
        yield Finding(host, f"{title}: {rates}", about=title)


def slow_storage(reads: Mapping[str, Mapping[str, float]]) -> Iterator[Finding]:
    """The rate of the largest number of processes counts. reads: what `read_rates` returned."""
    most = {host: list(rates.values())[-1] for host, rates in reads.items()}
    usual = median(most.values()) if most else 0.0
    for host, rate in slow_rates(most, factor=SLOW_READ).items():
        yield Finding(host, f"reads {rate / 1e6:.0f} MB/s, and {usual / 1e6:.0f} elsewhere")


def slow_links(hosts: Sequence[str], rates: Rates) -> Iterator[Finding]:
    """A single slow link accuses no host, so its finding is not harmful.

    rates: what `link_rates` returned.
    """
    of_hosts, of_pairs = slow_hosts(rates), slow_pairs(rates)
    usual = [rate for pair, rate in rates.items() if not of_hosts.keys() & set(pair) and pair not in of_pairs]
    others = f"and others {median(usual) / 1e9:.3f}" if usual else "and no link is fast"
    for host, rate in of_hosts.items():
        yield Finding(hosts[host], f"its links carry {rate / 1e9:.3f} GB/s, {others}", about="links")
    for (a, b), rate in of_pairs.items():
        what = f"the link to {hosts[b]} carries {rate / 1e9:.3f} GB/s, {others}"
        yield Finding(hosts[a], what, harmful=False)
