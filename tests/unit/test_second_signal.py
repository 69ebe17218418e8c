"""Which signals end a rank before it has saved: what Slurm sends at a preemption and at the time limit."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from signal import SIGINT, SIGTERM, SIGUSR2

import pytest
import torch.distributed as dist

from hpc_parallel.worker import stop


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
