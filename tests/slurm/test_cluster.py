"""The cluster does what a site's Slurm does, by Slurm's own records, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import Cluster, reap, unavailable_reason
from machine import Process

from tests.waiting import wait_for

pytestmark = pytest.mark.slurm


def submit(cluster: Cluster, script: str, *options: str) -> str:
    """Submit a batch script's body and return the job's id."""
    return cluster.run("sbatch", "--parsable", "--output=/dev/null", *options, f"--wrap={script}")


def in_state(cluster: Cluster, job: str, state: str) -> Callable[[], bool]:
    return lambda: cluster.job(job)["JobState"] == state


def running(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def remains(folder: str, bridge: str) -> bool:
    """Whether a cluster's folder, one of its namespaces or one of its links is still there."""
    links = [link.name.partition("-")[0] for link in Path("/sys/class/net").iterdir()]
    return Path(folder).exists() or folder in Path("/proc/self/mountinfo").read_text() or bridge in links


@pytest.fixture
def no_grace(cluster: Cluster) -> Iterator[None]:
    """Preempted jobs of `main` end at once; their grace ends only at Slurm's next look, 30 s apart."""
    cluster.run("scontrol", "update", "PartitionName=main", "GraceTime=0")
    yield
    cluster.run("scontrol", "update", "PartitionName=main", "GraceTime=20")


def test_all_hosts_are_idle_in_both_partitions(cluster: Cluster) -> None:
    wait_for(lambda: not cluster.run("squeue", "--noheader"))  # of tests before this one
    lines = cluster.run("sinfo", "--noheader", "--format=%R %a %D %T %c %G %N").splitlines()
    assert lines == ["main up 4 idle 8 gpu:4 n[1-4]", "urgent up 4 idle 8 gpu:4 n[1-4]"]


def test_tasks_run_on_hosts_with_their_own_name_and_address(cluster: Cluster) -> None:
    own_address = "ip -4 -o address show dev fabric0 | sed 's,.*inet \\(.*\\)/24.*,\\1,'"
    script = f'echo $(hostname) $({own_address}) $(getent hosts $(hostname) | cut -d" " -f1)'
    lines = cluster.run("srun", "--nodes=4", "sh", "-c", script).splitlines()
    assert sorted(lines) == [f"{host} {address} {address}" for host, address in cluster.hosts.items()]


@pytest.mark.full
@pytest.mark.timing
def test_links_can_be_slowed_down(cluster: Cluster) -> None:
    free = bits_per_s(cluster, size=8 << 20)
    cluster.shape("100mbit")
    try:
        shaped = bits_per_s(cluster, size=8 << 20)
    finally:
        cluster.unshape()
    assert shaped < 120e6  # the first MiB, the bucket, is free
    assert min(free, bits_per_s(cluster, size=8 << 20)) > 2 * shaped


def bits_per_s(cluster: Cluster, *, size: int) -> float:
    """From n1 to n2, by a connection of TCP's own, counted from its first byte to its last."""
    receive = (
        "import socket, time; server = socket.create_server(('', 5001)); print(flush=True);"
        "peer, _ = server.accept(); peer.recv(1); began = time.perf_counter()\n"
        "while peer.recv(1 << 16): pass\n"
        "print(time.perf_counter() - began)"
    )
    send = f"import socket; socket.create_connection(('{cluster.hosts['n2']}', 5001)).sendall(bytes({size}))"
    with subprocess.Popen(
        cluster.on("n2", sys.executable, "-c", receive), stdout=subprocess.PIPE, text=True
    ) as receiver:
        assert receiver.stdout is not None
        receiver.stdout.readline()
        cluster.run(sys.executable, "-c", send, host="n1")
        return 8 * size / float(receiver.stdout.readline())


def test_slurm_hands_out_gpus(cluster: Cluster) -> None:
    show = "echo $CUDA_VISIBLE_DEVICES $SLURM_GPUS_ON_NODE"
    lines = cluster.run("srun", "--nodes=2", "--gpus-per-node=2", "sh", "-c", show).splitlines()
    assert lines == ["0,1 2", "0,1 2"]


def test_batch_jobs_reach_the_other_hosts(cluster: Cluster, tmp_path: Path) -> None:
    # --export=NONE: nothing but slurmd and the batch script tells srun where its Slurm is
    names = tmp_path / "names"
    job = submit(cluster, f"srun --nodes=4 /bin/hostname > {names}", "--nodes=4", "--export=NONE")
    wait_for(in_state(cluster, job, "COMPLETED"))
    assert sorted(names.read_text().split()) == list(cluster.hosts)


@pytest.mark.full
def test_an_urgent_job_preempts_and_requeues(cluster: Cluster, no_grace: None, tmp_path: Path) -> None:
    restarts = tmp_path / "restarts"
    script = f"echo ${{SLURM_RESTART_COUNT:-0}} >> {restarts}; sleep 600"
    preempted = submit(cluster, script, "--partition=main", "--nodes=4", "--exclusive")
    wait_for(restarts.exists)
    urgent = submit(cluster, "sleep 600", "--partition=urgent", "--nodes=4", "--exclusive")
    try:
        wait_for(in_state(cluster, urgent, "RUNNING"))
        assert cluster.job(preempted)["JobState"] == "PENDING"
        assert cluster.job(preempted)["Restarts"] == "1"
        cluster.run("scancel", urgent)
        wait_for(lambda: restarts.read_text().split() == ["0", "1"])
        assert cluster.job(preempted)["JobState"] == "RUNNING"
    finally:
        cluster.run("scancel", urgent, preempted)


@pytest.mark.full
def test_a_lost_host_boots_again(cluster: Cluster) -> None:
    cluster.kill("n4")
    assert cluster.pids("n4") == []
    assert cluster.pids("n3") != []
    cluster.boot("n4")
    assert cluster.run("srun", "--nodelist=n4", "hostname") == "n4"


@pytest.mark.full
def test_two_clusters_stand_side_by_side(cluster: Cluster) -> None:
    with Cluster.start(hosts=2) as second:
        assert sorted(second.run("srun", "--nodes=2", "hostname").split()) == ["n1", "n2"]
        assert not set(second.hosts.values()) & set(cluster.hosts.values())
        job = submit(second, "sleep 600")
        wait_for(in_state(second, job, "RUNNING"))
        assert cluster.run("squeue", "--noheader") == ""
    assert not remains(str(second.folder), second.bridge)
    assert sorted(cluster.run("srun", "--nodes=4", "hostname").split()) == list(cluster.hosts)


OWNER = """
import json, time
from cluster import Cluster
cluster = Cluster.start(hosts=2)
cluster.run("sbatch", "--output=/dev/null", "--nodes=2", "--wrap=srun sleep 600")
while "sleep" not in cluster.run("squeue", "--steps", "--noheader", "--format=%j"):
    time.sleep(0.05)
pids = [pid for host in ("login", *cluster.hosts) for pid in cluster.pids(host)]
watcher = cluster._watcher.pid
print(json.dumps([str(cluster.folder), cluster.bridge, watcher, pids]), flush=True)
time.sleep(600)
"""


@pytest.mark.full
@pytest.mark.parametrize("watcher_dies_too", [False, True])
def test_a_killed_owner_leaves_nothing_behind(cluster: Cluster, watcher_dies_too: bool) -> None:
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout
        folder, bridge, watcher, pids = json.loads(owner.stdout.readline())
        if watcher_dies_too:
            os.kill(watcher, signal.SIGKILL)
        owner.kill()
    if watcher_dies_too:
        reap()  # as the next start does
    wait_for(lambda: not remains(folder, bridge) and not any(map(running, (watcher, *pids))))
    assert cluster.run("sinfo", "--noheader", "--states=idle", "--partition=main", "--format=%D") == "4"


def test_accounting_remembers_a_job() -> None:
    if reason := unavailable_reason(accounting=True):
        pytest.skip(reason)
    with Cluster.start(hosts=1, accounting=True) as cluster:
        job = submit(cluster, "exit 3")
        listing = ("sacct", "--noheader", "--allocations", "--parsable2", "--format=state,exitcode")
        wait_for(lambda: cluster.run(*listing, f"--jobs={job}") == "FAILED|3:0")


def test_a_recycled_process_id_matches_no_process() -> None:
    assert Process.current().alive()
    assert not Process(os.getpid(), start_ticks=0).alive()
