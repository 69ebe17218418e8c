"""The profiles that come with the package: each composes, gets a legal script, and says only what is read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpc_parallel.config.command_line import CommandLine
from hpc_parallel.config.places import find_folder
from hpc_parallel.launch.batch_script import render, sbatch_flags
from hpc_parallel.launch.checked_run import checked_run
from hpc_parallel.problems import ConfigError
from tests.composed import prepared

PROFILES = sorted(path.stem for path in (find_folder("conf") / "cluster").glob("*.yaml"))
EXAMPLES = sorted(set(PROFILES) - {"generic", "gres", "cpu"})
pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_fills_a_job(name: str) -> None:
    run = prepared(f"cluster={name}", "gpus_per_node=auto", "nodes=2", "launcher=script")
    cluster, flags = run.config.cluster, sbatch_flags(run)
    assert run.config.gpus_per_node == cluster.gpus_per_node == flags["ntasks-per-node"]
    assert flags["cpus-per-task"] == cluster.cpus_per_device > 1
    assert run.config.cluster.fabric != "auto"
    masks = str(cluster.srun.get("cpu-bind", ""))
    if masks.startswith("mask_cpu:"):  # one for each rank, of as many cores as it gets, and no core twice
        sets = [int(mask, 16) for mask in masks.removeprefix("mask_cpu:").split(",")]
        assert [mask.bit_count() for mask in sets] == [cluster.cpus_per_device] * cluster.gpus_per_node
        assert sum(sets) == sum({1 << bit for mask in sets for bit in range(64) if mask >> bit & 1})
    assert "srun " in render(run)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_lines_that_wait_to_be_filled_in_are_legal(name: str, tmp_path: Path) -> None:
    """What stands in comments as `# key: value` becomes part of the profile."""
    text = (find_folder("conf") / "cluster" / f"{name}.yaml").read_text()
    filled = re.sub(r"^(\s*)# ([a-z_]+:(?: |$)|  [a-z0-9-]+: \{)", r"\1\2", text, flags=re.MULTILINE)
    assert filled != text
    folder = tmp_path / "site" / "cluster"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(filled.replace(f"name: {name}", "name: mine"))
    run = checked_run(CommandLine.parse(["--config-dir=site", "cluster=mine", "launcher=script"]))
    assert run.config.cluster.name == "mine"
    if "partitions" in text:
        assert run.config.cluster.partitions


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+cluster.partitions={gpu: 3}",
         "cluster.partitions.gpu = 3 must be a table with any of nodes, time_minutes, memory_gb, "
         "gpus_per_node."),
        ("+cluster.partitions={gpu: {hosts: 3}}",
         "cluster.partitions.gpu.hosts is no limit of a partition. "
         "The limits are nodes, time_minutes, memory_gb, gpus_per_node."),
        ("+cluster.partitions={gpu: {nodes: 0}}",
         "cluster.partitions.gpu.nodes = 0 must be a positive number, or null for no limit. "
         "Try cluster.partitions.gpu.nodes=null."),
        ("+cluster.srun={CPU: 3}",
         "cluster.srun.CPU is not a flag of srun. Try +cluster.srun.cpu-bind=cores."),
        ("+cluster.extra={nodes: 3}", "cluster.extra.nodes: this flag is set by nodes. Try nodes=3."),
        ("+launcher.extra={M: big}",
         "launcher.extra.M: status, cancel and resume would ask another Slurm than the one that has the job. "
         "Try SLURM_CLUSTERS=big in your shell, for all commands."),
        ("cluster.scratch=' '",
         "cluster.scratch = ' ' must be the path of a folder of each node. Try cluster.scratch=null."),
        ("cluster.cpus_per_device=0",
         "cluster.cpus_per_device = 0 must be at least 1. Try cluster.cpus_per_device=1."),
        ("cluster.max_array_size=0",
         "cluster.max_array_size = 0 must be at least 1. Try cluster.max_array_size=1."),
        ("cluster.memory_gb_per_device=0",
         "cluster.memory_gb_per_device = 0 must be above 0. Try cluster.memory_gb_per_device=16."),
    ],
)  # fmt: skip
def test_a_profile_that_can_not_be(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        prepared(override, "launcher=script")
    assert message in map(str, caught.value.problems)
