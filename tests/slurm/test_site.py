"""A profile that the test cluster's own Slurm was asked for: written, checked, and used by a job."""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml
from test_jobs import SMALL, Site, read

pytestmark = pytest.mark.slurm


def command(site: Site, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hpc_parallel", *words], cwd=site.home, capture_output=True, text=True,
        env=site.cluster.environment | {"PATH": "/usr/bin:/bin"}, timeout=240,
    )  # fmt: skip


@pytest.mark.usefixtures("beside_others")
def test_a_profile_of_this_cluster(site: Site) -> None:
    written = command(site, "init-cluster", "mine")
    assert written.returncode == 0, written.stderr
    profile = yaml.safe_load((site.home / "site/cluster/mine.yaml").read_text())
    shown = site.cluster.run("sinfo", "-h", "-o", "%R %D %c %m %G")
    kinds = [line.split() for line in shown.splitlines()]
    assert profile["partitions"] == {
        name: {"nodes": int(nodes), "memory_gb": int(memory_mb) // 1024, "gpus_per_node": int(gres[4:])}
        for name, nodes, _, memory_mb, gres in kinds
    }
    devices = profile["gpus_per_node"]
    assert profile["cpus_per_device"] == int(kinds[0][2]) // devices

    words = ("--config-dir", "site", "cluster=mine", "strategy=data", "nodes=2", *SMALL)
    checked = command(site, "check", *words)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "Slurm would take it: it would start at " in checked.stdout
    refused = command(site, "check", *words, "launcher.partition=gpux")
    assert refused.returncode == 3
    assert "invalid partition specified: gpux" in refused.stdout

    scratch = site.home / "scratch"
    scratch.mkdir()
    assert "pack" not in profile
    saved = site.home / "saved.txt"
    site.cluster.run("scontrol", "create", "PartitionName=whole", "Nodes=ALL", "OverSubscribe=EXCLUSIVE")
    try:
        shown = [site.cluster.run("scontrol", "show", *what) for what in (("partition", "whole"), ("node",))]
    finally:
        site.cluster.run("scontrol", "delete", "PartitionName=whole")
    saved.write_text("\n".join(shown))
    assert command(site, "init-cluster", "whole", "--from", str(saved)).returncode == 0
    assert yaml.safe_load((site.home / "site/cluster/whole.yaml").read_text())["pack"] == "auto"
    done = site.run(
        *words, "launcher.wait=true", "run_dir=run", "cluster.scratch=$HOME_OF_TEST/scratch",
        f"+launcher.setup=['export HOME_OF_TEST={site.home}']", "preflight.act=report",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    hosts = read(site.home / "run", "preflight.json")["hosts"]
    assert {facts["disks"]["temporary"]["folder"] for facts in hosts.values()} == {str(scratch)}
