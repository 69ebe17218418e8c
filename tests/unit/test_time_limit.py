"""What ends a run early: it saves before its time limit, and no signal of Slurm ends a save."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from datetime import datetime
from signal import SIGINT, SIGTERM, SIGUSR2

import pytest
import torch.distributed as dist

from hpc_parallel.worker import stop
from hpc_parallel.worker.stop import MARGIN_S, TimeLimit, time_limit_of

HOUR_S = 3600.0


def first_stop_s(
    save_s: float | None, *, step_s: float = 0.0, lasts_s: float = HOUR_S, moved_to_s: float | None = None
) -> float | None:
    """Seconds from the start of the job to the step after which the run saves, looking every second."""
    now_s = [0.0]
    limit = TimeLimit(
        end_s=lasts_s, current_end_s=lambda: moved_to_s, save_s=lambda: save_s, clock=lambda: now_s[0]
    )
    for second in range(int(max(lasts_s, moved_to_s or 0)) + 1):
        now_s[0] = second
        if limit.is_near(step_s=step_s):
            return second
    return None


@pytest.mark.parametrize(
    ("save_s", "step_s", "stops_s"),
    [
        (200.0, 0.0, HOUR_S - 400 - MARGIN_S),  # a save that just began, then the last one
        (200.0, 60.0, HOUR_S - 520 - MARGIN_S),
        (1.0, 0.0, HOUR_S - 2 - MARGIN_S),
        (None, 0.0, None),  # nothing measured yet: Slurm's signal decides
    ],
)
def test_the_grace_follows_the_time_of_a_save(
    save_s: float | None, step_s: float, stops_s: float | None
) -> None:
    assert first_stop_s(save_s, step_s=step_s) == stops_s


def test_a_short_job_keeps_half_of_its_time() -> None:
    assert first_stop_s(200.0, lasts_s=300.0) == 150


def test_a_limit_that_was_moved_counts() -> None:
    assert first_stop_s(200.0, moved_to_s=2 * HOUR_S) == 2 * HOUR_S - 400 - MARGIN_S


@pytest.mark.parametrize(
    ("variables", "shown", "end_s"),
    [
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1900000000"}, {}, 1900000000.0),
        ({"SLURM_JOB_ID": "7"}, {"EndTime": "2030-03-17T17:46:40"}, None),  # as this machine's zone says
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1e9"}, {"EndTime": "Unknown"}, 0.0),
        ({"SLURM_JOB_ID": "7"}, None, 0.0),
        ({"SLURM_JOB_END_TIME": "1900000000"}, {"EndTime": "2030-03-17T17:46:40"}, 0.0),
    ],
)
def test_the_end_is_that_of_the_job(
    variables: dict[str, str],
    shown: dict[str, str] | None,
    end_s: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """0: no limit is known."""
    monkeypatch.setattr(stop, "job_fields", lambda job: shown)
    limit = time_limit_of(variables, save_s=lambda: 1.0)
    if end_s is None:
        end_s = datetime(2030, 3, 17, 17, 46, 40).timestamp()
    assert (0.0 if limit is None else limit.end_s) == end_s


@pytest.mark.parametrize(
    ("received", "ends_at_s"),
    [
        ([(0, SIGTERM), (50, SIGTERM)], []),  # a preemption, and the end of its grace time
        ([(0, SIGUSR2), (90, SIGTERM)], []),  # the time limit
        ([(0, SIGUSR2), (10, SIGTERM), (60, SIGTERM)], []),
        ([(0, SIGTERM), (9, SIGINT)], []),
        ([(0, SIGINT), (0.5, SIGINT), (9, SIGTERM)], []),
        ([(0, SIGINT), (3, SIGINT)], [3]),  # a person who does not want to wait
        ([(0, SIGTERM), (9, SIGINT), (12, SIGINT)], [12]),
    ],
)
def test_only_a_second_ctrl_c_ends_a_save(
    received: Sequence[tuple[float, signal.Signals]], ends_at_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    ends: list[float] = []
    monkeypatch.setattr(stop, "default_store", dist.HashStore)
    monkeypatch.setattr(stop.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(stop.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(stop.os, "kill", lambda process, number: ends.append(now_s))
    flag = stop.StopFlag(step=0)
    for now_s, number in received:  # noqa: B007  (the clock reads it)
        flag._handle(number, None)
    assert ends == ends_at_s
