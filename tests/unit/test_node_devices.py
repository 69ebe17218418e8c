"""`gpus_per_node=auto`: the devices that are visible here, or those that a node of the site has."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

import hpc_parallel
from hpc_parallel.config.node_devices import visible_gpus
from hpc_parallel.launch.launcher import launcher_of
from hpc_parallel.launch.recompose import recompose
from hpc_parallel.run import main
from hpc_parallel.slurm.limits import gpu_counts
from tests.composed import prepared

HERE = ("launcher=local", "gpus_per_node=auto")
THERE = ("launcher=script", "gpus_per_node=auto")
GRES = (
    ("main*", "gpu:a100:4(S:0-1)"), ("big", "gpu:8"), ("mixed", "gpu:4"),
    ("mixed", "gpu:a100:2,gpu:h100:6(S:1)"), ("plain", "(null)"),
)  # fmt: skip
SINFO = "".join(f"{partition}|9|512000|infinite|{gres}|64\n" for partition, gres in GRES)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without GPUs, with a site's sinfo."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["run"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (tmp_path / "bin").mkdir()
    command(tmp_path, "nvidia-smi", "exit 9")
    command(tmp_path, "sinfo", f"printf '%s' '{SINFO}'")
    return tmp_path


def command(here: Path, name: str, script: str) -> None:
    (here / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
    (here / "bin" / name).chmod(0o755)


@pytest.mark.parametrize(
    ("listed", "count"),
    [("0,1,2", 3), ("3", 1), ("", 0), ("-1", 0), ("0,-1,1", 1), ("GPU-8f, GPU-1a", 2), ("MIG-7,MIG-8", 2)],
)
def test_cuda_visible_devices_counts_as_cuda_reads_it(listed: str, count: int) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": listed}) == count


def test_the_driver_says_what_is_visible(here: Path) -> None:
    lines = "GPU 0: NVIDIA H200 (UUID: GPU-1)\n  MIG 1g.18gb Device 0: (UUID: MIG-2)\nGPU 1: NVIDIA H200"
    command(here, "nvidia-smi", f"[ $1 = -L ] && echo '{lines}'")
    assert visible_gpus({}) == 2
    assert prepared(*HERE).config.gpus_per_node == 2
    assert prepared(*HERE, "device=cpu").config.gpus_per_node == 1


def test_without_gpus_it_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run = prepared(*HERE, "nodes=2")
    assert (run.config.gpus_per_node, run.processes, run.values["gpus_per_node"]) == (1, 2, 1)


@pytest.mark.parametrize(
    ("partition", "gpu_type", "counts"),
    [
        (None, None, [4]), ("big", None, [8]), ("mixed", None, [4, 8]), ("mixed", "h100", [6]),
        ("main,big", None, [4, 8]), ("plain", None, []), ("elsewhere", None, []), (None, "h100", []),
    ],
)  # fmt: skip
def test_sinfo(partition: str | None, gpu_type: str | None, counts: list[int]) -> None:
    assert gpu_counts(partition=partition, gpu_type=gpu_type) == counts


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (["cluster.gpus_per_node=6"], 6),  # the profile comes first
        ([], 4),
        (["launcher.partition=big"], 8),
        (["launcher.partition=mixed", "cluster.gpu_type=h100"], 6),
        (["cluster=cpu"], 1),
        (["cluster=cpu", "cluster.gpus_per_node=16"], 16),
    ],
)
def test_a_run_on_slurm_uses_what_a_node_has(words: list[str], count: int) -> None:
    run = prepared(*THERE, "training.global_batch_size=48", *words)
    assert (run.config.gpus_per_node, run.values["gpus_per_node"]) == (count, count)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["launcher.partition=plain"],
         "gpus_per_node = auto has no value here: cluster=generic does not set cluster.gpus_per_node, and "
         "sinfo lists no GPUs in partition plain. Try gpus_per_node=1."),
        (["launcher.partition=mixed"],
         "gpus_per_node = auto has no value here: nodes of partition mixed have 4 or 8 GPUs. "
         "Try gpus_per_node=4 or gpus_per_node=8."),
        (["launcher.partition=big", "strategy=tensor"], "strategy.tensor = 8 does not divide"),
        (["cluster.gpus_per_node=0"], "cluster.gpus_per_node = 0 must be at least 1."),
    ],
)  # fmt: skip
def test_what_can_not_be_told_or_does_not_fit_is_advice(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*THERE, *words]) == 2
    assert problem in capsys.readouterr().err


def test_without_sinfo(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command(here, "sinfo", "exit 1")
    assert main([*THERE, "training.steps=0"]) == 2
    assert "sinfo lists no GPUs in the default partition" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["many", "2.5", "true", "null", "[1]", "auto,1"])
def test_other_texts_are_no_counts(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"gpus_per_node={word}", "nodes=0", "launcher=local"]) == 2
    told = capsys.readouterr().err
    assert "gpus_per_node" in told
    assert "nodes = 0 must be at least 1" in told


def test_a_number_as_text_is_one() -> None:
    assert prepared("gpus_per_node='4'", "launcher=local").config.gpus_per_node == 4


def test_what_follows_from_it_follows_from_the_number() -> None:
    """In values of the configuration, also where a strategy's file names it."""
    batch = "training.global_batch_size='${product:8,${gpus_per_node}}'"
    run = prepared(
        *THERE, batch, "name='run-${gpus_per_node}'", "nodes=2", "strategy=hybrid", "model.kv_heads=4"
    )
    config = run.config
    assert (config.training.global_batch_size, config.name, config.strategy.tensor) == (32, "run-4", 4)


def test_a_run_records_the_number_and_what_was_typed(here: Path) -> None:
    """So that a resume elsewhere asks again, and a reader of config.yaml need not."""
    words = [*THERE, "launcher.snapshot=false", "run_dir=mine"]
    assert main(words) == 0
    assert yaml.safe_load((here / "mine/config.yaml").read_text())["gpus_per_node"] == 4
    assert json.loads((here / "mine/environment.json").read_text())["overrides"] == words
    assert "--gpus-per-node=4" in (here / "mine/batch_script.sh").read_text()
    config = hpc_parallel.compose([*words, "run_dir=other"])
    assert config.gpus_per_node == 4
    record = json.loads((hpc_parallel.submit(config).path / "environment.json").read_text())
    assert "gpus_per_node=auto" in record["overrides"]


def test_a_sweep_and_a_dry_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["gpus_per_node=1,auto", "launcher.partition=main,big", "launcher=script", "dry_run=true"]
    assert main(["-m", *words]) == 0
    asked = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("#SBATCH --gpus-per-node")
    ]
    assert asked == [f"#SBATCH --gpus-per-node={count}" for count in (1, 1, 4, 8)]


def test_a_file_may_say_it(here: Path) -> None:
    (here / "site/jobs").mkdir(parents=True)
    (here / "site/jobs/mine.yaml").write_text("# @package _global_\ngpus_per_node: auto\n")
    assert hpc_parallel.compose(["jobs=mine", "launcher=script"], config_dir="site").gpus_per_node == 4


def test_an_allocation_has_its_own_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """launcher=auto runs here inside a job, and the job's own GPUs are visible."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert prepared("gpus_per_node=auto", "strategy=pipeline").config.gpus_per_node == 3


def test_one_question_decides_the_launcher(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`launcher.kind=auto` gets its answer once, for the checks, the batch script and config.yaml."""
    command(here, "scontrol", f"echo $@ >> {here}/asked; echo 'Slurmctld(primary) at login is UP'")
    command(here, "sbatch", "exit 0")
    words = ("cluster=cpu", "launcher.snapshot=false", "nodes=2")
    assert main([*words, "dry_run=true"]) == 0
    assert "#SBATCH --nodes=2" in capsys.readouterr().out
    assert (here / "asked").read_text() == "ping\n"
    run = prepared(*words)
    assert (run.config.launcher.kind, run.values["launcher"]["kind"]) == ("slurm", "slurm")
    assert launcher_of(run)[1] == "launcher slurm: sbatch is here and Slurm's controller answers"
    assert launcher_of(prepared(*words, "launcher=script"))[1] == "launcher script"


def test_an_answer_can_be_changed_back_to_auto(here: Path) -> None:
    config = hpc_parallel.compose(["launcher=script", "launcher.snapshot=false"])
    config.launcher.kind = "auto"
    run = recompose(config)
    assert (run.config.launcher.kind, "launcher.kind=local" in run.overrides) == ("local", True)
