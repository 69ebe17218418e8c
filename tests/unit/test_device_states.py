"""The devices of a run in `show` and in the report: the median of all, and the worst with its rank."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_parallel.commands import show
from hpc_parallel.machine.device_state import EnergyCounter
from hpc_parallel.machine.world import World
from hpc_parallel.record import attempts
from hpc_parallel.record.recorded_slow_ranks import device_file
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.report.run_lines import device_lines
from hpc_parallel.script import script_metrics
from hpc_parallel.script.script_metrics import gpu_of
from hpc_parallel.slurm import records
from tests.nvml import Nvml, NVMLError
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


KWH = 3.6e9  # in NVML's unit, mJ


def test_the_energy_of_a_gpu_is_the_sum_of_the_differences_of_its_counter() -> None:
    readings = iter((5 * KWH, 5.5 * KWH, NVMLError(), 6 * KWH, 0.25 * KWH, 0.5 * KWH))  # a driver loaded anew

    def read(handle: int) -> int:
        if isinstance(value := next(readings), NVMLError):
            raise value
        return int(value)

    nvml = Nvml(1, nvmlDeviceGetHandleByUUID=lambda uuid: 0, nvmlDeviceGetTotalEnergyConsumption=read)
    counter = EnergyCounter(nvml, "GPU-0")
    assert [counter.joules() / 3.6e6 for _ in range(5)] == pytest.approx([0.5, 0.5, 1.0, 1.25, 1.5])
    without = Nvml(1, nvmlDeviceGetHandleByUUID=lambda uuid: 0)
    for machine, uuid in ((without, "GPU-0"), (None, "GPU-0"), (nvml, None)):
        assert math.isnan(EnergyCounter(machine, uuid).joules())


@pytest.mark.parametrize(
    ("energy", "printed", "lines"),
    [
        ({"gpu_kwh": 1.234, "gpus": 4, "of_gpus": 4}, "7200000\n3600000\n", ["1.23 kWh", "3 kWh"]),
        ({"gpu_kwh": 1.234, "gpus": 3, "of_gpus": 4}, "7200000\n\n",  # not for each start
         ["1.23 kWh, of 3 of 4 GPUs: the others have no counter"]),
        ({}, "0\n", []), ({}, "18446744073709551614\n", []), ({}, None, []), ({}, "", []),
        ({}, "36000\n", ["0.01 kWh"]),
    ],
)  # fmt: skip
def test_show_has_the_energy(
    energy: dict[str, float], printed: str | None, lines: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    asked = []
    monkeypatch.setattr(records, "printed", lambda *words, **_: asked.append(words) or printed)
    folder = finished(tmp_path / "run", "strategy=data", "nodes=2")
    attempts.begin(folder, step=0, environment={"SLURM_JOB_ID": "7"})
    attempts.begin(folder, step=0, environment={"SLURM_JOB_ID": "8"})
    write_json(folder.summary, {**json.loads(folder.summary.read_text()), "energy": energy})
    assert show.main([str(folder.path)]) == 0
    titles = ("energy of the GPUs", "energy by Slurm")
    shown = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith(titles)]
    assert [re.split("  +", line)[1] for line in shown] == lines
    assert [words[-1] for words in asked if words[0] == "sacct"] == ["7,8"]
    write_json(folder.owner, {"job_id": "8", "waits": False, "over": True})  # a packed job
    show.main([str(folder.path)])
    assert "energy by Slurm" not in capsys.readouterr().out


def test_of_a_script_each_rank_has_a_file(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    for rank, cores in enumerate((3.9, 4.0, 0.5)):
        figures = gpu(rank, 0.9, 40 + rank, 380, 60) | {"cpu_cores": cores, "resident_bytes": 2 * GIB}
        device_file(folder, rank=rank).write_text(json.dumps(figures))
    device_file(folder, rank=3).write_text("{")
    assert device_lines(folder) == [
        ("utilisation", "median 90%, worst 90% (rank 0 on n0)"),
        ("memory", "median 41.0 GiB, worst 42.0 GiB (rank 2 on n1)"),
        ("power", "median 380 W, worst 380 W (rank 2 on n1)"),
        ("temperature", "median 60 °C, worst 60 °C (rank 2 on n1)"),
        ("CPU", "median 3.9 cores, worst 0.5 cores (rank 2 on n1)"),
        ("resident memory", "median 2.0 GiB, worst 2.0 GiB (rank 2 on n1)"),
    ]


def four_gpus() -> Nvml:
    """Four GPUs, whose load is that of the second of three samples."""
    loads = iter((50, 100, 0))
    return Nvml(
        4,
        nvmlDeviceGetHandleByUUID=lambda uuid: int(uuid.removeprefix("GPU-")),
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=next(loads)),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=handle * GIB),
        nvmlDeviceGetTemperature=lambda handle, sensor: 60,
    )


@pytest.mark.parametrize(
    ("visible", "local_rank", "uuid"),
    [
        (None, 3, "GPU-3"), ("2,3", 1, "GPU-3"), ("1", 5, "GPU-1"), ("GPU-7,GPU-8", 1, "GPU-8"),
        ("", 0, None),
    ],
)  # fmt: skip
def test_the_gpu_of_a_rank_is_that_of_its_local_rank(
    visible: str | None, local_rank: int, uuid: str | None
) -> None:
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpu_of({**variables, "LOCAL_RANK": str(local_rank)}, nvml=four_gpus()) == uuid


def test_loads_are_averaged_and_memory_is_the_highest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_metrics, "nvml_module", four_gpus)
    folder = RunFolder(tmp_path / "run")
    folder.create()
    world = World.discover({})
    watch = script_metrics.DeviceWatch(
        folder, world=world, process=os.getpid(), environment={"LOCAL_RANK": "2"}
    )
    for call in range(21):  # three of them take a sample
        watch(call == 21)
    figures = json.loads(device_file(folder, rank=0).read_text())
    assert (figures["utilisation"], figures["memory_bytes"]) == (0.5, 2 * GIB)
    assert "power_w" not in figures
    assert figures["resident_bytes"] > 10 * 2**20
