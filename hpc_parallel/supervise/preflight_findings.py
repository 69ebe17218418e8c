"""Judge the facts of all hosts: which host differs from the others, and in what.

A host is accused only by comparison with the majority, or for something that no healthy host has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median, median_low
from typing import Any

LEAST_FREE_BYTES = 2**30
LARGEST_SKEW_S = 1.0
SLOW = 1.6  # times the median: on a healthy machine, noise stays below
SLOW_WRITE = 8.0  # file systems vary more
SLOW_WRITE_S = 0.5  # what takes less is not worth a word
USED_SHARE, USED_BYTES = 0.1, 2 * 2**30  # of a device's memory; CUDA itself takes up to 1 GiB


@dataclass(frozen=True)
class Finding:
    """Something wrong with one host. harmful: a training would fail or wait for this host at every step."""

    host: str
    what: str
    harmful: bool = True

    def as_record(self) -> dict[str, Any]:
        return asdict(self)


def findings(hosts: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """All findings, by host in the order of `hosts`.

    hosts: host -> facts of `host_facts` with `devices` (name, total_bytes, used_bytes of each), `matrix_s`
    (the shortest time of a product on each device) and `differing` (texts about its packages).
    """
    found = [*_versions(hosts), *_devices(hosts), *_disks(hosts), *_clocks(hosts), *_speeds(hosts)]
    order = list(hosts)
    return sorted(found, key=lambda finding: order.index(finding.host))


def _versions(hosts: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    names = next(iter(hosts.values()))["versions"]
    for name in names:
        values = {host: facts["versions"].get(name) for host, facts in hosts.items()}
        usual = _usual(values.values())
        for host, value in values.items():
            if value != usual:
                text = f"{name} {value or 'missing'}, and {usual or 'missing'} elsewhere"
                if name == "packages":
                    text = f"other packages: {'; '.join(hosts[host].get('differing', ())) or 'unknown'}"
                yield Finding(host, text)


def _devices(hosts: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    kinds = {host: tuple(device["name"] for device in facts["devices"]) for host, facts in hosts.items()}
    usual = _usual(kinds.values())
    for host, kind in kinds.items():
        if kind != usual:
            yield Finding(host, f"devices {_listed(kind)}, and {_listed(usual)} elsewhere")
    for host, facts in hosts.items():
        for index, device in enumerate(facts["devices"]):
            if device["used_bytes"] > max(USED_SHARE * device["total_bytes"], USED_BYTES):
                used = f"{device['used_bytes'] / 1e9:.1f} of {device['total_bytes'] / 1e9:.1f} GB"
                yield Finding(host, f"device {index}: {used} are used by other processes")
        for index, gpu in enumerate(facts["gpus"]):
            for trouble in _troubles(gpu):
                yield Finding(host, f"GPU {index}: {trouble}")


def _troubles(gpu: Mapping[str, Any]) -> Iterator[str]:
    if gpu["uncorrected_errors"]:
        yield f"{gpu['uncorrected_errors']} memory errors that ECC could not correct"
    if gpu["bad_rows"]:
        yield "rows of its memory wait for a reset or can't be replaced"
    if gpu["throttled"]:
        yield f"low clocks ({', '.join(gpu['throttled'])})"
    if gpu.get("foreign"):
        yield f"used by other processes ({', '.join(map(str, gpu['foreign']))})"


def _disks(hosts: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    for purpose in next(iter(hosts.values()))["disks"]:
        disks = {host: facts["disks"][purpose] for host, facts in hosts.items()}
        rates = [disk["write_bytes_per_s"] for disk in disks.values() if "error" not in disk]
        for host, disk in disks.items():
            where = f"{purpose} folder {disk['folder']}"
            if "error" in disk:
                yield Finding(host, f"{where}: {disk['error']}")
            elif disk["free_bytes"] < LEAST_FREE_BYTES:
                yield Finding(host, f"{where}: {disk['free_bytes'] / 1e9:.2f} GB free")
            elif disk["write_s"] > SLOW_WRITE_S and disk["write_bytes_per_s"] * SLOW_WRITE < median(rates):
                rate = f"{disk['write_bytes_per_s'] / 1e6:.1f} MB/s, and {median(rates) / 1e6:.1f} elsewhere"
                yield Finding(host, f"{where}: writes {rate}", harmful=False)


def _clocks(hosts: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    middle = median(facts["time_s"] for facts in hosts.values())
    for host, facts in hosts.items():
        skew_s = facts["time_s"] - middle
        if abs(skew_s) > LARGEST_SKEW_S + facts["time_tolerance_s"]:
            yield Finding(host, f"its clock is {skew_s:+.1f} s off", harmful=False)


def _speeds(hosts: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    if len(hosts) == 1:  # its products are not timed: there is nothing to compare them with
        return
    middle = median_low(time_s for facts in hosts.values() for time_s in facts["matrix_s"])
    for host, facts in hosts.items():
        slow = [time_s for time_s in facts["matrix_s"] if time_s > SLOW * middle]
        if slow:
            text = f"a matrix product takes {max(slow) * 1e3:.1f} ms, and {middle * 1e3:.1f} elsewhere"
            yield Finding(host, text)


def _usual(values: Any) -> Any:
    """The value of most hosts; of equally many, the first."""
    return Counter(values).most_common(1)[0][0]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in Counter(names).items()) or "none"
