"""Where the time of a run went: each second between its submission and its end has one cause.

The times stand in `attempts.jsonl`: when a start was asked for, when its job or its agent began, when it
worked last, and when it ended. What it did in between stands in its lines of metrics (`spent_s`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

from hpc_parallel.record.values import number, table, text

CAUSES: Mapping[str, str] = {  # the keys of `time_use_s` in summary.json
    "queue": "waiting in the queue",
    "start": "starting: setup, imports, connecting, checks, loading",
    "steps": "steps that count",
    "repeated": "steps that a restart computed again",
    "validation": "validation",
    "saving": "waiting for saves",
    "restart": "waiting for a restart",
    "idle": "idle: the end was noticed and concluded",
    "away": "ended, until somebody resumed it",
}
USEFUL = "steps"
_BETWEEN_STEPS = ("validation", "saving")  # known in seconds, not by when they began
_BEGINS = {"submitted": "queue", "resumed": "queue", "launched": "start", "ended": "restart"}
_Lines = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Interval:
    """A time with one cause. Validation and saves are parts of the steps between which they ran."""

    begun: datetime
    ended: datetime
    cause: str

    @property
    def seconds(self) -> float:
        return (self.ended - self.begun).total_seconds()


def time_use(events: _Lines, *, last_line: Mapping[str, Any] | None, until: datetime) -> dict[str, float]:
    """Seconds by cause (CAUSES); their sum is the time from the first event to `until`. Empty without events.

    events: the lines of attempts.jsonl; last_line: of the metrics. The newest start works until `until` if no
    event says that it ended.
    """
    all_events = [*events, *_newest_work(events, last_line, until=until)]
    parts = _intervals(all_events, until=until)
    if not parts:
        return {}
    use = {cause: sum(part.seconds for part in parts if part.cause == cause) for cause in CAUSES}
    for cause in _BETWEEN_STEPS:
        spent = sum(_spent(event).get(cause, 0.0) for event in all_events)
        use[cause] = min(spent, use[USEFUL])
        use[USEFUL] -= use[cause]
    return use


def intervals(events: _Lines, *, last_line: Mapping[str, Any] | None, until: datetime) -> list[Interval]:
    """The intervals of the run in their order, without gaps; see `time_use`."""
    return _intervals([*events, *_newest_work(events, last_line, until=until)], until=until)


def useful_share(use: Mapping[str, float]) -> float | None:
    """The share of useful time (ETTR): steps that count, of all time but that until somebody resumed it."""
    wanted = sum(use.values()) - use.get("away", 0.0)
    return use.get(USEFUL, 0.0) / wanted if wanted > 0 else None


def energy_use(events: _Lines, *, last_line: Mapping[str, Any] | None, until: datetime) -> dict[str, float]:
    """`gpu_kwh` of all starts, of `gpus` (in the start that knows the fewest) of all, `of_gpus`.

    Empty if no GPU has a counter of its energy. Arguments: those of `time_use`.
    """
    all_events = [*events, *_newest_work(events, last_line, until=until)]
    energies = [
        {key: number(value) or 0.0 for key, value in energy.items()}
        for event in all_events if (energy := table(event.get("energy")))
    ]  # fmt: skip
    if not any(energy.get("gpus") for energy in energies):
        return {}
    fewest = min(energies, key=lambda energy: energy.get("gpus", 0.0) - energy.get("of_gpus", 0.0))
    counted = {key: int(fewest.get(key, 0.0)) for key in ("gpus", "of_gpus")}
    return {"gpu_kwh": sum(energy.get("joules", 0.0) for energy in energies) / 3.6e6, **counted}


def seconds_after(lines: _Lines, *, step: int) -> float:
    """How long the steps after `step` took, from the lines of metrics."""
    total = 0.0
    for before, line in pairwise([{"step": 0}, *lines]):
        steps = line["step"] - max(before["step"], step)
        if steps > 0:
            total += steps * _step_s(before, line)
    return total


def work_of_killed(
    lines: _Lines, *, began: datetime, ended: datetime | None, kept_step: int = 0
) -> dict[str, Any]:
    """The event `worked` of a start that could not write it, from its lines of metrics.

    began, ended: when it began, and when its end was noticed (None: it was not). kept_step: the step from
    which the next start continues. After its last line the start worked for at most as long as between the
    last two; nobody has what it computed there after `kept_step`.
    """
    own = [line for line in lines if (at := time_of(line.get("time"))) is not None and at >= began]
    if not own:
        return {"worked": began.isoformat(), "spent_s": {}}
    last, at = own[-1], time_of(own[-1]["time"]) or began
    before = own[-2] if len(own) > 1 else {"step": 0}
    tail_s = 0.0 if ended is None else max(0.0, (ended - at).total_seconds())
    step_s = _step_s(before, last)
    tail_s = min(tail_s, (last["step"] - before["step"]) * step_s)
    kept_s = min(tail_s, max(0, kept_step - last["step"]) * step_s)
    spent = _spent(last) or {USEFUL: (at - began).total_seconds()}
    spent[USEFUL] = spent.get(USEFUL, 0.0) + tail_s
    spent["repeated"] = tail_s - kept_s
    return {"worked": (at + timedelta(seconds=tail_s)).isoformat(), "spent_s": spent, **_energy(last)}


def newest(events: _Lines, key: str) -> datetime | None:
    """When the newest start has done something: the time of its event `key`, or None."""
    for event in reversed(events):
        if (at := time_of(event.get(key))) is not None:
            return at
        if not event.keys().isdisjoint({"submitted", "resumed", "launched", "began"}):
            return None
    return None


def _newest_work(events: _Lines, last_line: Mapping[str, Any] | None, *, until: datetime) -> _Lines:
    """The event `worked` of a start that is still going on, or that was killed a moment ago."""
    began = newest(events, "began")
    if began is None or newest(events, "worked") is not None or last_line is None:
        return []
    at, spent = time_of(last_line.get("time")), _spent(last_line)
    if at is None or at < began or not spent:
        return []
    if newest(events, "ended") is None:
        spent[USEFUL] = spent.get(USEFUL, 0.0) + (until - at).total_seconds()
        at = until
    return [{"worked": at.isoformat(), "spent_s": spent, **_energy(last_line)}]


def _energy(line: Mapping[str, Any]) -> dict[str, Any]:
    return {"energy": energy} if (energy := table(line.get("energy"))) else {}


def _intervals(events: _Lines, *, until: datetime) -> list[Interval]:
    begins: list[tuple[datetime, str]] = []

    def begin(at: datetime, cause: str) -> None:
        begins.append((max([at, *(earlier for earlier, _ in begins[-1:])]), cause))  # clocks of hosts differ

    trains: datetime | None = None  # from when a start that does not say what it spends has trained
    for event in _in_order(events):
        spent = _spent(event)
        for key, cause in _BEGINS.items():
            if (at := time_of(event.get(key))) is not None:
                if trains is not None:
                    begin(trains, USEFUL)
                    trains = None
                if begins:
                    begins[-1] = (begins[-1][0], _corrected(begins[-1][1], cause))
                begin(at, cause)
        if (at := time_of(event.get("worked"))) is not None:
            trains = None
            begin(
                at - timedelta(seconds=sum(spent.get(cause, 0.0) for cause in (USEFUL, *_BETWEEN_STEPS))),
                USEFUL,
            )
            begin(at, "idle")
        _repeat(begins, spent.get("repeated", 0.0))
        if (at := time_of(event.get("began"))) is not None:
            trains = at
    if trains is not None:
        begin(trains, USEFUL)
    if begins:
        begin(until, "")
    return [Interval(at, end, cause) for (at, cause), (end, _) in pairwise(begins)]


def _in_order(events: _Lines) -> _Lines:
    """The events, with what a start did behind its begin: for a killed start, the next one notes it."""
    ordered: list[Mapping[str, Any]] = []
    for event in events:
        began = (index for index in range(len(ordered) - 1, -1, -1) if "began" in ordered[index])
        ordered.insert(next(began, len(ordered) - 1) + 1 if "worked" in event else len(ordered), event)
    return ordered


def _corrected(cause: str, following: str) -> str:
    """What a time was, as the next event shows."""
    if following == "queue":
        return "away"
    if following == "start" and cause == "idle":  # nothing was left that could note the end
        return "restart"
    return cause


def _repeat(begins: list[tuple[datetime, str]], seconds: float) -> None:
    """Let the last steps up to now, `seconds` long, be those that a later start computes again."""
    for index in range(len(begins) - 2, -1, -1):
        (at, cause), (end, _) = begins[index : index + 2]
        if seconds > 0 and cause == USEFUL:
            taken = min(seconds, (end - at).total_seconds())
            begins.insert(index + 1, (end - timedelta(seconds=taken), "repeated"))
            seconds -= taken


def _spent(event: Mapping[str, Any]) -> dict[str, float]:
    """Seconds by cause; negative ones and those of another type count as none."""
    return {cause: max(0.0, number(value) or 0.0) for cause, value in table(event.get("spent_s")).items()}


def _step_s(before: Mapping[str, Any], line: Mapping[str, Any]) -> float:
    """The time of one step between two lines of metrics."""
    if (seconds := number(line.get("step_time_s"))) is not None:
        return seconds
    begun, at = time_of(before.get("time")), time_of(line.get("time"))
    steps = line["step"] - before["step"]
    return (
        0.0 if begun is None or at is None or steps <= 0 else max(0.0, (at - begun).total_seconds()) / steps
    )


def time_of(value: Any) -> datetime | None:
    """A time of this package, in UTC; None for anything else."""
    try:
        at = datetime.fromisoformat(text(value) or "")
    except ValueError:
        return None
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)
