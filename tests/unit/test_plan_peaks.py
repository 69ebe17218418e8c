"""The memory plan against the peaks that torch allocated on an NVIDIA H200 (`make gpu`, part m)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_parallel.config.resolve import resolve
from hpc_parallel.planning.memory import plan
from tests.composed import composed

MEASURED = json.loads((Path(__file__).parents[1] / "data/h200_peaks.json").read_text())
OUTSIDE = ("device context", "allocator slack")  # of what torch's allocator hands out
WITHIN = 0.05


@pytest.mark.parametrize("row", MEASURED["rows"], ids=lambda row: str(row["case"]))
def test_the_planned_peak_is_the_allocated_one(row: dict[str, Any]) -> None:
    found = plan(resolve(composed(*MEASURED["words_of_all"], *row["words"]))[0])
    assert found is not None
    assert not found.unknown
    held = found.devices[row["rank"]]
    allocated = sum(size for kind, size in held.kinds.items() if kind not in OUTSIDE)
    assert allocated == pytest.approx(row["peak_bytes"], rel=WITHIN)


def test_many_cases_of_one_rank_and_of_one_of_many_were_measured() -> None:
    alone = ["strategy=single" in row["words"] for row in MEASURED["rows"]]
    assert alone.count(True) >= 20
    assert alone.count(False) >= 10
