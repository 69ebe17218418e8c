"""Where the time of a run went (`record/time_use.py`), against timelines that are added up by hand."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
import torch

from hpc_parallel.record.time_use import (
    energy_use,
    intervals,
    seconds_after,
    time_use,
    useful_share,
    work_of_killed,
)
from hpc_parallel.training import metrics

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float) -> str:
    return (BEGAN + timedelta(seconds=seconds)).isoformat()


def after(seconds: float) -> datetime:
    return BEGAN + timedelta(seconds=seconds)


def line(step: int, seconds: float, **spent_s: float) -> Mapping[str, Any]:
    return {"step": step, "time": at(seconds), "step_time_s": 1.0, "spent_s": spent_s}


# A start trains from second 125; its last line is that of step 60, and it is killed 30 s later, when 30 steps
# more were done. The next one goes on after step 40. It saves and ends, and somebody resumes the run.
LINES = [line(10, 140, steps=12, validation=3, saving=0), line(60, 200, steps=62, validation=8, saving=5)]
FIRST = [
    {"submitted": at(0)},
    {"launched": at(100)},
    {"began": at(120)},
    {"ended": at(230)},
    {"launched": at(240)},
]
KILLED = work_of_killed(LINES, began=after(120), ended=after(230))
SECOND = [
    {"began": at(250), "spent_s": {"repeated": seconds_after(LINES, step=40)}},
    {"worked": at(400), "spent_s": {"steps": 130, "validation": 10, "saving": 5}},
    {"ended": at(410)},
]
RESUMED = [{"resumed": at(500)}, {"launched": at(520)}]


def test_each_second_of_a_run_has_one_cause() -> None:
    use = time_use([*FIRST, KILLED, *SECOND, *RESUMED], last_line=LINES[-1], until=after(530))
    expected = {
        "queue": 100 + 20, "start": 25 + 15 + 10, "steps": (105 - 50 - 13) + (145 - 15), "repeated": 30 + 20,
        "validation": 8 + 10, "saving": 5 + 5, "restart": 10, "idle": 10, "away": 90,
    }  # fmt: skip
    assert use == pytest.approx(expected)
    assert sum(use.values()) == pytest.approx(530)
    assert useful_share(use) == pytest.approx(172 / (530 - 90))


def test_the_lost_steps_are_the_last_ones_before_the_failure() -> None:
    parts = intervals([*FIRST, KILLED, *SECOND], last_line=None, until=after(410))
    shown = [((part.begun - BEGAN).seconds, part.cause) for part in parts if part.seconds]
    assert shown == [
        (0, "queue"), (100, "start"), (125, "steps"), (180, "repeated"), (200, "repeated"), (230, "restart"),
        (240, "start"), (255, "steps"), (400, "idle"),
    ]  # fmt: skip
    assert all(part.ended == following.begun for part, following in pairwise(parts))


@pytest.mark.parametrize(
    ("events", "until", "expected"),
    [
        (FIRST[:1], 50, {"queue": 50}),
        (FIRST[:2], 110, {"queue": 100, "start": 10}),
        # Goes on: what was done since the last line are steps.
        (FIRST[:3], 210, {"queue": 100, "start": 25, "steps": 85 - 13, "validation": 8, "saving": 5}),
        # Killed a moment ago: what was done since the last line is lost, and not known to be steps.
        (FIRST[:4], 230,
         {"queue": 100, "start": 25, "steps": 75 - 13, "validation": 8, "saving": 5, "idle": 30}),
        # A host was lost with all that could have noted the end: from the last work to the next launch.
        ([*FIRST[:3], FIRST[4], work_of_killed(LINES, began=after(120), ended=None), {"began": at(250)}], 260,
         {"queue": 100, "start": 25 + 10, "steps": 62 + 10, "validation": 8, "saving": 5, "restart": 40}),
        # A version that recorded less.
        ([{"began": at(120)}, {"ended": at(230)}], 231, {"steps": 110, "restart": 1}),
        ([], 10, {}),
        # Lines of somebody else.
        ([{"submitted": 5}, {"launched": "x"}, {"worked": at(1), "spent_s": {"steps": "x", "saving": -3}}], 2,
         {"idle": 1}),
    ],
)  # fmt: skip
def test_a_run_that_is_not_over_and_records_that_are_incomplete(
    events: list[Mapping[str, Any]], until: float, expected: Mapping[str, float]
) -> None:
    newest = LINES[-1] if FIRST[0] in events else None
    use = time_use(events, last_line=newest, until=after(until))
    assert {cause: seconds for cause, seconds in use.items() if seconds} == pytest.approx(expected)


@pytest.mark.parametrize(("compiles", "steps_s", "validation_s"), [(False, 52.0, 8.0), (True, 9.0, 1.0)])
def test_a_first_step_that_compiles_belongs_to_the_start(
    compiles: bool, steps_s: float, validation_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 0.0
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: clock)
    scale = metrics.Scale(1, None, 1.0, 1, 1, None)
    kept = metrics.Metrics(scale, device=torch.device("cpu"), compiles=compiles)
    kept.leave_out(7.0, cause="validation")
    clock = 50.0  # the first step ends
    kept.note(metrics.StepResult(torch.zeros(()), torch.zeros(())))
    clock = 55.0
    kept.note(metrics.StepResult(torch.zeros(()), torch.zeros(())))
    kept.leave_out(1.0, cause="validation")
    clock = 60.0
    assert kept.spent_s == {"steps": steps_s, "validation": validation_s, "saving": 0.0}


def test_steps_that_an_earlier_start_left_out_are_counted() -> None:
    """Also by a start that leaves out none, because it has another precision."""
    scale, cpu = metrics.Scale(1, None, 1.0, 1, 1, None), torch.device("cpu")
    lines = []
    for skipped in (torch.tensor([0.0, 0.0]), torch.tensor([2.0, 1.0]), None):
        kept = metrics.Metrics(scale, device=cpu, skipped_steps=3)
        kept.note(metrics.StepResult(torch.zeros(()), torch.zeros(()), skipped))
        line = kept.line(step=9, learning_rate=0.1)
        lines.append((line["skipped_steps"], line.get("skipped_step")))
    assert lines == [(3, None), (5, 8), (3, None)]


@pytest.mark.parametrize(("kept_step", "repeated_s"), [(0, 30), (60, 30), (75, 15), (90, 0), (100, 0)])
def test_what_was_copied_after_the_last_line_is_not_repeated(kept_step: int, repeated_s: float) -> None:
    """30 steps of a second after the line of step 60."""
    event = work_of_killed(LINES, began=after(120), ended=after(230), kept_step=kept_step)
    assert event["spent_s"] == {"steps": 92, "validation": 8, "saving": 5, "repeated": repeated_s}


def energy(joules: float, gpus: int) -> Mapping[str, Any]:
    return {"energy": {"joules": joules, "gpus": gpus, "of_gpus": 4}}


def test_the_energy_of_all_starts_is_added_up() -> None:
    """That of a killed start stands in its last line; a start on another host may know fewer GPUs."""
    lines = [{**LINES[0], **energy(1e6, 4)}, {**LINES[1], **energy(3.6e6, 4)}]
    killed = work_of_killed(lines, began=after(120), ended=after(230), kept_step=0)
    ended = {**SECOND[1], **energy(1.8e6, 3)}
    newest = {**line(90, 700, steps=10), **energy(0.9e6, 4)}
    events = [*FIRST, killed, SECOND[0], ended, SECOND[2], *RESUMED, {"began": at(600)}]
    use = energy_use(events, last_line=newest, until=after(710))
    assert use == {"gpu_kwh": pytest.approx(1.75), "gpus": 3, "of_gpus": 4}
    assert energy_use([*FIRST, KILLED, *SECOND], last_line=None, until=after(410)) == {}
    assert energy_use([{**SECOND[1], **energy(0, 0)}], last_line=None, until=after(410)) == {}
    damaged = [{"energy": 3}, {"energy": {"joules": "x", "gpus": []}}]
    assert energy_use(damaged, last_line=None, until=BEGAN) == {}


def test_clocks_of_hosts_that_differ_give_no_negative_times() -> None:
    use = time_use(
        [{"submitted": at(100)}, {"launched": at(95)}, {"began": at(99)}], last_line=None, until=after(120)
    )
    assert min(use.values()) >= 0
    assert sum(use.values()) == pytest.approx(20)
