"""The checks at a start on real ranks, each of which plays a host."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpc_parallel.config.site_schema import PreflightConfig
from hpc_parallel.machine import host_facts
from hpc_parallel.machine.world import World
from hpc_parallel.machine.xids import XidEvents
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.report.run_lines import difference_lines
from hpc_parallel.start import start_checks, start_times
from tests.workers import Workers

LATE_S = 0.05


def start(folder: str, late_rank: int) -> None:
    """The checks of a rank that is alone on its host; `late_rank` comes late to each all-reduce."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    world = World(rank, ranks, 0, 1, rank, ranks, host=f"n{rank + 1}", launcher="slurm", attempt="x")
    all_reduce = dist.all_reduce

    def late(*arguments: Any, **options: Any) -> None:
        time.sleep(LATE_S * (rank == late_rank))
        all_reduce(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start_times, "ROUND_S", 0.01)
        patch.setattr(dist, "all_reduce", late)
        for module in (start_checks, host_facts):
            packages = {"a": "1", "b": "2" if rank != 1 else "3"} | ({"c": "4"} if rank == 0 else {})
            patch.setattr(module, "installed_packages", packages.copy)
        config: Any = SimpleNamespace(preflight=PreflightConfig(act="report"))
        start_checks.check(
            RunFolder(Path(folder)), config=config, world=world, device=torch.device("cpu"),
            xids=XidEvents(None, None),
        )  # fmt: skip


def started(workers: Workers, folder: Path, *, late_rank: int = -1) -> dict[str, Any]:
    """What three hosts write at a start."""
    workers.run(3, start, str(folder), late_rank)
    checked: dict[str, Any] = json.loads((folder / "preflight.json").read_text())
    return checked


def test_packages_that_differ_are_a_table_by_host(workers: Workers, tmp_path: Path) -> None:
    checked = started(workers, tmp_path)
    assert checked["differences"] == {
        "b": {"n1": "2", "n2": "3", "n3": "2"}, "c": {"n1": "4", "n2": None, "n3": None},
    }  # fmt: skip
    assert [finding["what"] for finding in checked["findings"] if "packages" in finding["what"]] == [
        "differ: packages b 2; c 4 (n1) / b 3; c missing (n2) / b 2; c missing (n3)"
    ]
    assert difference_lines(RunFolder(tmp_path)) == [
        "   n1  n2       n3",
        "b  2   3        2",
        "c  4   missing  missing",
    ]


def test_all_ranks_wait_for_the_slowest_in_the_all_reduce(workers: Workers, tmp_path: Path) -> None:
    checked = started(workers, tmp_path)
    assert checked["all_reduce_bytes"] == 2**20
    times_s = [facts["all_reduce_s"] for facts in checked["hosts"].values()]
    assert [len(times) for times in times_s] == [1, 1, 1]
    assert [len(facts["matrix_s"]) for facts in checked["hosts"].values()] == [1, 1, 1]
    assert all(0 < time_s < checked["took_s"] for (time_s,) in times_s)
    late = started(workers, tmp_path, late_rank=1)
    assert min(time_s for facts in late["hosts"].values() for time_s in facts["all_reduce_s"]) > 0.9 * LATE_S
    assert not [finding for finding in late["findings"] if "all-reduce" in finding["what"]]
