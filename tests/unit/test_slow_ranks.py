"""Which rank is named as slow, and by what; what a GPU tells of itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_parallel.machine.device_state import device_state
from hpc_parallel.profiling.slow_ranks import Accusations, RankTime, slow_ranks
from hpc_parallel.record.recorded_slow_ranks import MOST_ACCUSATIONS, accusations, keep_accusations
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.report.run_lines import accused_lines, device_lines, slow_lines
from tests.nvml import Nvml, not_supported


def step(
    *busy_ms: float, data: dict[int, float] | None = None, roles: tuple[int, ...] = ()
) -> list[RankTime]:
    """A timed step: the busy milliseconds of each rank; data: rank -> milliseconds more for its batch."""
    slowest = max(busy_ms)
    return [
        RankTime(
            rank, f"n{rank // 2}", roles[rank] if roles else 0, busy / 1e3, (slowest - busy) / 1e3,
            (1 + (data or {}).get(rank, 0)) / 1e3,
        )
        for rank, busy in enumerate(busy_ms)
    ]  # fmt: skip


HEALTHY = step(100, 101, 99, 104)
SLOW = step(100, 101, 150, 99)


@pytest.mark.parametrize(
    ("samples", "named"),
    [
        ([HEALTHY] * 3, []),
        ([SLOW] * 3, [(2, "n1", "compute")]),
        ([SLOW] * 2, []),  # not for long enough
        ([SLOW, HEALTHY, SLOW, SLOW], []),
        ([HEALTHY, SLOW, SLOW, SLOW], [(2, "n1", "compute")]),
        ([SLOW, SLOW, step(150, 100, 100, 100)], []),  # not always the same one
        ([step(100, 100, 100, 100, data={3: 30})] * 3, [(3, "n1", "data")]),
        ([step(100, 100, 130, 200)] * 3, [(3, "n1", "compute"), (2, "n1", "compute")]),
        ([step(100, 130)] * 3, [(1, "n0", "compute")]),  # of two, the quicker one is the measure
        ([step(100, 200, roles=(0, 1))] * 3, []),  # another stage has other work
        ([step(100, 100, 100, 200, 200, 260, roles=(0, 0, 0, 1, 1, 1))] * 3, [(5, "n2", "compute")]),
        ([step(1.0, 1.5)] * 3, []),  # half a millisecond
        ([step(100)] * 3, []),
        ([], []),
    ],
)
def test_who_is_slow(samples: list[list[RankTime]], named: list[tuple[int, str, str]]) -> None:
    assert [(slow.rank, slow.host, slow.cause) for slow in slow_ranks(samples)] == named


def test_the_line(tmp_path: Path) -> None:
    (slow,) = slow_ranks([SLOW] * 3)
    line = "rank 2 on n1 is slow: compute takes 1.50 x (151.0 ms, and 101.0 elsewhere)"
    assert str(slow) == line
    folder = RunFolder(tmp_path)
    assert slow_lines(folder) == []
    record = {"samples": [], "slow": [slow.as_record(), {"line": "a\x1bb"}, 3]}
    folder.rank_times.write_text(json.dumps(record))
    assert slow_lines(folder) == [line, "a\\x1bb"]
    folder.rank_times.write_text("{")
    assert slow_lines(folder) == []
    assert accusations(folder) is None


def test_an_accusation_is_kept(tmp_path: Path) -> None:
    """Also when the rank is not slow any more, and after a restart."""
    folder = RunFolder(tmp_path)
    (slow,) = slow_ranks([SLOW] * 3)
    accused = Accusations([], steps_done=0)
    for step, named in ((60, [slow]), (80, [slow]), (100, [])):
        accused.add(named, step=step)
    folder.rank_times.write_text(json.dumps({"slow": [], "accused": accused.as_records()}))
    record = slow.as_record() | {"first_step": 60, "last_step": 80}
    assert accusations(folder) == [record]
    assert slow_lines(folder) == []
    assert accused_lines(folder) == [f"{slow}, from step 60 to 80"]
    restarted = Accusations(accusations(folder) or [], steps_done=90)
    restarted.add([slow], step=20)
    assert restarted.as_records() == [record | {"last_step": 110}]
    for rank in range(MOST_ACCUSATIONS):
        restarted.add([replace(slow, rank=rank)], step=21)
    assert len(restarted.as_records()) == MOST_ACCUSATIONS


def test_a_new_start_forgets_the_timed_steps_of_earlier_ones(tmp_path: Path) -> None:
    """The earlier start may have had more ranks, or other ones were slow."""
    folder = RunFolder(tmp_path)
    assert keep_accusations(folder) == []
    assert not folder.rank_times.exists()
    (slow,) = slow_ranks([SLOW] * 3)
    accused = Accusations([], steps_done=0)
    accused.add([slow], step=60)
    steps = [{"step": 60, "ranks": [{"rank": 7, "host": "n1", "utilisation": 0.5}]}]
    record = {"samples": steps, "slow": [slow.as_record()], "accused": accused.as_records()}
    folder.rank_times.write_text(json.dumps(record))
    assert device_lines(folder)
    assert slow_lines(folder)
    assert keep_accusations(folder) == accused.as_records() == accusations(folder)
    assert device_lines(folder) == slow_lines(folder) == []


def test_accusations_of_anybody(tmp_path: Path) -> None:
    """What is no record is left out, and what is long is cut."""
    folder = RunFolder(tmp_path)
    sound = {"rank": 1, "host": "n1", "cause": "data", "line": "a\x1b", "first_step": 1, "last_step": 2}
    accused: list[Any] = [
        sound, sound | {"rank": "1"}, sound | {"host": 3}, sound | {"line": None},
        sound | {"last_step": True}, 7, None, sound | {"line": "x" * 10_000, "factor": "2"}, *[sound] * 100,
    ]  # fmt: skip
    folder.rank_times.write_text(json.dumps({"accused": accused}))
    records = accusations(folder) or []
    assert records[0] == sound | {"factor": None, "own_s": None, "median_s": None}
    assert records[1]["line"] == "x" * 500
    assert records[1]["factor"] is None
    assert len(records) == MOST_ACCUSATIONS - 6
    assert accused_lines(folder)[0] == "a\\x1b, from step 1 to 2"
    folder.rank_times.write_text(json.dumps({"accused": {}}))
    assert accusations(folder) is None


def test_the_state_of_a_gpu() -> None:
    nvml = Nvml(
        1,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=97, memory=40),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=5 * 2**30),
        nvmlDeviceGetTemperature=lambda handle, sensor: 61,
    )
    expected = {"utilisation": 0.97, "memory_bytes": 5 * 2**30, "temperature_c": 61}
    assert device_state(nvml, "GPU-1") == expected
    assert device_state(nvml, None) == device_state(None, "GPU-1") == {}
    vars(nvml)["nvmlInit"] = not_supported
    assert device_state(nvml, "GPU-1") == {}
