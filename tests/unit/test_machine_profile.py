"""A machine profile as a choice of the configuration: what it predicts, what is slower, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpc_parallel.commands.run_command import main
from hpc_parallel.config.command_line import CommandLine
from hpc_parallel.config.site_schema import MachineConfig
from hpc_parallel.config.task_schema import COLLECTIVES
from hpc_parallel.launch.checked_run import checked_run
from hpc_parallel.measure.machine_profile import compare, machine_profile
from hpc_parallel.planning.collective_times import bus_factor, predict
from hpc_parallel.record.collectives_file import CollectiveRow, as_csv, full_table, short_table
from hpc_parallel.record.endings import Summary
from hpc_parallel.record.results import results
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json

LATENCY_S, RATE = 1e-3, 1e9
FACTORS = {  # of nccl-tests (PERFORMANCE.md) for n ranks
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1,
    "reduce": lambda n: 1,
    "all_to_all": lambda n: (n - 1) / n,
    "send_recv": lambda n: 1,
    "barrier": lambda n: 0,
}
SIZES = (8, 4096, 2**20, 2**24, 2**26)  # latency and transfer take the same time at 2/3 MB


def profile(*, ranks: int = 4, error: float = 0.0, **values: Any) -> MachineConfig:
    fit = {"latency_s": LATENCY_S, "bandwidth_bytes_per_s": RATE, "fit_error": error}
    group = {"ranks": ranks, **dict.fromkeys(COLLECTIVES, fit)}
    return MachineConfig(
        **{"site": "good", "measured": "2026-11-20", "collectives": {"world": group}} | values
    )


def rows(*, slow: dict[int, float] | None = None, operation: str = "all_reduce") -> list[CollectiveRow]:
    """Four ranks, whose all-reduce puts 1.5 times its size on the bus. slow: size -> factor."""
    return [
        CollectiveRow(
            group="world", ranks=4, operation=operation, dtype="float32", size_bytes=size,
            time_s=(time_s := (LATENCY_S + 1.5 * size / RATE) * (slow or {}).get(size, 1.0)), spread=0.1,
            rounds=9, algbw_bytes_per_s=size / time_s, busbw_bytes_per_s=1.5 * size / time_s,
        )
        for size in SIZES
    ]  # fmt: skip


@pytest.mark.parametrize("operation", COLLECTIVES)
@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_the_predicted_time_is_latency_and_bytes_on_the_bus(operation: str, ranks: int) -> None:
    size = {"group": "world", "operation": operation, "size_bytes": 3_000_000}
    prediction = predict(profile(ranks=ranks), ranks=ranks, **size)
    assert prediction.time_s == pytest.approx(1e-3 + FACTORS[operation](ranks) * 3e-3)
    assert bus_factor(operation, ranks) == FACTORS[operation](ranks)
    assert predict(profile(ranks=ranks), ranks=ranks + 1, **size) is None
    assert predict(MachineConfig(), ranks=ranks, **size) is None


def test_a_group_is_found_by_its_other_names() -> None:
    measured = [replace(row, group="inside a node", also=("axis shard",)) for row in rows()]
    content = machine_profile(measured, site="here", device_type="cpu", measured="2026-11-20")
    machine = MachineConfig(**content)
    size = {"operation": "all_reduce", "ranks": 4, "size_bytes": 3_000_000}
    prediction = predict(machine, group="axis shard", **size)
    assert prediction == predict(machine, group="inside a node", **size)
    assert prediction.time_s == pytest.approx(1e-3 + 1.5 * 3e-3)
    assert predict(machine, group="axis tensor", **size) is None


def test_a_time_that_does_not_grow_is_the_latency() -> None:
    fit = {"latency_s": 0.25, "bandwidth_bytes_per_s": None}
    machine = MachineConfig(collectives={"world": {"ranks": 2, "barrier": fit}})
    prediction = predict(machine, group="world", operation="barrier", ranks=2, size_bytes=0)
    assert (prediction.time_s, prediction.error) == (0.25, 0)


def test_a_measured_profile_predicts_its_own_times() -> None:
    measured = rows()
    content = machine_profile(measured, site="here", device_type="cpu", measured="2026-11-20")
    comparison = compare(measured, machine=MachineConfig(**content), device_type="cpu")
    assert comparison.predicted_s == pytest.approx([row.time_s for row in measured])
    assert comparison.warnings == []


@pytest.mark.parametrize(
    ("slow", "line"),
    [
        ({2**26: 3.0, 2**24: 3.1, 2**20: 3.2}, "3.1 times as long as the machine profile (good, 2026-11-20) "
         "says, 81.114 ms for 16,777,216 bytes instead of 26.166"),
        ({8: 2.0, 4096: 2.0}, "2.0 times as long as the machine profile (good, 2026-11-20) says, "
         "2.000 ms for 8 bytes instead of 1.000"),
        ({2**24: 9.0}, None),  # one size of three: noise
        (dict.fromkeys(SIZES, 1.4), None),
    ],
)  # fmt: skip
def test_what_is_slower_than_the_profile_is_named_once(slow: dict[int, float], line: str | None) -> None:
    expected = [] if line is None else [f"all_reduce, world (4 ranks): {line}"]
    assert compare(rows(slow=slow), machine=profile(), device_type="cuda").warnings == expected


def test_the_error_of_the_fit_is_no_slowness() -> None:
    slow = rows(slow=dict.fromkeys(SIZES, 2.0))
    assert len(compare(slow, machine=profile(error=0.2), device_type="cpu").warnings) == 1
    assert compare(slow, machine=profile(error=0.4), device_type="cpu").warnings == []


def test_what_is_not_compared_is_said() -> None:
    other_type = [replace(row, dtype="bfloat16") for row in rows()]
    assert compare(other_type, machine=profile(), device_type="cpu").predicted_s == [None] * len(SIZES)
    assert compare(rows(), machine=MachineConfig(), device_type="cpu").warnings == []
    title = "the machine profile (good, 2026-11-20)"
    on_gpus = f"not compared with {title}: it was measured on cuda, and this run uses cpu"
    for machine, warning in (
        (profile(device_type="cuda"), on_gpus),
        (profile(ranks=8), f"world: 4 ranks, and 8 in {title}, so it is not compared"),
        (profile(collectives={"axis tensor": {"ranks": 4}}), f"world: this group is not in {title}"),
    ):
        comparison = compare(rows(slow=dict.fromkeys(SIZES, 9.0)), machine=machine, device_type="cpu")
        assert comparison.predicted_s == [None] * len(SIZES)
        assert comparison.warnings == [warning]


def test_tables_show_the_predicted_time_beside_the_measured() -> None:
    comparison = compare(rows(), machine=profile(), device_type="cpu")
    times = zip(rows(), comparison.predicted_s, strict=True)
    compared = [replace(row, predicted_s=time_s) for row, time_s in times]
    assert full_table(compared).splitlines()[2].split()[4::5] == ["1000.0", "1000.0"]
    assert short_table(compared)[1].split()[-4:] == ["101663.3", "us", "101663.3", "us"]
    assert as_csv(compared).splitlines()[1].endswith(",0.001000012")
    assert "predicted" not in full_table(rows()) + as_csv(rows()) + short_table(rows())[0]


def test_warnings_of_others_are_checked(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for warnings, lines in ((["slow\x1b", 5, None, ""], ["WARNING: slow\\x1b"]), (5, [])):
        write_json(folder.collectives, {"warnings": warnings})
        assert [line for line in results(folder, Summary()) if "WARNING" in line] == lines


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the machine profile `good`."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "site" / "machine"
    folder.mkdir(parents=True)
    content = machine_profile(rows(), site="here", device_type="cpu", measured="2026-11-20")
    (folder / "good.yaml").write_text(yaml.safe_dump(content))
    return tmp_path / "site"


def test_a_site_may_choose_a_profile_and_the_command_line_another(site: Path) -> None:
    (site / "cluster").mkdir()
    (site / "cluster" / "mysite.yaml").write_text(
        "defaults: [override /machine@_global_.machine: good, _self_]\nname: mysite\n"
    )
    words = ["--config-dir=site", "cluster=mysite", "launcher=script"]
    chosen = checked_run(CommandLine.parse(words)).config.machine
    assert (chosen.site, chosen.device_type, chosen.measured) == ("here", "cpu", "2026-11-20")
    assert chosen.collectives["world"]["all_reduce"]["latency_s"] == pytest.approx(LATENCY_S)
    assert checked_run(CommandLine.parse([*words, "machine=none"])).config.machine == MachineConfig()


BROKEN = """\
device_type: cpu
collectives:
  world:
    ranks: two
    all_reduce: {latency_s: -1, bandwidth_bytes_per_s: .nan, fit_error: '0.1'}
    allreduce: {latency_s: 1}
    broadcast: 7
    also: axis shard
    send_recv: {latency_s: true, bandwidth_bytes_per_s: 1.0e-300, extra: 1}
  inside a node: [1]
"""
PROBLEMS = """\
world.ranks = two must be a whole number of at least 1.
world.also = 'axis shard' must be a list of other names of these ranks.
world.all_reduce.latency_s = -1 must be a number of at least 0.
world.all_reduce.bandwidth_bytes_per_s = nan must be a number of at least 1, or null if the time does not \
grow with the size.
world.all_reduce.fit_error = 0.1 must be a number of at least 0.
world.allreduce is no collective. Did you mean all_reduce?
world.broadcast = 7 must be a table with latency_s, bandwidth_bytes_per_s, fit_error.
world.send_recv.extra is not in a machine profile. The keys are latency_s, bandwidth_bytes_per_s, fit_error.
world.send_recv.latency_s = true must be a number of at least 0.
world.send_recv.bandwidth_bytes_per_s = 1e-300 must be a number of at least 1, or null if the time does not \
grow with the size.
inside a node = [1] must be a table with `ranks` and a table for each collective.
"""


def test_a_broken_profile_is_refused_with_all_problems(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (site / "machine" / "broken.yaml").write_text(BROKEN)
    words = ["--config-dir=site", "machine=broken", "launcher=script"]
    assert main(words) == 2
    shown = capsys.readouterr().err.splitlines()[1:]
    assert shown == [f"  machine.collectives.{line}" for line in PROBLEMS.splitlines()]
    (site / "machine" / "broken.yaml").write_text(BROKEN.replace("device_type:", "devicetype:"))
    assert main(words) == 2
    assert capsys.readouterr().err.splitlines()[1:] == [
        f"  {site}/machine/broken.yaml, line 1: there is no key machine.devicetype. Try device_type.",
    ]
