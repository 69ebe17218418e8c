"""`task=preflight` on real ranks, and what people read of it."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest

from hpc_parallel.config.checks.all_checks import find_problems
from hpc_parallel.config.compose import resolve
from hpc_parallel.record.machine_check_table import machine_lines
from hpc_parallel.report import run_plot
from hpc_parallel.worker.machine_check import powers, slow_devices, slow_links, slow_storage
from tests.composed import composed
from tests.workers import Workers


def test_all_is_measured(workers: Workers) -> None:
    folder = workers.do(
        "task=preflight", "strategy=data", "nodes=2", "gpus_per_node=2", "task.message_bytes=4000000",
        "task.read_bytes=8388608",
    )  # fmt: skip
    checked = json.loads((folder / "machine_check.json").read_text())
    hosts = checked["hosts"]
    assert [rank["host"] for rank in checked["ranks"]] == [hosts[0], hosts[0], hosts[1], hosts[1]]
    assert all(rank["flops"] > 1e9 for rank in checked["ranks"])
    assert [list(checked["reads_bytes_per_s"][host]) for host in hosts] == [["1", "2"]] * 2
    assert list(checked["inside_busbw_bytes_per_s"]) == hosts
    assert [link["hosts"] for link in checked["links"]] == [hosts]
    # They share one machine, so nobody is accused.
    assert (checked["findings"], checked["judged"]) == ([], False)
    run_plot.main([str(folder)])
    assert (folder / "plots" / "links_1.png").read_bytes().startswith(b"\x89PNG")
    assert not list(folder.glob("tmp*"))


def test_slow_parts_are_named() -> None:
    names = ["n1", "n1", "n2", "n2"]
    (finding,) = slow_devices(names, [0.010, 0.011, 0.012, 0.030])
    assert (finding.host, finding.what) == (
        "n2", "rank 3: a matrix product takes 30.0 ms, and 11.0 elsewhere",
    )  # fmt: skip
    reads = {f"n{number}": {"1": 3e8, "2": 5e8} for number in range(1, 4)}
    assert list(slow_storage(reads)) == []
    (finding,) = slow_storage({**reads, "n4": {"1": 3e8, "2": 5e7}})
    assert (finding.host, finding.what) == ("n4", "reads 50 MB/s, and 500 elsewhere")
    rates = {pair: 1e9 / (1 + 9 * (2 in pair)) for pair in combinations(range(4), 2)}
    (finding,) = slow_links(["n1", "n2", "n3", "n4"], rates)
    assert (finding.host, finding.harmful) == ("n3", True)
    assert finding.what == "its links carry 0.100 GB/s, and others 0.550"
    assert list(powers(1)) == [1]
    assert list(powers(6)) == [1, 2, 4, 6]


def test_the_lines_end_with_what_can_be_pasted() -> None:
    finding = {"host": "n3", "what": "slow", "harmful": True}
    content = {
        "ranks": [{"host": "n1", "flops": 2e9}, {"host": "n3", "flops": 1e9}],
        "reads_bytes_per_s": {"n1": {"1": 1e8}, "n3": {"1": 3e8}},
        "links": [{"hosts": ["n1", "n3"], "bytes_per_s": 1.2e8}],
        "findings": [finding, {**finding, "what": "other"}, {"host": "n4", "what": "link", "harmful": False}],
    }
    assert machine_lines(content) == [
        "matrix product: 1.5 GFLOP/s for each device (median), 1.0 (slowest)",
        "read, processes on each host = 1: 200 MB/s (median of the hosts)",
        "links, in each direction: 0.120 GB/s (median), 0.120 (slowest)",
        "n3: slow", "n3: other", "n4: link", "--exclude=n3",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "content",
    [None, 5, {"ranks": 5, "links": [5, {"hosts": [1, 2], "bytes_per_s": 1}]}, {"findings": [{"host": 5}]},
     {"reads_bytes_per_s": {"a": 5, "b": {"1": "x"}}, "inside_busbw_bytes_per_s": [1]}],
)  # fmt: skip
def test_the_files_of_others_are_checked(content: object) -> None:
    assert machine_lines(content) == ["no host stands out"]
    assert "\x1b" not in "".join(machine_lines({"findings": [{"host": "\x1b", "what": "\x1b"}]}))


def test_wrong_sizes_are_refused(tmp_path: Path) -> None:
    words = ["task=preflight", "task.message_bytes=1", "task.read_bytes=100"]
    assert [str(problem) for problem in find_problems(resolve(composed(*words))[0], words)] == [
        "task.message_bytes = 1 must be at least 4. Try task.message_bytes=16777216.",
        "task.read_bytes = 100 must be at least 4194304. Try task.read_bytes=134217728.",
    ]
