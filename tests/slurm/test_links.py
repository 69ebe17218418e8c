"""The network under a job breaks: for a moment, and for longer than the time-out of hangs."""

from __future__ import annotations

import re
import time
from pathlib import Path

import psutil
import pytest
from cluster import Cluster
from test_jobs import SMALL, Site, losses, read, wait_for

from tests.workers import Workers

pytestmark = [pytest.mark.slurm, pytest.mark.full]

CUT = "n4"


@pytest.fixture
def site(cluster: Cluster, tmp_path: Path) -> Site:
    return Site(cluster, tmp_path)


def test_a_link_cut_for_a_moment_changes_nothing(site: Site, workers: Workers) -> None:
    # float64: over so many steps float32 would make the order of sums visible
    words = (*SMALL, "training.steps=120", "training.precision=float64")
    following = site.follow("strategy=data", "nodes=4", *words, "cluster.hang_timeout_s=20", "run_dir=moment")
    folder = site.home / "moment"
    wait_for((folder / "metrics.jsonl").exists)
    site.cluster.cut(CUT)
    try:
        time.sleep(2)
        before = len(losses(folder))
        time.sleep(1)
        assert len(losses(folder)) == before < 120  # it does stand
    finally:
        site.cluster.mend(CUT)
    output, _ = following.communicate(timeout=240)
    assert following.returncode == 0, output
    assert read(folder, "summary.json")["outcome"] == "completed"
    assert len(losses(folder)) == 120
    assert not list((folder / "logs").glob("*.hang.json"))
    alone = workers.train("strategy=single", *words)
    assert losses(folder) == pytest.approx(alone.losses, rel=1e-9)


def test_a_lost_link_is_named(site: Site) -> None:
    hosts = ("nodes=2", f"+launcher.extra.nodelist='n1,{CUT}'")
    words = ("strategy=data", *hosts, *SMALL, "training.steps=100000", "cluster.hang_timeout_s=15")
    following = site.follow(*words, "run_dir=lost")
    folder = site.home / "lost"
    wait_for((folder / "metrics.jsonl").exists)
    site.cluster.cut(CUT)
    try:
        wait_for(lambda: len(list((folder / "logs").glob("rank-*.hang.json"))) == 2)
        wait_for(lambda: not working(folder))
    finally:
        site.cluster.mend(CUT)  # for Slurm itself, which else waits for the host's slurmd
    output, _ = following.communicate(timeout=240)
    assert following.returncode == 1
    failure = read(folder, "failure.json")
    assert (failure["rank"], failure["host"], failure["kind"]) == (1, CUT, "hang")
    assert re.match(
        rf"rank 1 on {CUT} failed first: lost link: {CUT} can't reach rank 0 on n1 "
        rf"\({re.escape(site.cluster.hosts['n1'])}:\d+\) any more; it stands in ",
        failure["line"],
    )
    assert output.strip().splitlines()[-1] == failure["line"]


def working(folder: Path) -> list[int]:
    """The run's worker processes."""
    return [
        found.pid
        for found in psutil.process_iter(["cmdline"])
        if {"hpc_parallel.worker.main", str(folder)} <= set(found.info["cmdline"] or [])
    ]
