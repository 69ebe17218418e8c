"""The network under a job breaks: for a moment, and for longer than the time-out of hangs."""

from __future__ import annotations

import re
import time

import pytest
from test_jobs import ONCE, SMALL, Site, losses, read, worker_of

from tests.waiting import wait_for
from tests.workers import Workers

pytestmark = [pytest.mark.slurm, pytest.mark.full]

CUT = "n4"


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
    words = ("strategy=data", *hosts, *SMALL, "training.steps=100000", "cluster.hang_timeout_s=15", *ONCE)
    following = site.follow(*words, "run_dir=lost")
    folder = site.home / "lost"
    wait_for((folder / "metrics.jsonl").exists)
    site.cluster.cut(CUT)
    try:
        wait_for(lambda: len(list((folder / "logs").glob("rank-*.hang.json"))) == 2)
        wait_for(lambda: not worker_of(folder, rank=0) and not worker_of(folder, rank=1))
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
