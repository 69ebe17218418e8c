"""Which host the checks at a start accuse, and of what; nobody is accused without a reason."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_parallel.config.schema import PreflightConfig
from hpc_parallel.record import attempts
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.supervise import failure, host_facts
from hpc_parallel.supervise.host_facts import different_packages, disk, driver_version
from hpc_parallel.supervise.preflight_findings import findings
from hpc_parallel.supervise.restart import MOST_EXCLUDED, allowed, hosts_to_exclude
from hpc_parallel.supervise.world import World
from hpc_parallel.training.nonfinite import FollowerError
from hpc_parallel.worker import preflight

GIB = 2**30
HEALTHY_GPU = {"uncorrected_errors": 0, "throttled": [], "bad_rows": False, "foreign": []}


def facts(number: int) -> dict[str, Any]:
    """A healthy host; figures differ between hosts as measured ones do."""
    noise = Random(number).uniform
    return {
        "versions": {"torch": "2.13.0", "nccl": "2.27.7", "driver": "570.86", "packages": "aa"},
        "disks": {
            "run": {"folder": "/runs", "free_bytes": 50 * GIB, "write_s": 0.1,
                    "write_bytes_per_s": 1e8 * noise(0.5, 2)},
        },
        "gpus": [dict(HEALTHY_GPU)] * 2,
        "devices": [{"name": "H100", "total_bytes": 80 * GIB, "used_bytes": 0.6 * GIB}] * 2,
        "matrix_s": [0.010 * noise(0.8, 1.2) for _ in range(2)],
        "time_s": 1000.0 + noise(-0.5, 0.5),
        "time_tolerance_s": 0.01,
    }  # fmt: skip


def hosts(count: int = 4) -> dict[str, dict[str, Any]]:
    return {f"n{number}": facts(number) for number in range(1, count + 1)}


def told(cluster: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    return [(finding.host, finding.what) for finding in findings(cluster)]


@pytest.mark.parametrize("count", [1, 2, 3, 8, 100])
def test_nobody_is_accused_in_healthy_clusters(count: int) -> None:
    assert told(hosts(count)) == []


def test_the_products_of_a_single_host_are_not_timed() -> None:
    cluster = hosts(1)
    cluster["n1"]["matrix_s"] = []
    assert told(cluster) == []


@pytest.mark.parametrize(
    ("path", "value", "what"),
    [
        (("versions", "torch"), "2.11.0", "torch 2.11.0, and 2.13.0 elsewhere"),
        (("versions", "driver"), None, "driver missing, and 570.86 elsewhere"),
        (("devices",), [{"name": "A100", "total_bytes": 80 * GIB, "used_bytes": 0}] * 2,
         "devices 2 x A100, and 2 x H100 elsewhere"),
        (("devices", 1), {"name": "H100", "total_bytes": 80 * GIB, "used_bytes": 20 * GIB},
         "device 1: 21.5 of 85.9 GB are used by other processes"),
        (("gpus", 0), {**HEALTHY_GPU, "uncorrected_errors": 3},
         "GPU 0: 3 memory errors that ECC could not correct"),
        (("gpus", 1), {**HEALTHY_GPU, "throttled": ["too hot"]}, "GPU 1: low clocks (too hot)"),
        (("gpus", 1), {**HEALTHY_GPU, "bad_rows": True},
         "GPU 1: rows of its memory wait for a reset or can't be replaced"),
        (("gpus", 1), {**HEALTHY_GPU, "foreign": [77]}, "GPU 1: used by other processes (77)"),
        (("disks", "run"), {"folder": "/runs", "error": "No space left on device"},
         "run folder /runs: No space left on device"),
        (("disks", "run", "free_bytes"), 2e8, "run folder /runs: 0.20 GB free"),
        (("matrix_s",), [0.01, 0.03], "a matrix product takes 30.0 ms, and 10.0 elsewhere"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("count", [2, 3, 8])
def test_the_host_is_named(path: tuple[Any, ...], value: Any, what: str, count: int) -> None:
    cluster = hosts(count)
    for each in cluster.values():
        each["matrix_s"] = [0.01, 0.01]
    place: Any = cluster[f"n{count}"]
    for key in path[:-1]:
        place[key] = type(place[key])(place[key])  # the healthy hosts share it
        place = place[key]
    place[path[-1]] = value
    assert told(cluster) == [(f"n{count}", what)]
    assert findings(cluster)[0].harmful


def test_slow_disks_and_wrong_clocks_do_no_harm() -> None:
    cluster = hosts()
    cluster["n2"]["time_s"] += 7
    slow = {"write_bytes_per_s": 2e6, "write_s": 2.0, "free_bytes": 50 * GIB, "folder": "/runs"}
    cluster["n3"]["disks"] = {"run": slow}
    first, second = findings(cluster)
    assert (first.host, second.host, first.harmful, second.harmful) == ("n2", "n3", False, False)
    assert first.what.startswith("its clock is +")
    assert second.what.startswith("run folder /runs: writes 2.0 MB/s")


def test_packages_that_differ_are_named() -> None:
    by_host = {"n1": {"a": "1", "b": "2"}, "n2": {"a": "1", "b": "3"}, "n3": {"a": "1"}}
    assert different_packages(by_host) == {"b": {"n1": "2", "n2": "3", "n3": None}}
    cluster = hosts(3)
    cluster["n2"]["versions"]["packages"] = "bb"
    cluster["n2"]["differing"] = ["b 3"]
    assert told(cluster) == [("n2", "other packages: b 3")]


def test_facts_of_this_machine(tmp_path: Path) -> None:
    written = disk(tmp_path)
    assert written["free_bytes"] > 0
    assert written["write_bytes_per_s"] * written["write_s"] == pytest.approx(host_facts.WRITTEN_BYTES)
    assert disk(tmp_path / "missing")["error"] == "No such file or directory"
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
    (tmp_path / "version").write_text(line)
    assert driver_version(tmp_path / "version") == "570.86.15"
    (tmp_path / "version").write_text(line.replace("Open Kernel Module for x86_64", "x86_64 Kernel Module"))
    assert driver_version(tmp_path / "version") == "570.86.15"
    assert driver_version(tmp_path / "none") is None


def test_ranks_are_joined_by_host() -> None:
    gpus = [{"uuid": "GPU-a", "processes": [11, 12, 99]}, {"uuid": "GPU-z", "processes": [5]}]
    device = {"uuid": "GPU-a", "name": "H100"}
    ranks = [
        {"host": "n1", "pid": 11, "device": device, "facts": {"gpus": gpus}},
        {"host": "n1", "pid": 12, "device": device, "facts": None},
    ]
    (own,) = preflight.by_host(ranks, matrix_s=[0.1, 0.2]).values()
    assert own["matrix_s"] == [0.1, 0.2]
    assert own["devices"] == [device, device]
    assert own["gpus"] == [{"uuid": "GPU-a", "processes": [11, 12, 99], "foreign": [99]}]


def test_the_host_that_is_to_blame_ends_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = hosts()
    cluster["n3"]["devices"] = []
    monkeypatch.setattr(preflight, "_facts_of_rank", lambda *_, **__: {})
    monkeypatch.setattr(preflight.exchange, "all_gather", lambda _: [])
    monkeypatch.setattr(preflight, "by_host", lambda *_, **__: cluster)
    monkeypatch.setattr(preflight, "matrix_times_s", lambda _: [])

    def started(act: str, *, host: str) -> None:
        config = SimpleNamespace(preflight=PreflightConfig(act=act))
        world = World(1, 4, 0, 1, 1, 4, host=host, launcher="slurm", attempt="x")
        preflight.check(RunFolder(tmp_path), config=config, world=world, device=None)  # type: ignore[arg-type]

    started("report", host="n3")
    started("off", host="n3")
    what = "n3: devices none, and 2 x H100 elsewhere"
    with pytest.raises(preflight.PreflightError, match=f"^{what}. Try launcher.exclude=n3, or") as stopped:
        started("stop", host="n3")
    assert stopped.value.details == {"exclude": False}
    with pytest.raises(preflight.PreflightError, match=f"^{what}$") as stopped:
        started("exclude", host="n3")
    assert stopped.value.details == {"exclude": True}
    with pytest.raises(FollowerError, match=f"ended with {what}"):
        started("exclude", host="n1")


def test_an_accused_host_is_excluded_from_the_next_start(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    launcher = {"max_requeues": 0, "max_restarts": 0}
    cause = {"kind": failure.PREFLIGHT, "rank": 2, "details": {"exclude": True}}
    assert failure.can_restart(cause, on_nonfinite="stop")
    assert not failure.can_restart({**cause, "details": {"exclude": False}}, on_nonfinite="stop")
    for number in range(MOST_EXCLUDED + 1):
        with folder.attempts.open("a") as file:
            line = {"ended": "2026-11-23T01:00:00+00:00", "how": failure.PREFLIGHT, "host": f"n{number}"}
            file.write(json.dumps(line) + "\n")
        goes_on = allowed(folder, how=failure.PREFLIGHT, recoverable=True, launcher=launcher)
        assert goes_on == (number < MOST_EXCLUDED)
        assert hosts_to_exclude(folder) == [f"n{at}" for at in range(number + 1)]
    assert len(attempts.recent_ends(folder)) == MOST_EXCLUDED + 1
