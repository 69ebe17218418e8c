"""Judge the facts of all hosts: which host differs from the others, and in what.

A host is accused only by comparison with the majority, or for something that no healthy host has. Without a
majority, the finding says that the hosts differ and accuses none.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import Any

from hpc_parallel.machine.xids import HARMFUL, MEANINGS, PROGRAM, describe
from hpc_parallel.record.recorded_preflight import HostFinding, listed_hosts

LEAST_FREE_BYTES = 2**30
LEAST_AVAILABLE_SHARE = 0.05  # of a host's memory
LARGEST_SKEW_S = 1.0
SLOW = 1.6  # times the median: on a healthy machine, noise stays below
NO_SPACE = os.strerror(errno.ENOSPC)
SLOW_WRITE = 8.0  # times slower than the median: file systems vary more than devices
SLOW_WRITE_S = 0.5  # a shorter write is not reported
RECENT_S = 24 * 3600  # after an older Xid, the site may have reset the GPU; ECC and memory rows still count
USED_SHARE, USED_BYTES = 0.1, 2 * 2**30  # of a device's memory; CUDA itself takes up to 1 GiB


DIFFER = "differ: "  # the start of a finding about hosts without a majority
MOST_GROUPS = 4  # groups of hosts that a finding without a majority names


@dataclass(frozen=True)
class Finding:
    """A problem of one host, or of several hosts if it is unknown which of them causes it.

    harmful: whether training would fail or wait for this host at every step; others: the other hosts, if
    there are several; about: findings with the same `about` on many hosts have one common cause ("": never).
    """

    host: str
    what: str
    harmful: bool = True
    others: tuple[str, ...] = ()
    about: str = ""

    @property
    def excludable(self) -> bool:
        """Whether a start without the host would avoid the problem."""
        return not self.others

    @property
    def names(self) -> str:
        """The host, or all of them."""
        return listed_hosts([self.host, *self.others])

    @property
    def line(self) -> str:
        return f"{self.names}{'' if self.what.startswith(DIFFER) else ':'} {self.what}"

    @property
    def recorded(self) -> HostFinding:
        return HostFinding(self.names, self.what, self.harmful, self.excludable)


def findings(hosts: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """All findings, by host in the order of `hosts`.

    hosts: host -> facts of `host_facts` with `devices` (name, total_bytes, used_bytes of each), `matrix_s`
    (the shortest time of a product on each device) and `differing` (texts about its packages).
    """
    checks = (_versions, _devices, _cpus, _memory, _disks, _clocks, _speeds)
    unordered = [finding for check in checks for finding in check(hosts)]
    order = list(hosts)
    return join_shared(sorted(unordered, key=lambda finding: order.index(finding.host)), hosts=len(hosts))


def join_shared(findings: Sequence[Finding], *, hosts: int) -> list[Finding]:
    """Join the findings about the same thing on at least half of all hosts (two or more) to one finding.

    An example is a full folder that all hosts share: a run without these hosts would fail there too. The
    joint findings come first.

    hosts: the number of all hosts.
    """
    groups: dict[str, dict[str, Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.about, {}).setdefault(finding.host, finding)
    shared = {
        about: group
        for about, group in groups.items()
        if about and len(group) > 1 and 2 * len(group) >= hosts
    }
    joint = []
    for group in shared.values():
        first, *others = group.values()
        what = f"{first.what} (shared by {len(group)} of {hosts} hosts)"
        harmful = any(finding.harmful for finding in group.values())
        joint.append(Finding(first.host, what, harmful, others=tuple(other.host for other in others)))
    return joint + [finding for finding in findings if finding.about not in shared]


def _differences(
    about: str,
    values: Mapping[str, Hashable],
    *,
    show: Callable[[str], str],
    accuse: Callable[[str], str] | None = None,
    harmful: bool = True,
) -> Iterator[Finding]:
    """A finding for each host whose value is not that of most hosts; without a majority, one for all hosts.

    values: by host; show: host -> its value as text; accuse: host -> what is wrong with it, if there is a
    majority.
    """
    groups: dict[Hashable, list[str]] = {}
    for host, value in values.items():
        groups.setdefault(value, []).append(host)
    usual = max(groups.values(), key=len)
    if 2 * len(usual) > len(values):
        for host in values:
            if host not in usual:
                text = accuse(host) if accuse else f"{about} {show(host)}, and {show(usual[0])} elsewhere"
                yield Finding(host, text, harmful)
        return
    few = len(values) == 2
    texts = [show(group[0]) + ("" if few else f" ({listed_hosts(group)})") for group in groups.values()]
    more = [f"{len(texts) - MOST_GROUPS} more"] * (len(texts) > MOST_GROUPS)
    yield _differ(values, f"{about} {' / '.join([*texts[:MOST_GROUPS], *more])}", harmful=harmful)


def _differ(hosts: Iterable[str], what: str, *, harmful: bool) -> Finding:
    first, *others = hosts
    return Finding(first, f"{DIFFER}{what}", harmful, others=tuple(others))


def _versions(hosts: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    for name in next(iter(hosts.values()))["versions"]:
        values = {host: facts["versions"].get(name) for host, facts in hosts.items()}
        if name == "packages":
            texts = {
                host: "; ".join(facts.get("differing", ())) or "unknown" for host, facts in hosts.items()
            }
            accused = {host: f"other packages: {text}" for host, text in texts.items()}
            yield from _differences(name, values, show=texts.__getitem__, accuse=accused.__getitem__)
        else:
            texts = {host: value or "missing" for host, value in values.items()}
            yield from _differences(name, values, show=texts.__getitem__)


def _devices(hosts: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    kinds = {host: tuple(device["name"] for device in facts["devices"]) for host, facts in hosts.items()}
    yield from _differences("devices", kinds, show=lambda host: _listed(kinds[host]))
    for host, facts in hosts.items():
        for index, device in enumerate(facts["devices"]):
            if device["used_bytes"] > max(USED_SHARE * device["total_bytes"], USED_BYTES):
                used = f"{device['used_bytes'] / 1e9:.1f} of {device['total_bytes'] / 1e9:.1f} GB"
                yield Finding(
                    host, f"device {index}: {used} are used by other processes", about="used memory"
                )
        for index, gpu in enumerate(facts["gpus"]):
            for trouble in _troubles(gpu):
                yield Finding(host, f"GPU {index}: {trouble}")
            for xid in gpu.get("xids", ()):
                yield from _xid(host, xid, gpu=f"GPU {index} ({xid['bus']})")


def _troubles(gpu: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a GPU. Each host has its own cause, even if two have the same trouble."""
    if gpu["uncorrected_errors"]:
        yield f"{gpu['uncorrected_errors']} memory errors that ECC could not correct"
    if gpu["bad_rows"]:
        yield "rows of its memory wait for a reset or can't be replaced"
    if gpu["throttled"]:
        yield f"low clocks ({', '.join(gpu['throttled'])})"
    if gpu.get("foreign"):
        yield f"used by other processes ({', '.join(map(str, gpu['foreign']))})"


def _xid(host: str, xid: Mapping[str, Any], *, gpu: str) -> Iterator[Finding]:
    """An error of the GPU itself. Errors of programs and unknown errors are only in the facts."""
    meaning = MEANINGS.get(xid["xid"])
    if meaning is not None and meaning.harm != PROGRAM:
        is_recent = xid["last_s_ago"] <= RECENT_S
        when = _ago(xid["last_s_ago"])
        times = f"{xid['count']} times, the last {when}" if xid["count"] > 1 else when
        text = f"{gpu}: {describe(xid['xid'])}, {times}"
        yield Finding(host, text, harmful=meaning.harm == HARMFUL and is_recent)


def _ago(time_s: float) -> str:
    if time_s < 60:
        return "now"
    return f"{time_s / 60:.0f} min ago" if time_s < 3600 else f"{time_s / 3600:.1f} h ago"


def _cpus(hosts: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Find hosts with another CPU model, if CPUs do the work."""
    models = {host: facts["cpu"]["model"] for host, facts in hosts.items()}
    if all(device["name"] == "cpu" for facts in hosts.values() for device in facts["devices"]):
        yield from _differences("CPU", models, show=models.__getitem__, harmful=False)


def _memory(hosts: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    for host, facts in hosts.items():
        total, available = facts["cpu"]["total_bytes"], facts["cpu"]["available_bytes"]
        if total and available is not None and available < LEAST_AVAILABLE_SHARE * total:
            sizes = f"{available / 1e9:.1f} of {total / 1e9:.1f} GB"
            yield Finding(host, f"only {sizes} of its memory are free", about="memory")


def _disks(hosts: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    for purpose in dict.fromkeys(purpose for facts in hosts.values() for purpose in facts["disks"]):
        disks = {host: facts["disks"][purpose] for host, facts in hosts.items() if purpose in facts["disks"]}
        rates = [disk["write_bytes_per_s"] for disk in disks.values() if "error" not in disk]
        for host, disk in disks.items():
            where = f"{purpose} folder {disk['folder']}"
            is_harmful = not disk["cache"]  # without a cache, a run is slower
            if "error" in disk:
                # If no host can write to a cache, the site has made it read-only on purpose.
                if is_harmful or rates or disk["error"] == NO_SPACE:
                    yield Finding(host, f"{where}: {disk['error']}", is_harmful, about=purpose)
            elif disk["free_bytes"] < LEAST_FREE_BYTES:
                free = f"{disk['free_bytes'] / 1e9:.2f} GB free"
                yield Finding(host, f"{where}: {free}", is_harmful, about=purpose)
            elif disk["write_s"] > SLOW_WRITE_S and disk["write_bytes_per_s"] * SLOW_WRITE < median(rates):
                rate = f"{disk['write_bytes_per_s'] / 1e6:.1f} MB/s, and {median(rates) / 1e6:.1f} elsewhere"
                yield Finding(host, f"{where}: writes {rate}", harmful=False)


def _clocks(hosts: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    times = {host: facts["time_s"] for host, facts in hosts.items()}
    middle = median(times.values())
    off = {
        host: time_s - middle
        for host, time_s in times.items()
        if abs(time_s - middle) > LARGEST_SKEW_S + hosts[host]["time_tolerance_s"]
    }
    if off and 2 * len(off) >= len(hosts):
        skew_s = max(times.values()) - min(times.values())
        yield _differ(times, f"clocks by {skew_s:.1f} s", harmful=False)
    else:
        for host, skew_s in off.items():
            yield Finding(host, f"its clock is {skew_s:+.1f} s off", harmful=False)


def _speeds(hosts: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    times_s = [time_s for facts in hosts.values() for time_s in facts["matrix_s"]]
    if not times_s:
        return
    if len(hosts) == 1:
        yield from _speeds_inside(*next(iter(hosts.items())))
        return
    middle = median_low(times_s)
    for host, facts in hosts.items():
        slow = [time_s for time_s in facts["matrix_s"] if time_s > SLOW * middle]
        if slow:
            yield Finding(host, f"a {product_takes(max(slow), middle)}", about="matrix product")


def _speeds_inside(host: str, facts: Mapping[str, Any]) -> Iterator[Finding]:
    """The devices of a single host, if they are GPUs and no two processes share one."""
    ids = {device.get("uuid") for device in facts["devices"]}
    if None in ids or len(ids) < len(facts["devices"]):
        return
    middle = median_low(facts["matrix_s"])
    for index, time_s in enumerate(facts["matrix_s"]):
        if time_s > SLOW * middle:
            yield Finding(host, f"device {index}: a {product_takes(time_s, middle)}")


def product_takes(time_s: float, usual_s: float) -> str:
    """The end of a sentence about a slow device."""
    return f"matrix product takes {time_s * 1e3:.1f} ms, and {usual_s * 1e3:.1f} elsewhere"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in Counter(names).items()) or "none"
