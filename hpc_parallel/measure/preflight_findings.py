"""The measurements of `task=preflight`, and findings about slow devices, storage and links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import TypeVar

from hpc_parallel.machine.host_findings import SLOW, Finding, join_shared, product_takes
from hpc_parallel.profiling.links import Rates, slow_hosts, slow_pairs
from hpc_parallel.record.machine_check_table import COPIES, DirectReads, HostLink, MeasuredMachine, RankRates
from hpc_parallel.start.start_times import SIDES

SLOW_COPY = 2.0  # times slower than the median host, in copies and all-reduces inside a host
SLOW_READ = 4.0  # times slower than the median: file systems vary more than links


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
    """All findings about slow devices, storage and links."""
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


def slow_rates(by_host: Mapping[Host, float]) -> dict[Host, float]:
    """The hosts more than SLOW_COPY times slower than the median; empty for fewer than three hosts."""
    usual = median(by_host.values()) if len(by_host) > 2 else 0.0
    return {host: rate for host, rate in by_host.items() if rate * SLOW_COPY < usual}


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
    for host, rate in most.items():
        if rate * SLOW_READ < usual and len(most) > 2:
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
