"""The checks at a start on a real Slurm: a host with a fault is found by name, and a clean one is not."""

from __future__ import annotations

import importlib.metadata
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest
from cluster import Cluster
from slow_host import held_back
from test_jobs import SMALL, Site, read

from hpc_parallel.record import attempts
from hpc_parallel.record.run_folder import RunFolder

# timing: the checks also compare how fast hosts are, and another test would make one slow.
pytestmark = [pytest.mark.slurm, pytest.mark.full, pytest.mark.timing, pytest.mark.timeout(1200)]

HOSTS, BAD = 4, "n3"
WORDS = ("strategy=data", f"nodes={HOSTS}", *SMALL, "training.steps=2", "launcher.wait=true")
PACKAGE = "xxhash"
SMALL_DISK = ("-t", "tmpfs", "-o", "size=64k", "tmpfs")


def findings(site: Site, *words: str, code: int = 0) -> list[dict[str, Any]]:
    """What the checks of a run on all four hosts have found."""
    done = site.run(*WORDS, *words, "run_dir=run", timeout_s=200)
    assert done.returncode == code, done.stdout + done.stderr
    checked = read(site.home / "run", "preflight.json")
    assert len(checked["hosts"]) == HOSTS
    found: list[dict[str, Any]] = checked["findings"]
    return found


def inside(cluster: Cluster, *command: str, host: str = BAD) -> None:
    """Run a command among the mounts of a host, which its slurmd and its jobs see."""
    slurmd = next(pid for pid in cluster.pids(host) if psutil.Process(pid).name() == "slurmd")
    subprocess.run(["nsenter", f"--mount=/proc/{slurmd}/ns/mnt", *command], check=True)


@contextmanager
def mounted(cluster: Cluster, target: Path, *options: str, host: str = BAD) -> Iterator[None]:
    """Something else in the place of `target` on one host alone."""
    inside(cluster, "mount", *options, str(target), host=host)
    try:
        yield
    finally:
        inside(cluster, "umount", "--lazy", str(target), host=host)


@pytest.fixture
def full_disk(site: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary folder of all hosts, which has no room on the bad one."""
    scratch = site.home / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    with mounted(site.cluster, scratch, *SMALL_DISK):
        yield scratch


def test_a_full_disk_and_another_package_are_found_by_name(site: Site, full_disk: Path) -> None:
    package = importlib.metadata.distribution(PACKAGE)
    metadata = Path(str(package.locate_file(""))) / f"{PACKAGE}-{package.version}.dist-info" / "METADATA"
    older = site.home / "METADATA"
    older.write_text(metadata.read_text().replace(f"Version: {package.version}", "Version: 0.1"))
    with mounted(site.cluster, metadata, "--bind", str(older)):
        found = findings(site, "preflight.act=stop", code=1)
    assert {finding["host"] for finding in found} == {BAD}
    assert [finding["what"] for finding in found] == [
        f"other packages: {PACKAGE} 0.1",
        f"temporary folder {full_disk}: No space left on device",
    ]
    failed = read(site.home / "run", "failure.json")
    assert (failed["kind"], failed["host"]) == ("preflight", BAD)
    assert f"Try launcher.exclude={BAD}, or preflight.act=report" in failed["line"]


def test_an_accused_host_is_left_out_of_the_next_start(site: Site, full_disk: Path) -> None:
    words = (*WORDS, "nodes=3", "preflight.act=exclude", "run_dir=run")
    done = site.run(*words, timeout_s=250)
    assert done.returncode == 0, done.stdout + done.stderr
    ends = attempts.recent_ends(RunFolder(site.home / "run"))
    assert [(end.how, end.host) for end in ends] == [("preflight", BAD)]
    hosts = {rank["host"] for rank in read(site.home / "run", "environment.json")["ranks"]}
    assert hosts == {"n1", "n2", "n4"}


def test_a_spare_that_fails_its_checks_is_never_chosen(site: Site, full_disk: Path) -> None:
    """The disks of n2, which the first start accuses, and of the spare n3 are full: n4 takes the place."""
    words = (*WORDS, "nodes=2", "launcher.spares=2", "preflight.act=exclude", "run_dir=run")
    with mounted(site.cluster, full_disk, *SMALL_DISK, host="n2"):
        done = site.run(*words, timeout_s=250)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = RunFolder(site.home / "run")
    assert folder.unfit_spares.read_text() == f"{BAD}\n"
    assert {rank["host"] for rank in read(folder.path, "environment.json")["ranks"]} == {"n1", "n4"}
    log = "".join(path.read_text() for path in folder.slurm.glob("*.out"))
    full = (
        f"the spare {BAD} failed its checks and is not used: temporary folder {full_disk}: No space left on"
    )
    assert log.count(full) == 1
    again = "the ranks start again in the same job, on the spare n4 in place of n2, after its checks"
    assert log.count(again) == 1


def test_a_job_for_which_too_few_hosts_are_left_ends(site: Site, full_disk: Path) -> None:
    """Slurm would let it wait forever."""
    found = findings(site, "preflight.act=exclude", code=1)
    assert {finding["host"] for finding in found} == {BAD}
    (log,) = (site.home / "run" / "slurm").glob("*_0_log.out")
    line = f"not requeued: without {BAD} partition main has {HOSTS - 1} hosts, and the job needs {HOSTS}. "
    assert line in log.read_text()
    assert line in read(site.home / "run", "failure.json")["line"]


def test_a_host_with_busy_cpus_is_found_by_name(site: Site) -> None:
    """Its rank runs a third of the time, as beside two other processes on the same core."""
    with held_back(site.cluster, BAD, runs_s=0.03, pauses_s=0.06):
        found = findings(site)
    assert {finding["host"] for finding in found} == {BAD}
    assert "a matrix product takes" in found[0]["what"]


def test_nobody_is_accused_in_clean_runs(site: Site) -> None:
    took_s = []
    for _ in range(20):
        assert findings(site) == []
        took_s.append(read(site.home / "run", "preflight.json")["took_s"])
        (site.home / "run").rename(site.home / f"run-{time.monotonic_ns()}")
    print(f"the checks of {HOSTS} hosts took {median(took_s):.1f} s (median), {max(took_s):.1f} s at most")


MEASURED = ("task=preflight", "strategy=data", f"nodes={HOSTS}", "task.message_bytes=4000000",
            "task.read_bytes=8388608", "launcher.wait=true", "run_dir=links")  # fmt: skip


def measured_links(site: Site) -> tuple[dict[str, Any], str]:
    """What task=preflight wrote on four hosts, and what the command said."""
    done = site.run(*MEASURED, timeout_s=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return read(site.home / "links", "machine_check.json"), done.stdout


def test_a_slow_link_is_found_by_name(site: Site) -> None:
    """All links have 1 Gbit/s; that of one host has a tenth."""
    site.cluster.shape("1gbit")
    site.cluster.shape("100mbit", BAD)
    try:
        checked, said = measured_links(site)
    finally:
        site.cluster.unshape()
    assert [finding["host"] for finding in checked["findings"]] == [BAD]
    rates = {tuple(link["hosts"]): link["bytes_per_s"] for link in checked["links"]}
    assert len(rates) == HOSTS * (HOSTS - 1) // 2
    slow = [rate for hosts, rate in rates.items() if BAD in hosts]
    assert 0.5 * 12.5e6 < min(slow) <= max(slow) < 1.1 * 12.5e6 + 1e6  # 1 MB passes in a burst
    assert all(rate > 0.5 * 125e6 for hosts, rate in rates.items() if BAD not in hosts)
    assert f"--exclude={BAD}" in said.splitlines()
    (site.home / "links").rename(site.home / "slow")
    clean, said = measured_links(site)
    assert clean["findings"] == []
    assert "no host stands out" in said.splitlines()
