"""`task=calibrate` on ranks of this machine: its profile is read by plans, and says what was measured."""

from __future__ import annotations

import json
import os

import pytest
import yaml

from hpc_parallel.measure import calibrate, collectives_plan, device_probes
from hpc_parallel.planning.device_fit import (
    BLOCK_BACKWARD,
    BLOCK_FORWARD,
    ELEMENTWISE,
    LAUNCH,
    PRODUCT,
    UPDATE,
)
from hpc_parallel.planning.hardware import read_hardware
from hpc_parallel.record.endings import Summary
from hpc_parallel.record.results import results
from tests.workers import Workers, do_here


def calibrate_briefly(run_folder: str) -> None:
    """A few small sizes of each kind, for a moment each: the test does not ask how fast they are."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (calibrate, collectives_plan):
            patch.setattr(module, "ROW_S", 0.02)
        for name, count in {"SIDES": 2, "MOVED_BYTES": 2, "BLOCKS": 1, "UPDATED": 2}.items():
            sizes = getattr(device_probes, name)
            patch.setitem(sizes, "cpu", sizes["cpu"][:count])
        patch.setitem(calibrate.MOST_LINK_BYTES, "cpu", 2**18)
        do_here(run_folder)


def test_a_profile_of_this_machine(workers: Workers) -> None:
    run = workers.prepare("task=calibrate", "nodes=2", "strategy=data", "task.seconds=60")
    workers.run(2, calibrate_briefly, str(run.folder.path))
    folder = run.folder
    hardware = read_hardware("hardware", folders=[folder.path])
    cores = len(os.sched_getaffinity(0))
    assert hardware.shared_cores == cores  # both nodes are processes of this machine
    assert hardware.node.devices == 1
    assert hardware.calibration == "task=calibrate on 2 devices"
    storage = hardware.storage
    assert storage.write_bytes_per_s is not None
    assert storage.together_bytes_per_s == pytest.approx(2 * storage.write_bytes_per_s, rel=1e-4)
    assert storage.read_bytes_per_s is not None
    assert storage.copy_bytes_per_s is None  # no GPU
    rows = json.loads(folder.calibration.read_text())["rows"]
    assert {row["kind"] for row in rows} >= {
        BLOCK_BACKWARD, BLOCK_FORWARD, ELEMENTWISE, LAUNCH, PRODUCT, UPDATE,
    }  # fmt: skip
    fastest = {}
    for row in rows:
        if row["kind"] == PRODUCT:
            rate = 2 * row["size"] ** 3 / row["time_s"]
            fastest[row["precision"]] = max(rate, fastest.get(row["precision"], 0.0))
    assert fastest.keys() == {"float32", "bfloat16", "float64"}
    for precision, rate in fastest.items():
        assert hardware.device.peak_flops[precision] == pytest.approx(rate, rel=1e-4)
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert {line["group"] for line in lines if "group" in line} == {"world"}
    assert len({line["steps"] for line in lines}) == 1
    shown = results(folder, Summary())
    assert f"all devices share {cores} cores" in shown
    assert shown[-1].endswith("`plan --config-dir FOLDER hardware=NAME`")
    sources = folder.hardware.read_text()
    assert yaml.safe_load(sources)["device"]["kind"] == "cpu"
    assert "peak_flops: # the fastest product of each type, not a data sheet" in sources
