"""`launcher.notify` on a real Slurm: a line for each end of a start, and none twice."""

from __future__ import annotations

import pytest
from test_in_place import AGAIN, killed
from test_jobs import Site

from hpc_parallel.record import attempts
from tests.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.full, pytest.mark.timeout(600)]


def test_a_restart_a_requeue_and_the_end_are_told(site: Site) -> None:
    told = site.home / "told"
    folder, job = killed(site, f"launcher.notify='cat >> {told}'")
    wait_for(lambda: told.exists() and "restart" in told.read_text())
    wait_for(lambda: len(attempts.starts(folder)) == 2)
    site.cluster.run("scontrol", "requeue", job)
    wait_for(lambda: len(attempts.starts(folder)) == 3)
    site.cluster.run("scancel", job)
    assert site.ended(job)["JobState"] == "CANCELLED"
    wait_for(folder.summary.exists)
    wait_for(lambda: told.read_text().count("\n") == 3)
    died, requeued, ended = told.read_text().splitlines()
    (first, *_) = attempts.ends(folder)
    assert died == f"run: restart, in place: {first.line}; {AGAIN.format(1)}"
    assert requeued.startswith("run: restart: preempted by Slurm: ")
    assert requeued.endswith(f"; requeued by Slurm itself as job {job}")
    assert ended.startswith("run: end: cancelled by SIGTERM")
