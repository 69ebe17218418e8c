"""What `task=collectives` measured, read back from a report, and its plots in the run folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hpc_parallel.__main__ import main
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.report import collective_curves, run_plot
from hpc_parallel.report.gather import gather
from tests.report.measured_runs import written

RATE, LATENCY_S = 2e9, 5e-5  # of the bus
SIZES = (8, 4096, 2**20)


def rows(operation: str, *, group: str = "world", sizes: tuple[int, ...] = SIZES) -> list[dict[str, Any]]:
    """Measurements of two ranks, whose bus factor is 1, over a link of RATE and LATENCY_S."""
    return [
        {"group": group, "ranks": 2, "operation": operation, "dtype": "float32", "size_bytes": size,
         "time_s": (time_s := LATENCY_S + size / RATE), "spread": 0.1, "rounds": 10,
         "algbw_bytes_per_s": size / time_s, "busbw_bytes_per_s": size / time_s}
        for size in sizes
    ]  # fmt: skip


def measured(path: Path, *lines: dict[str, Any]) -> RunFolder:
    folder = written(path, "task=collectives", "nodes=2", "strategy=data")
    write_json(folder.collectives, {"rows": list(lines)})
    write_json(folder.summary, {"outcome": "completed", "nodes": 2, "gpus_per_node": 1})
    return folder


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("collectives") / "runs"
    measured(root / "a", *rows("all_reduce"), *rows("barrier", sizes=(0,)), *rows("exploit/../../x"))
    measured(root / "b", *rows("all_reduce"), *rows("send_recv", group="<b>\x1b[2J"))
    assert main(["report", str(root)]) == 0
    return root / "report"


def test_the_table_has_least_time_and_largest_bandwidth(reported: Path) -> None:
    lines = [line for line in (reported / "report.md").read_text().splitlines() if "(2) |" in line]
    cells = [[cell.strip() for cell in line.split("|")][2:-1] for line in lines]
    least_us, best = (LATENCY_S + 8 / RATE) * 1e6, 2**20 / (LATENCY_S + 2**20 / RATE) / 1e9
    rates = [f"{least_us:.1f}", f"{best:.3f}", "1 MiB"]
    assert [row for row in cells if row[0] == "world (2)"] == [
        ["world (2)", "all_reduce", "float32", *rates],
        ["world (2)", "barrier", "float32", "50.0", "-", "-"],
        ["world (2)", "all_reduce", "float32", *rates],
    ]
    assert len(cells) == 4


def test_there_is_a_plot_for_each_collective(reported: Path) -> None:
    drawn = {path.name for path in (reported / "plots").glob("*.png")}
    assert drawn == {"collectives_all_reduce.png", "collectives_send_recv.png"}
    page = (reported / "index.html").read_text()
    figure = page.split('<figure id="collectives_all_reduce">')[1].split("</figure>")[0]
    texts = set(re.findall(r">([^<>]+)</text>", figure))
    assert {"time of all_reduce, us", "bus bandwidth, GB/s", "4 KiB"} <= texts
    assert {"(a)", "(b)", "all_reduce by size: data 2 x 1, world (2), float32"} <= texts  # two curves
    assert "exploit" not in page
    assert "<b>" not in page
    assert "\x1b" not in page


def test_a_run_draws_its_own(tmp_path: Path) -> None:
    folder = measured(tmp_path / "one", *rows("all_reduce"))
    run_plot.main([str(folder.path)])
    assert [path.name for path in folder.plots.iterdir()] == ["collectives_all_reduce.png"]


def test_the_curves_are_those_of_the_file(tmp_path: Path) -> None:
    folder = measured(tmp_path / "one", *reversed(rows("all_gather")), {**rows("reduce")[0], "time_s": -1.0})
    (curve,) = collective_curves.curves(gather([folder.path]).rows)
    assert [point.size_bytes for point in curve.points] == list(SIZES)
    assert [point.time_s for point in curve.points] == [LATENCY_S + size / RATE for size in SIZES]
    folder.collectives.write_text("{")
    assert collective_curves.curves(gather([folder.path]).rows) == []
