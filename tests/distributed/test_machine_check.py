"""`task=preflight` on real ranks, and what people read of it."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpc_parallel.config.checks.all_checks import find_problems
from hpc_parallel.config.resolve import resolve
from hpc_parallel.machine.host_findings import Finding
from hpc_parallel.measure import preflight_task, storage_rates
from hpc_parallel.measure.preflight_task import (
    MachineMeasurement,
    check_machine,
    machine_findings,
    slow_copies,
    slow_devices,
    slow_inside,
    slow_links,
    slow_storage,
)
from hpc_parallel.measure.storage_rates import ReadingError, powers
from hpc_parallel.record.metrics_file import MetricsReader
from hpc_parallel.record.recorded_preflight import DirectReads, MeasuredMachine, machine_lines
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.typed import build
from hpc_parallel.report import run_plot
from hpc_parallel.start.start_checks import PreflightError
from hpc_parallel.strategies.exchange import FollowerError
from hpc_parallel.worker.session import TaskContext, read_config
from tests.composed import composed
from tests.workers import Workers


def lines_of(content: Any) -> list[str]:
    """The lines of a file that anybody may have written."""
    return machine_lines(build(MeasuredMachine, content) or MeasuredMachine())


def test_all_is_measured(workers: Workers) -> None:
    folder = workers.do(
        "task=preflight", "strategy=data", "nodes=2", "gpus_per_node=2", "task.message_bytes=4000000",
        "task.read_bytes=8388608",
    )  # fmt: skip
    checked = json.loads((folder / "machine_check.json").read_text())
    hosts = checked["hosts"]
    assert [rank["host"] for rank in checked["ranks"]] == [hosts[0], hosts[0], hosts[1], hosts[1]]
    assert all(rank["flops"] > 1e9 for rank in checked["ranks"])
    assert checked["direct_reads"] == {"not_measured": "no GPU"}
    assert [list(checked["reads_bytes_per_s"][host]) for host in hosts] == [["1", "2"]] * 2
    assert list(checked["inside_busbw_bytes_per_s"]) == hosts
    assert [link["hosts"] for link in checked["links"]] == [hosts]
    # They share one machine, so nobody is accused.
    assert (checked["findings"], checked["judged"]) == ([], False)
    run_plot.main([str(folder)])
    assert (folder / "plots" / "links_1.png").read_bytes().startswith(b"\x89PNG")
    assert not list(folder.glob("tmp*"))
    lines = MetricsReader(RunFolder(folder).metrics).read()
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    assert {line["steps"] for line in lines} == {5}
    shown = [line["measured"][0] for line in lines]
    final = [line for line in lines_of(checked) if not line.startswith("nodes that share")]
    assert sorted(shown) == sorted(final)


def test_the_budget_of_a_check_leaves_parts_out(workers: Workers) -> None:
    """The first part uses it; the others are named, and nobody is accused of what was not measured."""
    folder = workers.do("task=preflight", "strategy=data", "gpus_per_node=2", "task.seconds=0.000001")
    checked = json.loads((folder / "machine_check.json").read_text())
    assert len(checked["ranks"]) == 2
    assert (checked["links"], checked["reads_bytes_per_s"]) == ([], {})
    assert checked["left_out"].startswith(
        "left out: copies between host and device, an all-reduce inside each host, links between hosts, "
        "reads from the storage: the time of task.seconds=1e-06 is used. Try task.seconds="
    )
    assert checked["left_out"] in lines_of(checked)
    assert json.loads((folder / "summary.json").read_text())["outcome"] == "completed"


def test_a_check_that_was_ended_shows_what_it_has() -> None:
    content = {"ranks": [{"host": "n1", "flops": 2e9}], "findings": [], "judged": None}
    assert lines_of(content) == ["matrix product: 2.0 GFLOP/s for each device (median), 2.0 (slowest)"]


def judged(run_folder: str, slow_rank: int) -> str:
    """How a rank ends that is alone on its host, if the product of one rank is slow."""
    folder = RunFolder(Path(run_folder))
    config, values = read_config(folder.config)
    names = [f"n{rank + 1}" for rank in range(dist.get_world_size())]
    times_s = [1.0 if rank == slow_rank else 0.1 for rank in range(dist.get_world_size())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight_task, "host_names", lambda *_: names)
        patch.setattr(preflight_task, "matrix_times_s", lambda _: times_s)
        patch.setattr(preflight_task, "link_rates", lambda *_, **__: {})
        patch.setattr(preflight_task, "SLOW_READ", 1e9)
        try:
            check_machine(TaskContext(config, values, folder, torch.device("cpu"), environment={}))
        except (PreflightError, FollowerError) as error:
            return f"{type(error).__name__}: {error} {getattr(error, 'details', '')}"
    return "completed"


@pytest.mark.parametrize(("act", "ends"), [
    ("report", ["completed"] * 3),
    ("stop", ["FollowerError: ended with {what} ", "PreflightError: {what}. Try launcher.exclude=n2, or "
              "preflight.act=report {{'exclude': []}}", "FollowerError: ended with {what} "]),
    ("exclude", ["FollowerError: ended with {what} ", "PreflightError: {what} {{'exclude': ['n2']}}",
                 "FollowerError: ended with {what} "]),
])  # fmt: skip
def test_a_slow_host_stops_the_run_as_preflight_act_says(workers: Workers, act: str, ends: list[str]) -> None:
    run = workers.prepare(
        "task=preflight", "strategy=data", "nodes=3", f"preflight.act={act}", "task.read_bytes=4194304",
        "task.message_bytes=40000",
    )  # fmt: skip
    what = "n2: rank 1: a matrix product takes 1000.0 ms, and 100.0 elsewhere"
    assert workers.run(3, judged, str(run.folder.path), 1) == [end.format(what=what) for end in ends]
    checked = json.loads(run.folder.machine_check.read_text())
    assert [finding["host"] for finding in checked["findings"]] == ["n2"]
    assert run.folder.summary.exists() == (act == "report")
    assert f"{checked['ranks'][1]['flops']:.0f}" == f"{2 * 512**3 / 1.0:.0f}"


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
    assert finding.what == "its links carry 0.100 GB/s, and others 1.000"
    rates = {pair: 1e9 / (1 + 9 * (2 in pair)) for pair in combinations(range(6), 2)}
    slow_host, slow_link = slow_links([f"n{number}" for number in range(1, 7)], {**rates, (0, 1): 2e8})
    assert slow_host.line == "n3: its links carry 0.100 GB/s, and others 1.000"
    assert (slow_link.line, slow_link.harmful) == (
        "n1: the link to n2 carries 0.200 GB/s, and others 1.000", False,
    )  # fmt: skip
    assert list(powers(1)) == [1]
    assert list(powers(6)) == [1, 2, 4, 6]


def test_slow_copies_and_slow_all_reduces_inside_a_host_are_named() -> None:
    names = ["n1", "n1", "n2", "n2", "n3", "n3", "n4", "n4"]
    copies = [
        {"pinned_bytes_per_s": 5e10 - rank * 1e9, "pageable_to_host_bytes_per_s": 1e10} for rank in range(8)
    ]
    assert list(slow_copies(names, copies)) == []
    copies[5] = {"pinned_bytes_per_s": 1.2e10, "pageable_to_host_bytes_per_s": 1e10}
    copies[1] = {"pinned_bytes_per_s": 5e10, "pageable_to_host_bytes_per_s": 2e9}
    assert [finding.line for finding in slow_copies(names, copies)] == [
        "n3: copy to the device, pinned: 12.000 GB/s, and 45.000 elsewhere",
        "n1: copy to the host, pageable: 2.000 GB/s, and 10.000 elsewhere",
    ]
    assert list(slow_copies(names[:4], copies[:4])) == []  # of two hosts none is usual
    assert list(slow_copies(names, [{}] * 8)) == []  # CPUs
    inside: dict[str, float | None] = {"n1": 4e11, "n2": 3.5e11, "n3": 3.9e11, "n4": 1e11}
    assert [finding.line for finding in slow_inside(inside)] == [
        "n4: an all-reduce inside the host: 100.000 GB/s, and 370.000 elsewhere"
    ]
    assert list(slow_inside({**inside, "n4": 2e11})) == []
    assert list(slow_inside(dict.fromkeys(inside))) == []
    measured = MachineMeasurement(
        device_type="cuda", names=names, matrix_s=[0.01] * 8, copies=copies,
        reads={host: {"1": 1e9} for host in inside}, inside=inside, links={},
    )  # fmt: skip
    assert [finding.host for finding in machine_findings(measured)] == ["n3", "n1", "n4"]
    lines = machine_lines(measured.recorded())
    assert "copy to the device, pinned: 46.5 GB/s (median), 12.0 (slowest)" in lines
    assert "copy to the host, pageable: 10.0 GB/s (median), 2.0 (slowest)" in lines


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    on_cpus = MachineMeasurement(
        device_type="cpu", names=["n1", "n2"], matrix_s=[0.01, 0.02], reads={"n1": {"1": 1e9}},
        inside={"n1": 2e9, "n2": None}, links={(0, 1): 1e8}, direct=DirectReads(not_measured="no GPU"),
    )  # fmt: skip
    found = Finding("n1", "slow", others=("n2",)).recorded
    measured = replace(on_cpus.recorded(), findings=(found,), judged=None, left_out="left out: links")
    measured.write(folder)
    assert MeasuredMachine.read(folder) == measured
    content = json.loads(folder.machine_check.read_text())
    assert [list(rank) for rank in content["ranks"]] == [["host", "flops"]] * 2
    assert content | {"ranks": []} == {
        "device": "cpu", "hosts": ["n1", "n2"], "ranks": [], "reads_bytes_per_s": {"n1": {"1": 1e9}},
        "direct_reads": {"not_measured": "no GPU"}, "inside_busbw_bytes_per_s": {"n1": 2e9, "n2": None},
        "links": [{"hosts": ["n1", "n2"], "bytes_per_s": 1e8}],
        "findings": [{"host": found.host, "what": "slow", "harmful": True, "excludable": False}],
        "judged": None, "left_out": "left out: links",
    }  # fmt: skip


def test_the_lines_end_with_what_can_be_pasted() -> None:
    finding = {"host": "n3", "what": "slow", "harmful": True}
    content = {
        "ranks": [{"host": "n1", "flops": 2e9}, {"host": "n3", "flops": 1e9}],
        "reads_bytes_per_s": {"n1": {"1": 1e8}, "n3": {"1": 3e8}},
        "links": [{"hosts": ["n1", "n3"], "bytes_per_s": 1.2e8}],
        "findings": [
            finding, {**finding, "what": "other"}, {"host": "n4", "what": "link", "harmful": False},
            {"host": "n1 and n2", "what": "hot", "harmful": True, "excludable": False},
        ],
    }  # fmt: skip
    assert lines_of(content) == [
        "matrix product: 1.5 GFLOP/s for each device (median), 1.0 (slowest)",
        "read, processes on each host = 1: 200 MB/s (median of the hosts)",
        "links, in each direction: 0.120 GB/s (median), 0.120 (slowest)",
        "n3: slow", "n3: other", "n4: link", "n1 and n2: hot", "--exclude=n3",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rate", "sentence"),
    [
        (3.9e8, "input scales with the processes: 4 read 3.9 times as fast as 1"),
        (3.25e8, "input scales with the processes: 4 read 3.2 times as fast as 1"),
        (3.2e8, "input scales in part with the processes: 4 read 3.2 times as fast as 1"),
        (1.7e8, "input does not scale with the processes: 4 read 1.7 times as fast as 1"),
        (0.5e8, "input does not scale with the processes: 4 read 0.5 times as fast as 1"),
    ],
)
def test_whether_input_scales(rate: float, sentence: str) -> None:
    reads = {"n1": {"1": 1e8, "2": 1.5e8, "4": rate}, "n2": {"1": 1e8, "2": 1.5e8, "4": rate}}
    lines = lines_of({"reads_bytes_per_s": reads})
    assert [line for line in lines if line.startswith("input")] == [sentence]
    hostile = {"n1": {"1": 0, "9" * 5000: 1e8, "x": 1e8, "-2": 1e8}}
    for content in (hostile, {"n1": {"1": 1e8}}, {"n1": {"4": 1e8}}):
        assert not [line for line in lines_of({"reads_bytes_per_s": content}) if "input" in line]


@pytest.mark.parametrize(
    "content",
    [None, 5, {"ranks": 5, "links": [5, {"hosts": [1, 2], "bytes_per_s": 1}]}, {"findings": [{"host": 5}]},
     {"reads_bytes_per_s": {"a": 5, "b": {"1": "x"}}, "inside_busbw_bytes_per_s": [1]}],
)  # fmt: skip
def test_the_files_of_others_are_checked(content: object) -> None:
    assert lines_of(content) == ["no host stands out"]
    assert "\x1b" not in "".join(lines_of({"findings": [{"host": "\x1b", "what": "\x1b"}]}))


def test_wrong_sizes_are_refused(tmp_path: Path) -> None:
    words = ["task=preflight", "task.message_bytes=1", "task.read_bytes=100"]
    assert [str(problem) for problem in find_problems(resolve(composed(*words))[0], words)] == [
        "task.message_bytes = 1 must be at least 4. Try task.message_bytes=16777216.",
        "task.read_bytes = 100 must be at least 4194304. Try task.read_bytes=134217728.",
    ]


def test_storage_is_checked_where_the_run_is_local(tmp_path: Path) -> None:
    def problems(*words: str) -> list[str]:
        words = ("task=preflight", *words)
        return [str(problem) for problem in find_problems(resolve(composed(*words))[0], words)]

    missing = f"{tmp_path}/nope"
    assert problems(f"task.storage={missing}", "launcher=local") == [
        f"task.storage = {missing} is not a folder. Try task.storage=null.",
    ]
    assert problems(f"task.storage={missing}", "launcher=script") == []  # a job may see other folders
    assert problems(f"task.storage={tmp_path}", "launcher=local") == []


def stored(storage: str, size_bytes: int) -> str:
    """How the reads of a rank end; the folder is there on n2 only."""
    folder = Path(storage) / ("" if dist.get_rank() == 1 else "nope")
    names = ["n1", "n2", "n3"]
    try:
        storage_rates.read_rates(folder, names=names, size_bytes=size_bytes, device=torch.device("cpu"))
    except (PreflightError, FollowerError, ReadingError) as error:
        return f"{type(error).__name__}: {error}"
    return "measured"


def test_storage_that_can_not_be_used_is_named_with_its_hosts(workers: Workers, tmp_path: Path) -> None:
    what = f"n1 and n3: can't write to {tmp_path}/nope: No such file or directory"
    failed = f"PreflightError: {what}. Try another task.storage"
    # The folder in the message is that of the rank.
    assert workers.run(3, stored, str(tmp_path), 2**22) == [
        failed, f"FollowerError: ended with {what.replace('/nope', '')}", failed,
    ]  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_a_read_error_is_named_with_its_host(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    assert storage_rates.read_s(folder, where="n1: /data") == "n1: /data: Is a directory"
    os.close(folder)


class StandIn:
    """The module kvikio, as far as it is used. compatible, available: what it says of itself."""

    __version__ = "0"

    def __init__(self, *, compatible: bool = False, available: bool = True, broken_rank: int = -1) -> None:
        module = self

        class CuFile:
            def __init__(self, path: str, flags: str) -> None:
                assert flags == "r"
                self._content = Path(path).read_bytes()

            def __enter__(self) -> CuFile:
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def read(self, buffer: torch.Tensor) -> int:
                module.reads += 1
                # The first one opens the driver.
                if module.reads > 1 and broken_rank >= 0 and dist.get_rank() == broken_rank:
                    raise RuntimeError("cuFile\nfailed")
                buffer.copy_(torch.frombuffer(bytearray(self._content), dtype=torch.uint8))
                return len(self._content)

        self.reads, self.CuFile = 0, CuFile
        self.defaults = SimpleNamespace(is_compat_mode_preferred=lambda: compatible)
        self.cufile_driver = SimpleNamespace(get={"is_gds_available": available}.__getitem__)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(storage_rates, "kvikio_problem", lambda _: None)  # a CPU plays the GPU
        patch.setitem(sys.modules, "kvikio", self)  # type: ignore[arg-type]
        patch.setitem(sys.modules, "kvikio.defaults", self.defaults)  # type: ignore[arg-type]
        patch.setitem(sys.modules, "kvikio.cufile_driver", self.cufile_driver)  # type: ignore[arg-type]


SIZE = 2**21


def direct(folder: str, options: dict[str, Any]) -> tuple[DirectReads, int]:
    """What a rank measures with a stand-in, and how often it read."""
    path = Path(folder, f"file-{dist.get_rank()}")
    path.write_bytes(os.urandom(SIZE))
    module = StandIn(**options)
    with pytest.MonkeyPatch.context() as patch:
        module.install(patch)
        found = storage_rates.direct_rates(
            path, names=["n1", "n1", "n2"], size_bytes=SIZE, device=torch.device("cpu")
        )
    return found, module.reads


def test_kvikio_reads_with_as_many_processes(workers: Workers, tmp_path: Path) -> None:
    results = workers.run(3, direct, str(tmp_path), {})
    assert [reads for _, reads in results] == [3, 2, 3]  # one opens the driver; then 1 and 2 on each host
    for found, _ in results:
        rates = found.reads_bytes_per_s
        assert {host: list(by_count) for host, by_count in rates.items()} == {"n1": ["1", "2"], "n2": ["1"]}
        assert all(rate > 0 for by_count in rates.values() for rate in by_count.values())
        assert found.mode == "used, as cuFile says; the driver nvidia-fs does not count reads here"


def test_a_read_that_fails_on_one_rank_is_announced_on_all(workers: Workers, tmp_path: Path) -> None:
    results = workers.run(3, direct, str(tmp_path), {"broken_rank": 2})
    assert [found for found, _ in results] == [DirectReads(not_measured="RuntimeError: cuFile failed")] * 3


@pytest.mark.parametrize(
    ("module", "counted", "mode"),
    [
        (StandIn(compatible=True), 5, "compatibility mode of kvikio, which uses no cuFile"),
        (StandIn(available=False), None,
         "compatibility mode of cuFile, because the driver nvidia-fs is not loaded"),
        (StandIn(), 0, "compatibility mode of cuFile: the driver nvidia-fs counted no reads"),
        (StandIn(), 7, "used"),
    ],
)  # fmt: skip
def test_whether_it_was_true_direct_storage(
    module: StandIn, counted: int | None, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module.install(monkeypatch)
    assert storage_rates.direct_mode(module, counted=counted) == mode
    monkeypatch.delattr(module.defaults, "is_compat_mode_preferred")
    unknown = storage_rates.direct_mode(module, counted=counted)  # of another version
    assert unknown.startswith("unknown whether in compatibility mode: kvikio 0, AttributeError: ")


def test_what_can_not_be_measured_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert storage_rates.kvikio_problem(torch.device("cpu")) == "no GPU"
    assert storage_rates.kvikio_problem(torch.device("cuda")) == "kvikio is not installed"
    (tmp_path / "file").write_bytes(bytes(100))
    StandIn().install(monkeypatch)
    reader = storage_rates.open_reader(tmp_path / "file", size_bytes=100, device=torch.device("cpu"))
    assert isinstance(reader, storage_rates.DirectReader)
    assert reader.first_error() is None
    (tmp_path / "file").write_bytes(bytes(60))
    assert "size" in str(reader.first_error())  # of the tensors
    monkeypatch.setattr(reader.kvikio.CuFile, "read", lambda *_: 60)
    assert reader.first_error() == "kvikio read 60 of 100 bytes"
    (tmp_path / "file").write_bytes(bytes(99) + b"\1")
    monkeypatch.setattr(reader.kvikio.CuFile, "read", lambda *_: 100)
    assert reader.first_error() == "kvikio read wrong bytes"
    monkeypatch.setitem(sys.modules, "kvikio", None)
    assert "kvikio" in str(storage_rates.open_reader(tmp_path, size_bytes=9, device=torch.device("cpu")))


def test_reads_that_nvidia_fs_counts(tmp_path: Path) -> None:
    """The lines are those of nvidia-fs 2, with and without its module option rw_stats_enabled."""
    statistics = tmp_path / "stats"
    head = "NVFS statistics(ver: 4.0)\nIO stats: Enabled, peer IO stats: Disabled\n\nReads\t\t\t\t: "
    counts = "n=120 ok=120 err=0 readMiB=480 io_state_err=0\nReads\t\t\t\t: Bandwidth(MiB/s)=9"
    statistics.write_text(head + counts)
    assert storage_rates.counted_reads(statistics) == 120
    statistics.write_text(head + "err=0 io_state_err=0\n")
    assert storage_rates.counted_reads(statistics) is None
    assert storage_rates.counted_reads(tmp_path / "none") is None


def test_lines_about_direct_storage() -> None:
    reads = {"n1": {"1": 2e9, "2": 4e9}, "n2": {"1": 4e9}}
    assert lines_of({"direct_reads": {"reads_bytes_per_s": reads, "mode": "used"}})[:-1] == [
        "read into the GPU by kvikio, processes on each host = 1: 3000 MB/s",
        "read into the GPU by kvikio, processes on each host = 2: 4000 MB/s",
        "GPUDirect Storage: used",
    ]
    lines = lines_of({"direct_reads": {"not_measured": "no\x1b GPU"}})
    assert lines[0] == "GPUDirect Storage: not measured (no\\x1b GPU)"
    assert lines_of({"direct_reads": [1]}) == lines_of({"direct_reads": {"mode": 5}})
