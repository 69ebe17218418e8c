"""What `task=preflight` measured, as lines for people. Anybody may have written the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from hpc_parallel.problems import printable
from hpc_parallel.record.values import number, table, text

MOST = 4096


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
    yield from _median("copy, pinned", ranks, "pinned_bytes_per_s", scale=1e9, unit="GB/s")
    yield from _median("copy, pageable", ranks, "pageable_bytes_per_s", scale=1e9, unit="GB/s")
    for readers, rate in _reads(measured).items():
        yield f"read, processes on each host = {readers}: {rate / 1e6:.0f} MB/s (median of the hosts)"
    inside = [rate for rate in map(number, table(measured.get("inside_busbw_bytes_per_s")).values()) if rate]
    if inside:
        yield f"all-reduce inside a node: {median(inside) / 1e9:.3f} GB/s bus bandwidth (median)"
    if rates := list(links(measured).values()):
        shown = f"{median(rates) / 1e9:.3f} GB/s (median), {min(rates) / 1e9:.3f} (slowest)"
        yield f"links, in each direction: {shown}"


def _median(title: str, rows: list[dict[str, Any]], key: str, *, scale: float, unit: str) -> Iterator[str]:
    if values := [value for value in (number(row.get(key)) for row in rows) if value]:
        yield f"{title}: {median(values) / scale:.1f} {unit} (median), {min(values) / scale:.1f} (slowest)"


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
            harmful += [printable(host)] * (finding.get("harmful") is True)
    if harmful:
        yield f"--exclude={','.join(dict.fromkeys(harmful))}"
    elif measured.get("judged") is False:
        yield "nodes that share one machine are not compared"
    else:
        yield "no host stands out"


def _tables(rows: Any) -> list[dict[str, Any]]:
    return [table(row) for row in rows[:MOST]] if isinstance(rows, list) else []
