"""The devices of a run in `show` and in the report: the median of all, and the worst with its rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_parallel.commands import show
from hpc_parallel.record.device_states import device_lines
from hpc_parallel.record.run_folder import RunFolder
from tests.recorded_runs import finished

GIB = 2**30


def gpu(rank: int, load: float, gib: float, watts: float, celsius: float) -> dict[str, Any]:
    return {
        "rank": rank, "host": f"n{rank // 2}", "utilisation": load, "memory_bytes": gib * GIB,
        "power_w": watts, "temperature_c": celsius,
    }  # fmt: skip


STEADY = [gpu(0, 0.97, 40, 380, 61), gpu(1, 0.95, 40, 385, 60), gpu(2, 0.96, 44, 390, 88)]
SAMPLES = [
    {"step": 20, "ranks": [*STEADY, gpu(3, 0.4, 40, 250, 60)]},
    {"step": 40, "ranks": [*STEADY, gpu(3, 0.3, 40, 252, 62)]},
    {"step": 60, "ranks": [*STEADY, gpu(3, 0.5, 41, 900, 64)]},  # an outlier in time is no median
]
EXPECTED = [
    ("utilisation", "median 96%, worst 40% (rank 3 on n1)"),
    ("memory", "median 40.0 GiB, worst 44.0 GiB (rank 2 on n1)"),
    ("power", "median 382 W, worst 390 W (rank 2 on n1)"),
    ("temperature", "median 62 °C, worst 88 °C (rank 2 on n1)"),
]


def test_median_and_worst(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert device_lines(folder) == []
    folder.rank_times.write_text(json.dumps({"samples": SAMPLES}))
    assert device_lines(folder) == EXPECTED
    folder.rank_times.write_text(json.dumps({"samples": [{"ranks": [gpu(0, 0.5, 1, 100, 40)]}]}))
    assert device_lines(folder)[0] == ("utilisation", "50%")


@pytest.mark.parametrize(
    "content",
    [
        "{", "[]", '{"samples": 3}', '{"samples": [3, {"ranks": 3}, {"ranks": [3, {"rank": "1"}]}]}',
        '{"samples": [{"ranks": [{"rank": 0, "host": 4, "utilisation": "a", "power_w": true}]}]}',
        '{"samples": [{"ranks": [{"rank": 0, "host": "n0", "busy_s": 0.1}]}]}',  # CPUs
    ],
)  # fmt: skip
def test_nothing_without_figures_of_a_gpu(content: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.rank_times.write_text(content)
    assert device_lines(folder) == []


def test_show_has_the_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = finished(tmp_path / "run", "strategy=data", "nodes=2")
    assert show.main([str(folder.path)]) == 0
    assert "devices\nutilisation" not in capsys.readouterr().out
    folder.rank_times.write_text(json.dumps({"samples": SAMPLES}))
    assert show.main([str(folder.path)]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    at = printed.index("devices")
    assert [line.split(maxsplit=1) for line in printed[at + 1 : at + 5]] == [list(row) for row in EXPECTED]
