"""Timed steps: the first one comes when the steps before it pay for it, and what is kept of them."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch

from hpc_parallel.profiling import rank_times
from hpc_parallel.profiling.slow_ranks import Accusations
from hpc_parallel.profiling.timeline import Timeline
from hpc_parallel.record.recorded_slow_ranks import accusations
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import read_json
from hpc_parallel.record.safe_write import write_json


@pytest.mark.parametrize("ranks", [8, 4096])
def test_the_record_can_be_read_again(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any number of ranks; it had 100 timed steps of all ranks, and readers refuse large files."""
    folder = RunFolder(tmp_path)
    facts = {"utilisation": 0.987, "memory_bytes": 68719476736, "power_w": 698.123, "temperature_c": 71}
    monkeypatch.setattr(rank_times.exchange, "all_gather", lambda own: [
        own | {"times": own["times"] | {"rank": rank, "busy_s": 0.1 + rank % 2}, "device": facts}
        for rank in range(ranks)
    ])  # fmt: skip
    monkeypatch.setattr(rank_times.dist, "get_rank", lambda: 0)
    times = rank_times.RankTimes(
        on=True, host="node-of-a-long-name", role=0, device=torch.device("cpu"), profiled=[],
        expected_s=lambda: 0.1, leave_out=lambda seconds: None, device_state=dict,
        accusations=Accusations([], steps_done=0), write=partial(write_json, folder.rank_times),
    )  # fmt: skip
    monkeypatch.setattr(times._network, "find_slow", lambda _: [])
    kept = min(100, 8_000 // ranks)
    for step in range(kept + 3):
        times._add(step, Timeline(10**9, waiting=[], stages=[], computing=[], chunks=[]))
    assert len(read_json(folder.rank_times)["samples"]) == kept
    assert accusations(folder)


@pytest.mark.parametrize(("expected_s", "first"), [(0.0, 20), (0.105, 20), (0.2, 200), (0.4, 600)])
def test_it_is_paid_in_advance(expected_s: float, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 0.1 s: a timed one of 0.2 s costs one step more, half a per cent of 200."""
    clock = count()
    monkeypatch.setattr(rank_times.time, "perf_counter", lambda: next(clock) / 10 + 1)
    times = rank_times.RankTimes(
        on=True, host="n0", role=0, device=torch.device("cpu"), profiled=[], expected_s=lambda: expected_s,
        leave_out=lambda seconds: None, device_state=dict, accusations=Accusations([], steps_done=0),
        write=lambda record: None,
    )  # fmt: skip
    step = 1
    while isinstance(times.loading(step), nullcontext):
        times.watch(step)
        step += 1
    assert step == pytest.approx(first, abs=1)
