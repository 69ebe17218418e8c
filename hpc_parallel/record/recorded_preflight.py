"""What hosts showed: `preflight.json` of the checks at a start, `machine_check.json` of `task=preflight`.

Anybody may have written the files. Of each there is a table for people.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from statistics import median
from typing import Annotated, Any

from hpc_parallel.problems import printable
from hpc_parallel.record.metrics_file import aligned
from hpc_parallel.record.run_folder import FolderRecord, RunFolder
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.record.typed import first, read_if_possible

MOST_FINDINGS = 20
MOST_NAMES = 4  # of hosts in a sentence
MOST_ROWS, MOST_COLUMNS, MOST_CHARACTERS = 20, 6, 40  # of the table of versions
MOST_READ, MOST_HOSTS = 100, 4096  # rows and hosts of the file
MOST = 4096
Reads = Mapping[str, Mapping[str, float]]  # host -> number of processes -> bytes per second of all of them
COPIES = {  # title -> key of a rank in machine_check.json
    "copy to the device, pinned": "pinned_bytes_per_s",
    "copy to the host, pinned": "pinned_to_host_bytes_per_s",
    "copy to the device, pageable": "pageable_bytes_per_s",
    "copy to the host, pageable": "pageable_to_host_bytes_per_s",
}
SCALES, SCALES_NOT = 0.75, 0.25  # share of the gain that each further process should bring
MISSING = "missing"
Differences = Mapping[str, Mapping[str, str | None]]  # name -> host -> version


@dataclass(frozen=True)
class HostFinding:
    """What is wrong with a host, or with several that share the cause."""

    host: str
    what: str
    harmful: bool = False
    excludable: bool = True  # whether a start without the host avoids the problem


@dataclass(frozen=True)
class Preflight:
    """The parts of the file that commands show."""

    findings: Annotated[tuple[HostFinding, ...], first(MOST_FINDINGS)] = ()
    differences: Differences = field(default_factory=dict)

    @classmethod
    def read(cls, folder: RunFolder) -> Preflight:
        """Without values if the file can't be read."""
        return read_if_possible(cls, folder.preflight) or cls()


def difference_table(differences: Differences) -> list[str]:
    """One row for each name, and one column for each group of hosts whose versions are all the same.

    differences: a version is None if it is missing.
    """
    rows = dict(islice(differences.items(), MOST_READ))
    every_host = dict.fromkeys(host for by_host in rows.values() for host in by_host)
    hosts = list(islice(every_host, MOST_HOSTS))
    groups: dict[tuple[str, ...], list[str]] = {}
    for host in hosts:
        versions = tuple(by_host.get(host) or MISSING for by_host in rows.values())
        groups.setdefault(versions, []).append(host)
    if len(groups) < 2:
        return []
    columns = sorted(groups.items(), key=lambda column: -len(column[1]))[:MOST_COLUMNS]
    cells = [["", *(listed_hosts(group) for _, group in columns)]]
    cells += [[name, *(versions[at] for versions, _ in columns)] for at, name in enumerate(rows)][:MOST_ROWS]
    more = [f"and {len(rows) - MOST_ROWS} more"] * (len(rows) > MOST_ROWS)
    hidden = len(groups) - len(columns)
    more += [f"and {hidden} more groups of hosts"] * (hidden > 0)
    texts = [[printable(cell) for cell in row] for row in cells]
    table = [texts[0], *([cell[:MOST_CHARACTERS] for cell in row] for row in texts[1:])]
    return [*aligned(table, right=()), *more]


def listed_hosts(hosts: Sequence[str]) -> str:
    """`n1`, `n1 and n2`, `n1, n2, n3 and 97 more`."""
    last = hosts[-1] if len(hosts) <= MOST_NAMES else f"{len(hosts) - MOST_NAMES + 1} more"
    first = hosts[: min(len(hosts), MOST_NAMES) - 1]
    return f"{', '.join(first)} and {last}" if first else last


@dataclass(frozen=True)
class RankRates:
    """What one rank reached."""

    host: str | None = None
    flops: float | None = None  # per second
    pinned_bytes_per_s: float | None = None
    pinned_to_host_bytes_per_s: float | None = None
    pageable_bytes_per_s: float | None = None
    pageable_to_host_bytes_per_s: float | None = None


@dataclass(frozen=True)
class HostLink:
    """The rate in each direction between two hosts."""

    hosts: tuple[str, ...]
    bytes_per_s: float


@dataclass(frozen=True)
class DirectReads:
    """Reads into device memory."""

    reads_bytes_per_s: Reads = field(default_factory=dict)
    not_measured: str | None = None  # the reason
    mode: str | None = None


@dataclass(frozen=True)
class MeasuredMachine(FolderRecord):
    """The content of `machine_check.json`; a part that was left out is empty."""

    _file = "machine_check"
    device: str | None = None  # `cpu` or `cuda`
    hosts: Annotated[tuple[str, ...], first(MOST)] = ()
    ranks: Annotated[tuple[RankRates, ...], first(MOST)] = ()
    reads_bytes_per_s: Reads = field(default_factory=dict)
    direct_reads: DirectReads = field(default_factory=DirectReads)
    inside_busbw_bytes_per_s: Mapping[str, float | None] = field(default_factory=dict)  # None: one rank
    links: Annotated[tuple[HostLink, ...], first(MOST)] = ()
    findings: Annotated[tuple[HostFinding, ...], first(MOST)] = ()
    judged: bool | None = True  # None: parts are still to be measured
    left_out: str | None = None

    def write(self, folder: RunFolder) -> None:
        """Replace the file. Keys of ranks and of direct reads that have no value are not written."""
        direct, ranks = _measured(self.direct_reads), list(map(_measured, self.ranks))
        write_json(folder.machine_check, asdict(self) | {"ranks": ranks, "direct_reads": direct})


def _measured(record: RankRates | DirectReads) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if value not in (None, {})}


def machine_lines(measured: MeasuredMachine) -> list[str]:
    """The medians, the findings, and a Slurm flag that excludes the slow hosts."""
    return [*_medians(measured), *_findings(measured)]


def links(measured: MeasuredMachine) -> dict[tuple[str, str], float]:
    """(host, other host) -> bytes per second in each direction."""
    result = {}
    for link in measured.links:
        if link.bytes_per_s > 0 and len(link.hosts) == 2 and all(link.hosts):
            result[printable(link.hosts[0]), printable(link.hosts[1])] = link.bytes_per_s
    return result


def _medians(measured: MeasuredMachine) -> Iterator[str]:
    yield from _median("matrix product", measured.ranks, "flops", unit="GFLOP/s for each device")
    for title, key in COPIES.items():
        yield from _median(title, measured.ranks, key, unit="GB/s")
    reads = _reads(measured.reads_bytes_per_s)
    for readers, rate in reads.items():
        yield f"read, processes on each host = {readers}: {rate / 1e6:.0f} MB/s (median of the hosts)"
    yield from _scaling(reads)
    yield from _direct_reads(measured.direct_reads)
    if inside := [rate for rate in measured.inside_busbw_bytes_per_s.values() if rate]:
        yield f"all-reduce inside a node: {median(inside) / 1e9:.3f} GB/s bus bandwidth (median)"
    if rates := list(links(measured).values()):
        middle, slowest = median(rates) / 1e9, min(rates) / 1e9
        yield f"links, in each direction: {middle:.3f} GB/s (median), {slowest:.3f} (slowest)"


def _median(title: str, rows: Sequence[RankRates], key: str, *, unit: str) -> Iterator[str]:
    if values := [value for row in rows if (value := getattr(row, key))]:
        yield f"{title}: {median(values) / 1e9:.1f} {unit} (median), {min(values) / 1e9:.1f} (slowest)"


def _scaling(reads: Mapping[str, float]) -> Iterator[str]:
    """How many times as fast the largest number of processes reads as one process.

    reads: number of processes -> bytes per second of all of them.
    """
    by_count = {int(count): rate for count, rate in reads.items() if count.isdecimal() and len(count) < 10}
    most = max(by_count, default=0)
    if most < 2 or not by_count.get(1):
        return
    speed_up = by_count[most] / by_count[1]
    gained = (speed_up - 1) / (most - 1)  # 0: no gain, 1: perfect
    verb = "scales" if gained >= SCALES else "scales in part" if gained >= SCALES_NOT else "does not scale"
    yield f"input {verb} with the processes: {most} read {speed_up:.1f} times as fast as 1"


def _direct_reads(direct: DirectReads) -> Iterator[str]:
    """The rates of reads into device memory, and whether GPUDirect Storage was used."""
    for readers, rate in _reads(direct.reads_bytes_per_s).items():
        yield f"read into the GPU by kvikio, processes on each host = {readers}: {rate / 1e6:.0f} MB/s"
    if direct.not_measured:
        yield f"GPUDirect Storage: not measured ({printable(direct.not_measured)})"
    elif direct.mode:
        yield f"GPUDirect Storage: {printable(direct.mode)}"


def _reads(by_host: Reads) -> dict[str, float]:
    by_count: dict[str, list[float]] = {}
    for rates in by_host.values():
        for count, rate in rates.items():
            if rate:
                by_count.setdefault(printable(count), []).append(rate)
    return {count: median(rates) for count, rates in by_count.items()}


def _findings(measured: MeasuredMachine) -> Iterator[str]:
    harmful = []
    for finding in measured.findings:
        if finding.host and finding.what:
            yield f"{printable(finding.host)}: {printable(finding.what)}"
            harmful += [printable(finding.host)] * (finding.harmful and finding.excludable)
    if measured.left_out:
        yield printable(measured.left_out)
    if harmful:
        yield f"--exclude={','.join(dict.fromkeys(harmful))}"
    elif measured.judged is None:
        return
    elif not measured.judged:
        yield "nodes that share one machine are not compared"
    else:
        yield "no host stands out"
