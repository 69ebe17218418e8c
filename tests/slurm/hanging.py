"""A test that hangs on purpose, with ranks, an agent and a Slurm of its own; run by test_hanging.py.

    python -m pytest tests/slurm/hanging.py

The environment variable STARTED names the file in which it lists its processes.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cluster import Cluster

from tests.distributed.test_local_launcher import AgentServer, agent_server, make_folder, ranks_of, session
from tests.waiting import wait_for
from tests.workers import Workers


@pytest.fixture
def agents() -> Iterator[AgentServer]:
    with agent_server() as server:
        yield server


@pytest.fixture
def started(workers: Workers, agents: AgentServer, cluster: Cluster, tmp_path: Path) -> None:
    """Ranks of the pool, an agent whose ranks wait for each other, and a job of two hosts."""
    ranks = workers.run(2, os.getpid)
    folder = make_folder(tmp_path, "sleep")
    agent = agents.start(folder)
    ranks_of(folder)
    sleep = "import time; time.sleep(3600)"
    command = shlex.join(["srun", sys.executable, "-c", sleep])
    cluster.run("sbatch", "--nodes=2", f"--output={tmp_path}/%j.out", f"--wrap={command}")
    wait_for(lambda: all(len(cluster.pids(host)) > 2 for host in ("n1", "n2")))
    processes = {*ranks, *session(agent)} | {pid for host in cluster.hosts for pid in cluster.pids(host)}
    created = {pid: psutil.Process(pid).create_time() for pid in processes}
    Path(os.environ["STARTED"]).write_text(json.dumps(created))


@pytest.mark.timeout(3, func_only=True)
def test_hangs(started: None, workers: Workers) -> None:
    workers.run(2, time.sleep, 3600)


def test_the_next_one(workers: Workers, cluster: Cluster) -> None:
    """The same pool and the same Slurm still serve."""
    assert len(set(workers.run(2, os.getpid))) == 2
    assert cluster.run("squeue", "--noheader", "--states=RUNNING") == ""
