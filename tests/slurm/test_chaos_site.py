"""The site itself fails: hosts, links, the controller, and time runs out."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from chaos import DATA, EVERY, Case
from cluster import Cluster
from test_jobs import read

from hpc_parallel.record.host_memory import ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.chaos, pytest.mark.chaos_slow]
COPIED_EVERY = 2


@pytest.fixture
def patient(cluster: Cluster) -> Iterator[None]:
    """Slurm calls a host lost after minutes, as sites have it."""
    cluster.set_patience(300)
    yield
    cluster.set_patience(10)


@pytest.mark.parametrize("host", ["n1", "n2"])
def test_a_host_is_lost(case: Case, host: str) -> None:
    """n1 has the batch script, rank 0 and the store."""
    job = case.submit(*DATA)
    case.reach(EVERY + 1, 60)
    case.lose(host)
    assert case.ended(job) == "COMPLETED"
    assert host not in case.site.record(job)["NodeList"]
    case.assert_completed(restarts=1, lost=(0, 2 * EVERY))


def test_the_run_goes_on_with_fewer_nodes(case: Case) -> None:
    """Eight samples can't be split over the three hosts that are left."""
    job = case.submit("strategy=data", "nodes=4", "launcher.min_nodes=1")
    case.reach(EVERY + 1, 60)
    case.lose("n2")
    case.assert_continued_in_place(job, r"on 2 of 4 nodes \(failed: n2; waiting: n4\)")
    assert read(case.folder, "summary.json")["world_size"] == 2


def test_a_spare_goes_on_from_the_memory_of_the_lost_host_s_partner(case: Case) -> None:
    """The spare has nothing in its memory: n1 sends it the part that n2 had."""
    job = case.submit(*DATA, "launcher.spares=1", f"training.memory_checkpoint_every={COPIED_EVERY}")
    case.reach(EVERY + COPIED_EVERY + 1, 60)
    case.lose("n2")
    case.assert_continued_in_place(job, "on the spare n3 in place of n2", most_lost=2 * COPIED_EVERY)
    after_step = case.starts[1].after_step
    said = f"continuing from the copy in memory of step {after_step}"
    assert said in (case.folder / "logs/rank-0.out").read_text()
    assert not list(ROOT.glob(f"hpc_parallel-*-{job}-*"))


def test_a_link_is_cut_for_a_while(case: Case, patient: None) -> None:
    job = case.submit(*DATA, "cluster.hang_timeout_s=60")
    case.reach(EVERY + 1, 60)
    case.note("link of n2 cut for 20 s")
    case.site.cluster.cut("n2")
    time.sleep(20)  # what is tried, not a wait for something
    case.site.cluster.mend("n2")
    assert case.ended(job) == "COMPLETED"
    case.assert_completed(restarts=0, lost=0)


def test_a_link_is_cut_for_good(case: Case) -> None:
    """Whoever sees it first, the watchdog or Slurm: it goes on without the host."""
    job = case.submit(*DATA, "cluster.hang_timeout_s=8", "launcher.max_restarts=3")
    case.reach(EVERY + 1, 60)
    case.note("link of n2 cut")
    case.site.cluster.cut("n2")
    assert case.ended(job) == "COMPLETED"
    assert "n2" not in case.site.record(job)["NodeList"]
    case.site.cluster.mend("n2")
    case.assert_completed(restarts=len(case.starts) - 1, lost=(0, 2 * EVERY))


def test_the_controller_restarts(case: Case) -> None:
    job = case.submit(*DATA)
    case.reach(5, 50)
    case.note("slurmctld restarted")
    case.site.cluster.restart_controller()
    assert case.ended(job) == "COMPLETED"
    case.assert_completed(restarts=0, lost=0)


def test_the_time_limit_comes_three_times(case: Case) -> None:
    # No three minutes suffice.
    slow = ("model._target_=tests.models.Slow", "+model.pause_s=1.0", "strategy.verify=never")
    job = case.submit(*DATA, "launcher.time_minutes=1", model=slow)
    assert case.ended(job, within_s=600) == "COMPLETED"
    case.row.done.append(f"stopped after {[start.after_step for start in case.starts[1:]]}")
    restarts = len(case.starts) - 1
    assert restarts >= 3
    case.assert_completed(restarts=restarts, lost=0)
    line = rf"the time limit of 1 min was near: saved at step \d+; requeued as job {job}"
    case.assert_said(job, line, times=restarts)
