"""What the ranks of a run that hangs tell of themselves, and who of them is behind.

A rank writes `logs/rank-<r>.hang.json` beside its stacks (`.stacks`). Free of torch: the end of a batch
script reads them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json, write_text
from hpc_parallel.supervise import failure
from hpc_parallel.supervise.failure import Record
from hpc_parallel.supervise.progress import PHASES

if TYPE_CHECKING:
    from hpc_parallel.supervise.world import World

LOOKS = 10  # how often a watchdog looks within the time-out
PROBE_S = 4.0  # for the connection to rank 0's host
_SLACK_S = 5.0  # a probe, and a file that another host's file system is slow to show


@dataclass(frozen=True)
class Collective:
    """The last that a rank began, by torch's flight recorder."""

    name: str
    group: str
    sequence: int  # of its group
    complete: bool

    def __str__(self) -> str:
        return f"{self.name} {self.sequence} of {self.group}"


@dataclass(frozen=True)
class Standing:
    """Where one rank stood when the run hung. `phase` and `step` are None where only its supervisor could
    look, because the process was stopped or its Python could not run."""

    rank: int
    host: str
    world_size: int
    attempt: str
    phase: str | None
    step: int | None
    idle_s: float  # since its last mark, while it could run
    where: str  # file:line in function: the innermost frame that is not torch's
    stack: list[str]
    collective: Collective | None = None
    stopped: bool = False  # by SIGSTOP or the like
    unreachable: str | None = None  # the address of rank 0, where a connection to it failed

    @property
    def position(self) -> tuple[int, int, bool]:
        """Smaller is further behind; in the same phase one that is in no collective lets the others wait."""
        if self.phase is None or self.step is None:
            return (-1, -1, False)
        in_collective = self.collective is not None and not self.collective.complete
        return (self.step, PHASES.index(self.phase), in_collective)

    @property
    def place(self) -> str:
        if self.phase is None:
            return f"at {self.where}"
        words = {"data": "loading the data of step", "log": "the metrics of step",
                 "validate": "the validation after step", "save": "the checkpoint of step"}  # fmt: skip
        phase = f"the {self.phase}" if self.phase in ("start", "done") else words.get(self.phase, "step")
        return f"in {phase}{'' if self.phase == 'start' else f' {self.step}'} at {self.where}"


def grace_s(timeout_s: float) -> float:
    """How long a rank that has reported waits for the others: until each has looked, and a connection
    has failed."""
    return 2 * timeout_s / LOOKS + _SLACK_S


def report(folder: RunFolder, standing: Standing) -> None:
    write_json(_path(folder, standing.rank), asdict(standing))


def forget(folder: RunFolder, *, world: World) -> None:
    """Drop what an earlier attempt left, before this one starts; not every launcher names its attempts."""
    _path(folder, world.rank).unlink(missing_ok=True)
    stacks(folder, world.rank).unlink(missing_ok=True)
    if world.rank == 0:
        (folder.rendezvous / f"{world.attempt}.hang").unlink(missing_ok=True)


def reported(folder: RunFolder, *, attempt: str) -> list[Standing]:
    """Of this attempt, by rank."""
    found = [failure.readable(path) for path in folder.logs.glob("rank-*.hang.json")]
    standings = [_standing(values) for values in found if values and values.get("attempt") == attempt]
    return sorted(standings, key=lambda standing: standing.rank)


def all_reported(folder: RunFolder, *, world: World) -> bool:
    return len(reported(folder, attempt=world.attempt)) == world.world_size


def raise_alarm(folder: RunFolder, *, attempt: str) -> None:
    """Tell every rank to report: one that is merely slow would not find the time-out by itself."""
    write_text(folder.rendezvous / f"{attempt}.hang", "")


def alarm(folder: RunFolder, *, attempt: str) -> bool:
    # Listed, not looked up: an NFS client may keep "not there" in its cache for a minute.
    return f"{attempt}.hang" in os.listdir(folder.rendezvous)


def stacks(folder: RunFolder, rank: int) -> Path:
    return folder.logs / f"rank-{rank}.stacks"


def spot(file: str, line: int | None, name: str) -> str:
    """`folder/file.py:12 in name`"""
    return f"{'/'.join(Path(file).parts[-2:])}:{line} in {name}"


def cause_of(folder: RunFolder, records: Sequence[Record]) -> Record | None:
    """The rank that a hang is to be blamed on, with what it did; None where no rank reported one.

    records: of the newest attempt. An error of a rank's own is no hang.
    """
    if not any(record.kind == failure.HANG for record in records):
        return None
    attempt = records[0].attempt
    standings = reported(folder, attempt=attempt)
    if not standings:
        return None
    told = {standing.rank for standing in standings} | {
        record.rank for record in records if record.kind == failure.LOST_PEER
    }
    silent = [rank for rank in range(standings[0].world_size) if rank not in told]
    blamed, message = _verdict(standings, silent=silent, records=records)
    first = min(records, key=lambda record: record.time_ns)
    own = next((record for record in records if record.rank == blamed.rank), first)
    return replace(
        own, rank=blamed.rank, host=blamed.host, kind=failure.HANG, message=message, signal=None,
        traceback=blamed.stack or own.traceback,
    )  # fmt: skip


def _verdict(
    standings: Sequence[Standing], *, silent: Sequence[int], records: Sequence[Record]
) -> tuple[Standing, str]:
    """Whom to blame and why; what is certain comes first."""
    ahead = max(standings, key=lambda standing: standing.position)
    for standing in standings:
        if standing.stopped:
            return standing, f"stopped by a signal (state T) {standing.place}; {_others(ahead)}"
    cut = [standing for standing in standings if standing.unreachable]
    if cut:
        return _lost_link(standings, cut=cut)
    for standing in standings:
        if standing.phase is None:
            return standing, f"hangs {standing.place}, where its Python can't run; {_others(ahead)}"
    if silent:
        hosts = {record.rank: record.host for record in records}
        lost = replace(ahead, rank=silent[0], host=hosts.get(silent[0], "a host that is silent"), stack=[])
        return lost, f"gave no sign for {ahead.idle_s:.0f} s: its host may be cut off; {_others(ahead)}"
    behind = min(standings, key=_order(standings))
    if _order(standings)(behind) == _order(standings)(ahead):
        words = f"no rank is behind and rank 0 answers, but all stand {ahead.place}"
        return behind, f"{words} for {behind.idle_s:.0f} s{_last(ahead)}"
    return behind, f"hangs {behind.place} for {behind.idle_s:.0f} s; {_others(ahead)}"


def _order(standings: Sequence[Standing]) -> Callable[[Standing], tuple[int, int, bool, int]]:
    """By position; then by the number of the last collective, where all are in one group."""
    groups = {standing.collective.group if standing.collective else None for standing in standings}

    def key(standing: Standing) -> tuple[int, int, bool, int]:
        sequence = standing.collective.sequence if len(groups) == 1 and standing.collective else 0
        return (*standing.position, sequence)

    return key


def _lost_link(standings: Sequence[Standing], *, cut: Sequence[Standing]) -> tuple[Standing, str]:
    """Of the host that is cut off: where all others can't reach rank 0's, that one."""
    home = standings[0].host
    others = {standing.host for standing in standings} - {home}
    hosts = sorted({standing.host for standing in cut})
    blamed = standings[0] if len(others) > 1 and others == set(hosts) else cut[0]
    return blamed, (
        f"lost link: {', '.join(hosts)} can't reach rank 0 on {home} ({cut[0].unreachable}) any more; "
        f"it stands {blamed.place}{_last(blamed)}"
    )


def _others(ahead: Standing) -> str:
    return f"others wait {ahead.place}{_last(ahead)}"


def _last(standing: Standing) -> str:
    last = standing.collective
    return "" if last is None or last.complete else f" ({last})"


def _standing(values: dict[str, object]) -> Standing:
    collective = values.pop("collective")
    made = Standing(**values)  # type: ignore[arg-type]
    return replace(made, collective=Collective(**collective)) if isinstance(collective, dict) else made


def _path(folder: RunFolder, rank: int) -> Path:
    return folder.logs / f"rank-{rank}.hang.json"
