"""`task=collectives`: values that prove a result, sizes, the fitted profile, tables and checks."""

from __future__ import annotations

import csv
import io

import pytest
import torch

from hpc_parallel.config.checks.all_checks import find_problems
from hpc_parallel.config.compose import resolve
from hpc_parallel.config.tasks import COLLECTIVES
from hpc_parallel.profiling.collective_cases import OPERATIONS, Group, Patterns, elements, sizes
from hpc_parallel.profiling.machine_profile import fit_link, machine_profile
from hpc_parallel.record.collectives_table import COLUMNS, as_csv, full_table, short_table, valid_rows
from tests.composed import composed

CPU = torch.device("cpu")
LATENCY_S, RATE = 20e-6, 12.5e9


def group(ranks: int) -> Group:
    return Group(None, rank=0, ranks=ranks)  # type: ignore[arg-type]  # no collective is run


def row(size: int, *, factor: float = 1.5, dtype: str = "float32", operation: str = "all_reduce") -> dict:
    time_s = LATENCY_S + size * factor / RATE
    rate = size / time_s
    values = ("world", 4, operation, dtype, size, time_s, 0.02, 100, rate, rate * factor)
    return dict(zip(COLUMNS, values, strict=True))


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
    assert link is not None
    assert link.latency_s == pytest.approx(LATENCY_S, rel=1e-6)
    assert link.bandwidth_bytes_per_s == pytest.approx(RATE, rel=1e-6)
    assert link.error < 1e-9
    assert fit_link([(8, 1.0), (8, 2.0)]) is None
    falling = fit_link([(8, 2.0), (1000, 1.0)])
    assert falling is not None
    assert (falling.bandwidth_bytes_per_s, falling.latency_s > 0) == (None, True)
    steep = fit_link([(100, 1e-6), (200, 1.0)])
    assert steep is not None
    assert steep.latency_s == 0


def test_the_machine_profile_has_each_operation_of_each_group() -> None:
    rows = [*map(row, (8, 2**16, 2**26)), row(8, dtype="bfloat16"), {**row(0, operation="barrier")}]
    world = machine_profile(rows, site="here", device_type="cpu", measured="2026-11-20")["collectives"][
        "world"
    ]
    assert list(world) == ["ranks", "all_reduce"]
    assert world["all_reduce"]["latency_s"] == pytest.approx(LATENCY_S)
    assert world["all_reduce"]["bandwidth_bytes_per_s"] == pytest.approx(RATE)


def test_tables_show_what_was_measured() -> None:
    nccl_tests = {"redop": "sum", "wrong": 0, "also": ["axis shard"]}
    rows = [{**row(8), "count": 2, **nccl_tests}, {**row(2**20), "count": 2**18, **nccl_tests}]
    assert list(csv.DictReader(io.StringIO(as_csv(rows)))) == [
        {key: str(value) for key, value in line.items() if key != "also"} for line in rows
    ]
    lines = full_table(rows).splitlines()
    assert lines[0] == "all_reduce, world = axis shard: 4 ranks"
    assert lines[2].split() == ["8", "2", "float32", "sum", "20.0", "2%", "0.000", "0.001", "0"]
    best = rows[1]["busbw_bytes_per_s"] / 1e9
    assert short_table(rows)[1].split() == [
        "world", "=", "axis", "shard", "(4)", "all_reduce", "float32", "20.0", "us", f"{best:.3f}", "GB/s",
        "1048576", "B",
    ]  # fmt: skip


def test_rows_of_others_are_checked() -> None:
    wrong = [{**row(8), key: None} for key in COLUMNS]
    assert valid_rows({"rows": [row(8), 5, *wrong]}) == [row(8)]
    assert valid_rows({"rows": "none"}) == valid_rows(None) == []
    hostile = {**row(8), "group": "\x1b[2J", "also": ["\x1b", 5], "count": "\x1b", "redop": "\x1b",
               "wrong": []}  # fmt: skip
    assert "\x1b" not in full_table([hostile])
    assert full_table([{**row(8), "also": 5}]).startswith("all_reduce, world: ")


def test_wrong_options_are_refused_together() -> None:
    words = ["task=collectives", "task.operations=[allreduce]", "task.dtypes=[]", "task.max_bytes=4",
             "task.factor=1", "task.seconds=0"]  # fmt: skip
    assert [str(problem) for problem in find_problems(resolve(composed(*words))[0], words)] == [
        f"task.operations = [allreduce] must name some of {', '.join(COLLECTIVES)}. "
        "Try task.operations=[all_reduce].",
        "task.dtypes = [] must name some of float32, bfloat16. Try task.dtypes=[float32].",
        "task.max_bytes = 4 is below task.min_bytes = 8. Try task.max_bytes=8.",
        "task.factor = 1 must be at least 2. Try task.factor=4.",
        "task.seconds = 0 must be above 0. Try task.seconds=0.5.",
    ]
