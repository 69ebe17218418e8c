"""More nodes or memory than a partition has: a warning before the submission, and never a refusal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_parallel.config import site_limits
from hpc_parallel.config.resolve import resolve
from hpc_parallel.config.site_limits import container_warnings
from hpc_parallel.run import main
from hpc_parallel.slurm import client
from hpc_parallel.slurm.limits import Limits, limits
from tests.composed import composed

# As sinfo -o "%P|%D|%m|%l|%G|%c|%N", without hosts: one line for each kind of node, a star at the default.
SINFO = """main*|3|256000|1-00:00:00
main*|1|512000+|1-00:00:00
big|16|1024000|infinite
short|2|256000|30:00
unset|2|1|2:00:00
an error
"""
GPUS = """gpu|4|256000|1:00:00|gpu:a100:4(S:0-1),gpu:h100:2|64
gpu|4|256000|1:00:00|(null)|128+
cores*|4|256000|1:00:00|(null)|16
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sinfo(tmp_path, f"printf '%s' '{SINFO}'")
    return tmp_path


def sinfo(folder: Path, script: str) -> None:
    (folder / "sinfo").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "sinfo").chmod(0o755)


def warnings(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The warnings that a dry run prints to stderr."""
    overrides = ("strategy=data", "dry_run=true", "launcher.snapshot=false", *words)
    assert main([*overrides, "training.global_batch_size=720720"]) == 0
    lines = capsys.readouterr().err.splitlines(keepends=True)
    return "".join(line for line in lines if line.startswith("warning"))


@pytest.mark.parametrize(
    ("partition", "expected"),
    [(None, Limits(4, 512000, 1440)), ("main", Limits(4, 512000, 1440)), ("big", Limits(16, 1024000)),
     ("big,main", Limits(16, 1024000)), ("short", Limits(2, 256000, 30)),
     ("main,short", Limits(4, 512000, 1440)), ("unset", Limits(2, None, 120)), ("hidden", Limits())],
)  # fmt: skip
def test_limits_of_a_partition(partition: str | None, expected: Limits) -> None:
    assert limits(partition=partition, gpus=False) == expected


@pytest.mark.parametrize(
    ("partition", "gpu_type", "gpus", "cpus"),
    [("gpu", None, 6, 128), ("gpu", "a100", 4, 128), ("gpu", "v100", None, 128), ("cores", None, 0, 16),
     ("gpu,cores", "h100", 2, 128), (None, None, 0, 16), ("hidden", None, None, None)],
)  # fmt: skip
def test_gpus_and_cores_of_the_largest_node(
    partition: str | None, gpu_type: str | None, gpus: int | None, cpus: int | None, here: Path
) -> None:
    sinfo(here, f"printf '%s' '{GPUS}'")
    most = limits(partition=partition, gpu_type=gpu_type)
    assert (most.gpus_per_node, most.cpus) == (gpus, cpus)


def test_an_answer_is_of_the_slurm_that_gave_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are kept for a minute; another Slurm is another one at once."""
    sinfo(here, """case "$SLURM_CONF$SLURM_CLUSTERS" in b) cat b ;; *) cat a ;; esac""")
    (here / "a").write_text("main*|1|1000|1:00:00\n")
    (here / "b").write_text("main*|2|1000|1:00:00\n")
    for name in ("SLURM_CONF", "SLURM_CLUSTERS"):
        monkeypatch.delenv(name, raising=False)
    assert limits(partition=None, gpus=False).nodes == 1
    for name in ("SLURM_CONF", "SLURM_CLUSTERS"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "b")
            assert limits(partition=None, gpus=False).nodes == 2
        assert limits(partition=None, gpus=False).nodes == 1


def test_a_site_that_counts_no_gpus_has_no_limit_of_them(here: Path) -> None:
    listing = GPUS.partition("\n")[2]
    sinfo(here, f"printf '%s' '{listing}'")
    assert limits(partition="cores").gpus_per_node is None


@pytest.mark.parametrize(
    ("words", "warning"),
    [
        (("nodes=9",), "warning     nodes=9: the default partition has 4 nodes. Try nodes=4.\n"),
        (("nodes=9", "launcher.partition=big"), ""),
        (("nodes=3", "launcher.spares=2"),
         "warning     nodes=3 and launcher.spares=2: the default partition has 4 nodes. Try nodes=2.\n"),
        (("nodes=2", "launcher.spares=2"), ""),
        (("nodes=2", "launcher.spares=4"),
         "warning     nodes=2 and launcher.spares=4: the default partition has 4 nodes. "
         "Try nodes=4 launcher.spares=0.\n"),
        (("nodes=9", "launcher.partition=hidden"), ""),
        (("nodes=4", "launcher.memory_gb=500"), ""),
        (("launcher.memory_gb=501",),
         "warning     launcher.memory_gb=501: the largest node of the default partition has 500.0 GB. "
         "Try launcher.memory_gb=500.\n"),
        (("launcher.memory_gb=64", "launcher.partition=unset"), ""),
        (("launcher.time_minutes=60", "launcher.partition=short"),
         "warning     launcher.time_minutes=60: partition short allows 30 minutes. "
         "Try launcher.time_minutes=30.\n"),
        (("launcher.time_minutes=9000", "launcher.partition=big"), ""),
        # A profile of the site is asked before sinfo.
        (("nodes=3", "launcher.partition=big", "+cluster.partitions={big: {nodes: 2, memory_gb: 8}}",
          "launcher.memory_gb=9", "launcher.time_minutes=9000"),
         "warning     nodes=3: partition big has 2 nodes. Try nodes=2.\n"
         "warning     launcher.memory_gb=9: the largest node of partition big has 8.0 GB. "
         "Try launcher.memory_gb=8.\n"),
        (("gpus_per_node=8", "launcher.partition=big", "launcher.memory_gb=1007", "launcher.time_minutes=9",
          "+cluster.partitions={big: {gpus_per_node: 7, memory_gb: 1006}}"),
         "warning     launcher.memory_gb=1007: the largest node of partition big has 1006.0 GB. "
         "Try launcher.memory_gb=1006.\n"
         "warning     gpus_per_node=8: nodes of partition big have 7. Try gpus_per_node=7.\n"),
        (("gpus_per_node=8", "cluster.gpus=false", "launcher.partition=big",
          "+cluster.partitions={big: {gpus_per_node: 7}}"), ""),
    ],
)  # fmt: skip
def test_warnings(words: tuple[str, ...], warning: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert warnings(capsys, "launcher=script", *words) == warning


@pytest.mark.parametrize(
    ("words", "warning"),
    [
        (("gpus_per_node=8", "launcher.partition=gpu", "launcher.memory_gb=64"),
         "warning     gpus_per_node=8: nodes of partition gpu have 6. Try gpus_per_node=6.\n"),
        (("gpus_per_node=4", "launcher.partition=cores"),
         "warning     gpus_per_node=4: nodes of partition cores have no GPU, and others have. "
         "Try another launcher.partition, or cluster.gpus=false.\n"),
        (("gpus_per_node=4", "launcher.partition=cores", "cluster=cpu"), ""),
        (("gpus_per_node=4", "launcher.partition=cores", "cluster=cpu", "launcher.cpus_per_device=5"),
         "warning     launcher.cpus_per_device=5: a node needs 20 CPUs, and the largest node of partition "
         "cores has 16. Try launcher.cpus_per_device=4.\n"),
        (("gpus_per_node=18", "launcher.partition=cores", "cluster=cpu", "launcher.cpus_per_device=1"),
         "warning     launcher.cpus_per_device=1: a node needs 18 CPUs, and the largest node of partition "
         "cores has 16. Try gpus_per_node=16 launcher.cpus_per_device=1.\n"),
    ],
)  # fmt: skip
def test_warnings_of_gpus_and_cores(
    words: tuple[str, ...], warning: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sinfo(here, f"printf '%s' '{GPUS}'")
    assert warnings(capsys, "launcher=script", *words) == warning


def test_a_run_here_does_not_use_the_container(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("launcher=local", "launcher.container=a.sif", "cluster.container=apptainer")
    expected = "warning     launcher.container is for jobs: this run uses the Python of this machine.\n"
    assert warnings(capsys, *words) == expected


def test_a_run_here_asks_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    assert warnings(capsys, "launcher=local", "nodes=9") == ""


@pytest.mark.parametrize("script", ["exit 1", "exec sleep 1000"])
def test_a_silent_controller_does_not_hold_the_submission(
    script: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_PROMPT_S", 0.2)
    sinfo(here, script)
    assert warnings(capsys, "launcher=script", "nodes=9") == ""


SIF = (
    "launcher=script",
    "launcher.snapshot=false",
    "launcher.container=a.sif",
    "cluster.container=apptainer",
)


@pytest.mark.parametrize(
    ("words", "hidden", "mounts"),
    [
        ((), ["BIG/texts (data.path)"], "[BIG/texts]"),
        (("launcher.container_mounts=[BIG]",), [], ""),
        (("launcher.container_mounts=['BIG:BIG:ro']",), [], ""),
        (("launcher.container_mounts=['BIG:/mnt']",), ["BIG/texts (data.path)"], "[BIG:/mnt,BIG/texts]"),
        (("launcher.container_mounts=[BIG/texts]", "launcher.venv=BIG/venv"), ["BIG/venv (launcher.venv)"],
         "[BIG/texts,BIG/venv]"),
        (("launcher.venv=BIG/venv", "weights=BIG/w.safetensors"),
         ["BIG/w.safetensors (weights)", "BIG/venv (launcher.venv)", "BIG/texts (data.path)"],
         "[BIG/w.safetensors,BIG/venv,BIG/texts]"),
        (("data.path=link",), ["BIG/texts (data.path)"], "[BIG/texts]"),  # in the current folder
        (("data.path=mine",), [], ""),
        (("data.path=mine", "cluster.container_arguments=[--nv,--contain]"), ["HERE/mine (data.path)"],
         "[HERE/mine]"),
        (("data.path=mine", "cluster.container_arguments=[--no-home]"), ["HERE/mine (data.path)"],
         "[HERE/mine]"),
        (("data.path=mine", "cluster.container=pyxis"), ["HERE/mine (data.path)"], "[HERE/mine]"),
        (("data.path=mine", "cluster.container=pyxis", "launcher.container_mounts=[HERE]"), [], ""),
        (("launcher=local",), [], ""),
    ],
)  # fmt: skip
def test_paths_that_the_container_does_not_see_are_named(
    here: Path, words: tuple[str, ...], hidden: list[str], mounts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_limits, "_OF_APPTAINER", ())  # the folders of this test are in /tmp
    home, big = here / "home", here / "big"
    for folder in (home / "mine", big / "texts", big / "venv/bin"):
        folder.mkdir(parents=True)
        (folder / "a.py").write_text("x = 1\n" * 99)
    (big / "venv/bin/activate").touch()
    (big / "w.safetensors").touch()
    (home / "link").symlink_to(big / "texts")
    monkeypatch.chdir(home)
    monkeypatch.setenv("HOME", str(home))
    words = tuple(
        word.replace("BIG", str(big)).replace("HERE", str(home))
        for word in (*SIF, "data.path=BIG/texts", *words)
    )
    config = composed(*words)
    found = list(container_warnings(resolve(config)[0], run_folder=home / "runs/x"))
    if hidden:
        named = ", ".join(hidden)
        text = f"the container does not see {named}. Try launcher.container_mounts={mounts}."
        assert found == [text.replace("BIG", str(big)).replace("HERE", str(home))]
    else:
        assert found == []


def test_source_that_is_not_kept_is_named_too(here: Path) -> None:
    config = resolve(composed(*SIF))[0]
    (found,) = container_warnings(
        config, run_folder=here / "run", source=[here / "run/code", Path("/opt/mine")]
    )
    assert (
        found
        == "the container does not see /opt/mine (PYTHONPATH). Try launcher.container_mounts=[/opt/mine]."
    )
