"""`task=collectives`: values that prove a result, sizes, the fitted profile, tables and checks."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hpc_parallel.config.checks.all_checks import find_problems
from hpc_parallel.config.resolve import resolve
from hpc_parallel.config.task_schema import COLLECTIVES
from hpc_parallel.measure.collective_cases import OPERATIONS, Group, Patterns, elements, sizes
from hpc_parallel.measure.collectives import FEW_BATCHES, Bench
from hpc_parallel.measure.collectives_plan import BATCHES, CollectivesPlan, PlannedRow, RowTime, coarse_first
from hpc_parallel.measure.machine_profile import fit_link, machine_profile
from hpc_parallel.record.collectives_file import (
    COLUMNS,
    CollectiveRow,
    Collectives,
    as_csv,
    full_table,
    rows_of,
    short_table,
)
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.typed import build
from hpc_parallel.worker.time_budget import rounded_up
from tests.composed import composed

CPU = torch.device("cpu")
LATENCY_S, RATE = 20e-6, 12.5e9


def group(ranks: int) -> Group:
    return Group(None, rank=0, ranks=ranks)  # type: ignore[arg-type]  # no collective is run


def row(
    size: int, *, factor: float = 1.5, dtype: str = "float32", operation: str = "all_reduce"
) -> CollectiveRow:
    time_s = LATENCY_S + size * factor / RATE
    rate = size / time_s
    values = ("world", 4, operation, dtype, size, time_s, 0.02, 100, rate, rate * factor)
    return CollectiveRow(**dict(zip(COLUMNS, values, strict=True)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 8, 100])
def test_sums_of_patterns_are_exact(dtype: torch.dtype, ranks: int) -> None:
    """In any order of summation in the type itself, against integers."""
    patterns = Patterns(group(ranks), dtype=dtype, device=CPU)
    arrays = [patterns.of(rank, start=5, count=1000) for rank in range(ranks)]
    exact = torch.stack(arrays).to(torch.int64).sum(0)
    total = torch.zeros(1000, dtype=dtype)
    for array in reversed(arrays):
        total += array
    assert torch.equal(total.to(torch.int64), exact)
    assert torch.equal(patterns.sum(start=5, count=1000), total)
    assert patterns.tolerance == 0


def test_patterns_differ_by_rank_and_by_element() -> None:
    patterns = Patterns(group(8), dtype=torch.bfloat16, device=CPU)
    arrays = torch.stack([patterns.of(rank, start=0, count=64) for rank in range(8)])
    assert len(torch.unique(arrays, dim=0)) == 8
    assert (arrays[:, 1:] != arrays[:, :-1]).all()
    assert torch.equal(patterns.of(3, start=7, count=9), patterns.of(3, start=0, count=16)[7:])
    assert not patterns.matches(arrays[0], arrays[0].roll(1))


def test_sizes_and_elements() -> None:
    assert sizes(8, 1000, factor=4) == [8, 32, 128, 512, 1000]
    assert sizes(8, 8, factor=2) == [8]
    gather, send = OPERATIONS["all_gather"], OPERATIONS["send_recv"]
    assert elements(8, operation=gather, group=group(3), dtype=torch.float32) == 3
    assert elements(100, operation=gather, group=group(3), dtype=torch.float32) == 24
    assert elements(100, operation=send, group=group(3), dtype=torch.bfloat16) == 50
    assert tuple(OPERATIONS) == COLLECTIVES


def test_the_fit_finds_latency_and_bandwidth() -> None:
    link = fit_link([(size, LATENCY_S + size / RATE) for size in (8, 4096, 2**20, 2**30)])
    assert link.latency_s == pytest.approx(LATENCY_S, rel=1e-6)
    assert link.bandwidth_bytes_per_s == pytest.approx(RATE, rel=1e-6)
    assert link.error < 1e-9
    assert fit_link([(8, 1.0), (8, 2.0)]) is None
    falling = fit_link([(8, 2.0), (1000, 1.0)])
    assert (falling.bandwidth_bytes_per_s, falling.latency_s > 0) == (None, True)
    steep = fit_link([(100, 1e-6), (200, 1.0)])
    assert steep.latency_s == 0


def test_the_machine_profile_has_each_operation_of_each_group() -> None:
    rows = [*map(row, (8, 2**16, 2**26)), row(8, dtype="bfloat16"), row(0, operation="barrier")]
    world = machine_profile(rows, site="here", device_type="cpu", measured="2026-11-20")["collectives"][
        "world"
    ]
    assert list(world) == ["ranks", "all_reduce"]
    assert world["all_reduce"]["latency_s"] == pytest.approx(LATENCY_S)
    assert world["all_reduce"]["bandwidth_bytes_per_s"] == pytest.approx(RATE)


def test_tables_show_what_was_measured() -> None:
    nccl_tests = {"redop": "sum", "wrong": 0, "also": ("axis shard",)}
    rows = [replace(row(8), count=2, **nccl_tests), replace(row(2**20), count=2**18, **nccl_tests)]
    assert list(csv.DictReader(io.StringIO(as_csv(rows)))) == [
        {key: str(value) for key, value in line.measured.items() if key != "also"} for line in rows
    ]
    lines = full_table(rows).splitlines()
    assert lines[0] == "all_reduce, world = axis shard: 4 ranks"
    assert lines[2].split() == ["8", "2", "float32", "sum", "20.0", "2%", "0.000", "0.001", "0"]
    best = rows[1].busbw_bytes_per_s / 1e9
    assert short_table(rows)[1].split() == [
        "world", "=", "axis", "shard", "(4)", "all_reduce", "float32", "20.0", "us", f"{best:.3f}", "GB/s",
        "1048576", "B",
    ]  # fmt: skip


def test_rows_of_others_are_checked() -> None:
    line = json.loads(json.dumps(row(8).measured))
    wrong = [{**line, key: value} for key in COLUMNS for value in (None, [], math.nan)]
    assert rows_of([line, 5, None, *wrong]) == [row(8)]
    assert build(Collectives, {"rows": "none"}) == build(Collectives, {"sum": 5}) == Collectives()
    hostile = {**line, "group": "\x1b[2J", "also": ["\x1b", 5], "count": "\x1b", "redop": "\x1b",
               "wrong": []}  # fmt: skip
    assert rows_of([hostile])[0].measured | {"group": "", "redop": "", "also": ()} == {
        **row(8).measured, "group": "", "redop": "", "count": None, "wrong": None
    }  # fmt: skip
    assert "\x1b" not in full_table(rows_of([hostile]))
    assert full_table(rows_of([{**line, "also": 5}])).startswith("all_reduce, world: ")


@pytest.mark.parametrize("with_predictions", [True, False])
def test_the_file_is_read_as_it_was_written(tmp_path: Path, with_predictions: bool) -> None:
    folder = RunFolder(tmp_path)
    predicted = replace(row(8), also=("axis shard",), predicted_s=0.5 if with_predictions else None)
    measured = Collectives("cpu", "gloo", row(4), (predicted, row(16)), "left out: 1", ("slow",))
    measured.write(folder, with_predictions=with_predictions)
    assert Collectives.read(folder) == measured
    first, second = json.loads(folder.collectives.read_text())["rows"]
    keys = ["group", "also", "ranks", "operation", "dtype", "size_bytes", "count", "redop", "wrong", "time_s",
            "spread", "rounds", "algbw_bytes_per_s", "busbw_bytes_per_s"]  # fmt: skip
    assert list(first) == list(second) == [*keys, *["predicted_s"] * with_predictions]


def test_wrong_options_are_refused_together() -> None:
    words = ["task=collectives", "task.operations=[allreduce]", "task.dtypes=[]", "task.max_bytes=4",
             "task.factor=1", "task.seconds=0"]  # fmt: skip
    assert [str(problem) for problem in find_problems(resolve(composed(*words))[0], words)] == [
        f"task.operations = [allreduce] must name some of {', '.join(COLLECTIVES)}. "
        "Try task.operations=[all_reduce].",
        "task.dtypes = [] must name some of float32, bfloat16. Try task.dtypes=[float32].",
        "task.max_bytes = 4 is below task.min_bytes = 8. Try task.max_bytes=8.",
        "task.factor = 1 must be at least 2. Try task.factor=4.",
        "task.seconds = 0 must be above 0. Try task.seconds=60.",
    ]


class Clock:
    """A time budget on a clock that stands still between two measurements."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.used_s = seconds, 0.0

    def left_s(self, *, after_s: float = 0.0) -> float:
        return self.seconds - self.used_s - after_s

    def measure(self, cell: PlannedRow, time: RowTime) -> CollectiveRow:
        """As a machine that sends 0.1 GB/s. A series connects its ranks in its first row, in 2 seconds."""
        name, operation, dtype = cell.series
        round_s = LATENCY_S + cell.size_bytes / 1e8
        bench = BenchOnClock(round_s, time)
        rounds = bench.time(lambda: None).rounds
        self.used_s += (2 + bench.rounds) * round_s + 4e-3 + (2.0 if cell.size_bytes == 8 else 0.0)
        measured = row(cell.size_bytes, operation=operation, dtype=dtype)
        return replace(measured, group=name, rounds=rounds, time_s=round_s)


class BenchOnClock(Bench):
    """A round takes `round_s`; `rounds` counts them."""

    def __init__(self, round_s: float, time: RowTime) -> None:
        super().__init__(device=CPU, seconds=time.seconds, limit_s=time.limit_s)
        self.__dict__.update(round_s=round_s, rounds=0)

    def elapsed_s(self, run: Callable[[], object], *, rounds: int) -> float:
        self.__dict__["rounds"] += rounds
        return rounds * float(self.__dict__["round_s"])


def planned(*words: str, groups: Mapping[str, Group] | None = None) -> CollectivesPlan:
    config, *_ = resolve(composed("task=collectives", *words))
    return CollectivesPlan.of(config.task, groups=groups or {"world": group(2)}, most_bytes=2**26)


def measured(plan: CollectivesPlan, seconds: float) -> Clock:
    clock = Clock(seconds)
    list(plan.measure(clock.measure, clock))  # type: ignore[arg-type]
    return clock


def test_the_budget_decides_how_many_sizes_lie_between() -> None:
    """All 183 rows would take minutes."""
    plan = planned()
    assert len(plan.cells) == 7 * 2 * 13 + 1
    clock = measured(plan, 150.0)
    assert 100 < clock.used_s < 150
    all_sizes = sizes(8, 2**26, factor=4)
    sizes_of: dict[tuple[str, str], list[int]] = {}
    for line in plan.sorted_rows():
        sizes_of.setdefault((line.operation, line.dtype), []).append(line.size_bytes)
    assert sizes_of.pop(("barrier", "float32")) == [0]
    assert len(sizes_of) == 14
    measured_sizes = sizes_of["all_reduce", "float32"]
    assert set(map(tuple, sizes_of.values())) == {tuple(measured_sizes)}
    missing = [size for size in all_sizes if size not in measured_sizes]
    assert missing
    assert max(missing) > 2**20 < min(missing)  # small ones take no time, and are measured all the same
    assert {8, 2**15, 2**26} < set(measured_sizes)
    left = f"{14 * len(missing)} of 183 rows, of {', '.join(f'{size:,}' for size in missing)} bytes"
    advised = re.fullmatch(rf"left out: {left}: .*Try task.seconds=(\d+)", str(plan.left_out))
    assert advised
    again = planned()
    assert measured(again, float(advised[1])).used_s < float(advised[1])
    assert (len(again.rows), again.left_out) == (183, None)


def test_sizes_are_measured_coarse_first() -> None:
    assert coarse_first(range(13)) == [0, 6, 12, 3, 9, 1, 4, 7, 10, 2, 5, 8, 11]
    for count in range(1, 30):
        assert sorted(coarse_first(range(count))) == list(range(count))


def test_an_advised_time_is_10_to_100_percent_more() -> None:
    for tenths in range(5, 20_000):
        seconds = tenths / 10
        assert 1.1 * seconds <= rounded_up(seconds) <= 2 * seconds
    assert [rounded_up(seconds) for seconds in (0.01, 1, 9.9, 47, 1234)] == [1, 2, 11, 60, 2000]


def test_a_long_budget_measures_no_longer_than_the_rows_need() -> None:
    plan = planned("task.operations=[all_reduce]", "task.dtypes=[float32]", "task.max_bytes=4096")
    assert measured(plan, 1e6).used_s < 0.6 * len(plan.cells) + 30


@pytest.mark.parametrize("seconds", [1e-9, 20.0])
def test_a_curve_is_measured_in_any_case(seconds: float) -> None:
    """The smallest, the middle and the largest size; where a budget is used up, in three rounds."""
    plan = planned()
    clock = measured(plan, seconds)
    assert [line.size_bytes for line in plan.rows] == [8] * 14 + [0] + [2**15] * 14 + [2**26] * 14
    assert [line.rounds for line in plan.rows[-14:]] == [FEW_BATCHES] * 14
    large_s = LATENCY_S + 2**26 / 1e8
    assert clock.used_s < max(seconds, 30) + 14 * 6 * large_s  # two rounds for checks, one for the estimate


def test_a_slow_row_has_fewer_rounds() -> None:
    benches = [BenchOnClock(1.0, RowTime(0.1, limit_s)) for limit_s in (0.0, 10.9, 11.0, math.inf)]
    assert [bench.time(lambda: None).rounds for bench in benches] == [3, 3, BATCHES, BATCHES]
    assert [bench.rounds for bench in benches] == [1 + 3, 1 + 3, 1 + 3 + 1 + 8, 1 + 3 + 1 + 8]


def test_rows_say_how_many_there_are_and_how_long_they_take() -> None:
    plan, clock = planned(), Clock(30.0)
    lines = []
    for _ in plan.measure(clock.measure, clock):  # type: ignore[arg-type]
        lines.append(plan.metrics_line(clock))  # type: ignore[arg-type]
        assert 0 <= lines[-1]["time_left_s"] <= max(0, 30 - clock.used_s)
    assert [line["step"] for line in lines] == list(range(1, len(plan.rows) + 1))
    assert {line["steps"] for line in lines} == {183}
    assert rows_of(lines)[0].size_bytes == 8


@pytest.mark.parametrize("task", ["collectives", "infer", "preflight", "calibrate"])
@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        (["launcher=local"], 60),
        (["launcher=slurm"], 300),
        (["launcher=script"], 300),
        (["launcher=slurm", "launcher.time_minutes=4"], 120),
        (["launcher=slurm", "task.seconds=7"], 7),
    ],
)
def test_the_default_time_is_bounded(task: str, words: list[str], seconds: float) -> None:
    assert resolve(composed(f"task={task}", *words))[0].task.seconds == seconds


def test_a_budget_above_the_time_limit_is_refused() -> None:
    words = ["task=collectives", "launcher=slurm", "launcher.time_minutes=10", "task.seconds=900"]
    assert [str(problem) for problem in find_problems(resolve(composed(*words))[0], words)] == [
        "task.seconds = 900 is more than launcher.time_minutes = 10. Try task.seconds=540."
    ]
