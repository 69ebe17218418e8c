"""What `task=preflight` measured, as lines for people. Anybody may have written the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from hpc_parallel.problems import printable
from hpc_parallel.record.values import number, table, text

MOST = 4096
COPIES = {  # title -> key of a rank in machine_check.json
    "copy to the device, pinned": "pinned_bytes_per_s",
    "copy to the host, pinned": "pinned_to_host_bytes_per_s",
    "copy to the device, pageable": "pageable_bytes_per_s",
    "copy to the host, pageable": "pageable_to_host_bytes_per_s",
}
SCALES, SCALES_NOT = 0.75, 0.25  # share of the gain that each further process should bring


def machine_lines(content: Any) -> list[str]:
    """The medians, what was found, and a flag that leaves the slow hosts out."""
    measured = table(content)
    return [*_medians(measured), *_findings(measured)]


def links(content: Any) -> dict[tuple[str, str], float]:
    """(host, other host) -> bytes per second in each direction."""
    result = {}
    for link in _tables(table(content).get("links")):
        rate, hosts = number(link.get("bytes_per_s")), link.get("hosts")
        if rate and rate > 0 and isinstance(hosts, list) and len(hosts) == 2 and all(map(text, hosts)):
            result[printable(hosts[0]), printable(hosts[1])] = rate
    return result


def _medians(measured: Mapping[str, Any]) -> Iterator[str]:
    ranks = _tables(measured.get("ranks"))
    yield from _median("matrix product", ranks, "flops", scale=1e9, unit="GFLOP/s for each device")
    for title, key in COPIES.items():
        yield from _median(title, ranks, key, scale=1e9, unit="GB/s")
    reads = _reads(measured)
    for readers, rate in reads.items():
        yield f"read, processes on each host = {readers}: {rate / 1e6:.0f} MB/s (median of the hosts)"
    yield from _scaling(reads)
    yield from _direct_reads(table(measured.get("direct_reads")))
    inside = [rate for rate in map(number, table(measured.get("inside_busbw_bytes_per_s")).values()) if rate]
    if inside:
        yield f"all-reduce inside a node: {median(inside) / 1e9:.3f} GB/s bus bandwidth (median)"
    if rates := list(links(measured).values()):
        shown = f"{median(rates) / 1e9:.3f} GB/s (median), {min(rates) / 1e9:.3f} (slowest)"
        yield f"links, in each direction: {shown}"


def _median(title: str, rows: list[dict[str, Any]], key: str, *, scale: float, unit: str) -> Iterator[str]:
    if values := [value for value in (number(row.get(key)) for row in rows) if value]:
        yield f"{title}: {median(values) / scale:.1f} {unit} (median), {min(values) / scale:.1f} (slowest)"


def _scaling(reads: Mapping[str, float]) -> Iterator[str]:
    """Whether most processes read as many times as fast as one.

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


def _direct_reads(direct: Mapping[str, Any]) -> Iterator[str]:
    """The same into device memory, and whether GPUDirect Storage was used."""
    for readers, rate in _reads(direct).items():
        yield f"read into the GPU by kvikio, processes on each host = {readers}: {rate / 1e6:.0f} MB/s"
    if reason := text(direct.get("not_measured")):
        yield f"GPUDirect Storage: not measured ({printable(reason)})"
    elif mode := text(direct.get("mode")):
        yield f"GPUDirect Storage: {printable(mode)}"


def _reads(measured: Mapping[str, Any]) -> dict[str, float]:
    by_count: dict[str, list[float]] = {}
    for rates in table(measured.get("reads_bytes_per_s")).values():
        for count, rate in table(rates).items():
            if value := number(rate):
                by_count.setdefault(printable(count), []).append(value)
    return {count: median(rates) for count, rates in by_count.items()}


def _findings(measured: Mapping[str, Any]) -> Iterator[str]:
    harmful = []
    for finding in _tables(measured.get("findings")):
        host, what = text(finding.get("host")), text(finding.get("what"))
        if host and what:
            yield f"{printable(host)}: {printable(what)}"
            is_excludable = finding.get("harmful") is True and finding.get("excludable") is not False
            harmful += [printable(host)] * is_excludable
    if left_out := text(measured.get("left_out")):
        yield printable(left_out)
    if harmful:
        yield f"--exclude={','.join(dict.fromkeys(harmful))}"
    elif measured.get("judged") is None and "judged" in measured:
        return  # the other parts are still to be measured
    elif measured.get("judged") is False:
        yield "nodes that share one machine are not compared"
    else:
        yield "no host stands out"


def _tables(rows: Any) -> list[dict[str, Any]]:
    return [table(row) for row in rows[:MOST]] if isinstance(rows, list) else []
