"""What a job ran on, from `environment.json`, which anybody may have written.

`record/provenance.py` writes what the submission knows, and rank 0 adds the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any
from zlib import crc32

from hpc_parallel.problems import printable
from hpc_parallel.record.typed import first

UNKNOWN = "unknown"
PAIRS = ("inside a node", "across nodes")
MOST_SHAPES, MOST_LETTERS = 8, 40  # of topologies; of a part's name


@dataclass(frozen=True)
class Transport:
    """What carries the data: `transport` in `environment.json`. None: unknown, or NCCL is not used."""

    library: str = "NCCL"
    version: str | None = None
    network: str | None = None
    channels: int | None = None
    nvls_channels: int | None = None
    nvls_available: bool | None = None
    rings: bool | None = None
    trees: bool | None = None
    pairs: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # pair -> carrier -> channels
    gpudirect: Mapping[str, str] = field(default_factory=dict)  # pair (in PAIRS) -> state
    problem: str | None = None


def _cell(value: Any) -> str:
    return printable(value[:MOST_LETTERS]) if isinstance(value, str) else ""


@dataclass(frozen=True)
class RecordedPart:
    """A GPU or a network card."""

    name: Annotated[str, _cell] = ""
    numa: int | None = None
    model: Annotated[str, _cell] = ""


@dataclass(frozen=True)
class Topology:
    """Hosts with the same parts, and the connection between each two parts."""

    hosts: tuple[str, ...] = ()
    parts: tuple[RecordedPart, ...] = ()
    links: tuple[tuple[Annotated[str, _cell], ...], ...] = ()


@dataclass(frozen=True)
class Place:
    """Where a rank ran. device: `cpu`, or `cuda:0`."""

    host: str | None = None
    device: str | None = None

    @property
    def device_kind(self) -> str | None:
        """`cpu` or `cuda`."""
        return (self.device or "").partition(":")[0] or None


@dataclass(frozen=True)
class Environment:
    """The parts of the file that commands show; `record/recorded_start.py` reads how to start a run again."""

    overrides: tuple[Any | None, ...] | None = None
    config_dir: str | None = None  # the user's folder of configuration files
    device: str | None = None  # the name of the processor
    cuda: str | None = UNKNOWN  # its version; None: the devices are CPUs
    torch: str | None = None  # its version
    git_commit: str | None = None  # of the working directory; None if it is no checkout
    git_diff: str | None = None  # its uncommitted changes
    ranks: tuple[Place | None, ...] = ()  # empty before the first start
    predicted: Mapping[str, float] = field(default_factory=dict)  # planned figures, as in summary.json
    transport: Transport = field(default_factory=Transport)
    topology: Annotated[tuple[Topology, ...], first(MOST_SHAPES)] = ()

    @property
    def versions(self) -> str | None:
        """torch, and the commit and a checksum of its changes; None if neither is known."""
        source = self.git_commit and f"commit {self.git_commit[:8]}"
        if source and self.git_diff:
            source += f" with changes {crc32(self.git_diff.encode(errors='replace')):08x}"
        parts = [self.torch and f"torch {self.torch[:MOST_LETTERS]}", source]
        return printable(", ".join(filter(None, parts))) or None

    @property
    def places(self) -> list[Place]:
        """The place of each rank, by rank."""
        return [place or Place() for place in self.ranks]
