"""Reads the transports of NCCL or RCCL from its log (NCCL_DEBUG=INFO; versions 2.18 to 2.30)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_parallel.machine.fabric import set_unset
from hpc_parallel.record.run_folder import RunFolder

DEBUG, FILE, SUBSYSTEMS = "NCCL_DEBUG", "NCCL_DEBUG_FILE", "INIT,NET"
INSIDE, ACROSS = "inside a node", "across nodes"
P2P, SHARED, SOCKETS, INFINIBAND, LIBFABRIC = "P2P", "SHM", "NET/Socket", "NET/IB", "NET/OFI"
DIRECT = "GPUDirect RDMA"

# RCCL's messages begin with `NCCL INFO` too, and most end with ` comm 0x55 nRanks 08`.
_VERSION = re.compile(r"(?P<library>NCCL|RCCL) version(?: :)? (?P<version>\d+\.\d+\.\d+)")
_NETWORK = re.compile(r"NCCL INFO Using network (?P<name>.+)")
# Before 2.19, the transport SHM names no connection: `Channel 00 : 0[0] -> 1[1] via SHM/direct/direct`.
_CHANNEL = re.compile(
    r"NCCL INFO Channel \d+(?:/\d+)? : (?P<source>\d+)\[[0-9a-f]+\] -> (?P<target>\d+)\[[0-9a-f]+\]"
    r"(?P<receive> \[receive\])?(?: \[send\])? via (?P<carrier>\S.*?)(?: comm 0x[0-9a-f]+ nRanks \d+)?\s*$"
)
_CHANNELS = re.compile(
    r"NCCL INFO (?P<rings>\d+) coll channels,(?: \d+ collnet channels,)? (?P<nvls>\d+) nvls"
)
_NVLS = re.compile(r"NCCL INFO NVLS multicast support is (?P<no>not )?available")


def keep_log(folder: RunFolder, *, rank: int | str, environment: MutableMapping[str, str]) -> dict[str, str]:
    """Make NCCL log its start to a file of the rank, unless the user or the site has chosen a log.

    Returns the reason for each variable that was set.
    """
    if DEBUG in environment:
        return {}
    values = {DEBUG: "INFO", "NCCL_DEBUG_SUBSYS": SUBSYSTEMS, FILE: str(folder.nccl_log(rank))}
    return set_unset(environment, values, reason="the proof of transport reads this log")


@dataclass
class NcclTransport:
    """The transport that one rank uses, or that all ranks use after `merged`.

    library: NCCL, or RCCL on AMD's GPUs. network: the name that the library prints. pairs: `INSIDE` or
    `ACROSS` -> carrier -> the channels that it carries.
    """

    library: str = "NCCL"
    version: str | None = None
    network: str | None = None
    channels: int = 0
    nvls_channels: int = 0
    nvls_available: bool = False
    rings: bool = False
    trees: bool = False
    pairs: dict[str, Counter[str]] = field(default_factory=dict)

    @property
    def across(self) -> list[str]:
        """The carriers between nodes."""
        return sorted(self.pairs.get(ACROSS, ()))

    @property
    def gpudirect(self) -> dict[str, str]:
        """Whether network cards read GPU memory (on, off or mixed), by class of pair that uses a network."""
        states = {}
        for pair, carriers in self.pairs.items():
            direct = {carrier.endswith(DIRECT) for carrier in carriers if carrier.startswith("NET/")}
            if direct:
                states[pair] = "mixed" if len(direct) > 1 else "on" if direct.pop() else "off"
        return states

    def as_record(self) -> dict[str, Any]:
        """For `environment.json`."""
        return {**vars(self), "gpudirect": self.gpudirect}


def parse(log: str, *, hosts: Sequence[str]) -> NcclTransport:
    """Read the log of one rank, written until `transport.use_connections` has ended.

    Later communicators number their ranks differently, so the log must not include them.

    hosts: the host of each rank.
    """
    result = NcclTransport()
    for line in log.splitlines():
        if match := _VERSION.search(line):
            result.library, result.version = match["library"], match["version"]
        elif match := _NETWORK.search(line):
            result.network = match["name"].strip()
        elif match := _CHANNEL.search(line):
            _count(result, match, hosts=hosts)
        elif match := _CHANNELS.search(line):
            result.channels, result.nvls_channels = int(match["rings"]), int(match["nvls"])
        elif match := _NVLS.search(line):
            result.nvls_available = match["no"] is None
        result.rings |= "NCCL INFO Connected all rings" in line
        result.trees |= "NCCL INFO Connected all trees" in line
    return result


def _count(result: NcclTransport, match: re.Match[str], *, hosts: Sequence[str]) -> None:
    source, target = int(match["source"]), int(match["target"])
    if max(source, target) < len(hosts) and not match["receive"]:  # both ends log a network channel
        pair = INSIDE if hosts[source] == hosts[target] else ACROSS
        result.pairs.setdefault(pair, Counter())[carrier(match["carrier"])] += 1


def carrier(text: str) -> str:
    """The transport in few words: `NET/IB, GPUDirect RDMA` for `NET/IB/0(1)/GDRDMA/Shared`."""
    kind, _, rest = text.strip().partition("/")
    if kind in (P2P, SHARED):
        mode = rest.partition("/")[0]
        return f"{kind} ({mode})" if kind == P2P else kind
    name = rest.partition("/")[0]
    plugin = {"AWS Libfabric": "OFI", "Libfabric": "OFI"}.get(name, "IB" if name.startswith("IB") else name)
    return f"{kind}/{plugin}" + (f", {DIRECT}" if "/GDRDMA" in rest else "")


def merged(parts: Sequence[NcclTransport]) -> NcclTransport:
    """The transport of all ranks: the union of the carriers, and the least number of channels."""
    versioned = next((part for part in parts if part.version), parts[0])
    total = NcclTransport(
        library=versioned.library,
        version=versioned.version,
        network=next((part.network for part in parts if part.network), None),
        channels=min(part.channels for part in parts),
        nvls_channels=min(part.nvls_channels for part in parts),
        nvls_available=all(part.nvls_available for part in parts),
        rings=all(part.rings for part in parts),
        trees=all(part.trees for part in parts),
    )
    for part in parts:
        for pair, carriers in part.pairs.items():
            total.pairs.setdefault(pair, Counter()).update(carriers)
    return total
