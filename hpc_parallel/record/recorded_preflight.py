"""What the checks at the start of a run found, from `preflight.json`, which anybody may have written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated

from hpc_parallel.problems import printable
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.typed import first, read_if_possible

MOST_FINDINGS = 20
MOST_NAMES = 4  # of hosts in a sentence
MOST_ROWS, MOST_COLUMNS, MOST_CHARACTERS = 20, 6, 40  # of the table of versions
MOST_READ, MOST_HOSTS = 100, 4096  # rows and hosts of the file
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


def finding_lines(folder: RunFolder) -> list[tuple[str, str]]:
    """Each host and its problem; empty if there is no problem or the file can't be read."""
    findings = Preflight.read(folder).findings
    return [
        (printable(finding.host), printable(finding.what))
        for finding in findings
        if finding.host and finding.what
    ]


def difference_lines(folder: RunFolder) -> list[str]:
    """The table of versions that differ between the hosts; empty if none does."""
    return difference_table(Preflight.read(folder).differences)


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
    return [*_aligned(cells), *more]


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    head, *rows = ([printable(cell) for cell in row] for row in cells)
    table = [head, *([cell[:MOST_CHARACTERS] for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]


def listed_hosts(hosts: Sequence[str]) -> str:
    """`n1`, `n1 and n2`, `n1, n2, n3 and 97 more`."""
    last = hosts[-1] if len(hosts) <= MOST_NAMES else f"{len(hosts) - MOST_NAMES + 1} more"
    first = hosts[: min(len(hosts), MOST_NAMES) - 1]
    return f"{', '.join(first)} and {last}" if first else last
