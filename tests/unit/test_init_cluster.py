"""A first profile, from what Slurm prints. `test_slurm_records.py` reads the forms of all its versions.

The outputs were written here in the form that sites have published; only the keys that are read, and some
beside them, are in them.
"""

from __future__ import annotations

import os
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpc_parallel.__main__ import main
from hpc_parallel.config.command_line import CommandLine
from hpc_parallel.config.schema import register
from hpc_parallel.config.site_limits import site_warnings
from hpc_parallel.launch.checked_run import checked_run
from hpc_parallel.problems import ConfigError
from hpc_parallel.site.profile import Login, write_profile
from hpc_parallel.slurm.records import Association, read_records
from hpc_parallel.slurm.short_forms import gpus_of

register()
OUTPUTS = Path(__file__).parent / "slurm_outputs"
OLD_PARTITIONS = {
    "batch": {"nodes": 2, "time_minutes": 14 * 1440, "memory_gb": 371, "gpus_per_node": 0},
    "gpu": {"nodes": 1, "time_minutes": 3 * 1440, "memory_gb": 371, "gpus_per_node": 4},
}
EXPECTED: dict[str, dict[str, Any]] = {
    "20.11": {
        "name": "old_cluster", "constraint": None,
        "partition": "gpu", "partitions": OLD_PARTITIONS, "gpu_flag": "gres",
        "gpu_type": None, "gpus_per_node": 4, "cpus_per_device": 10, "memory_gb_per_device": 88,
        "max_array_size": 10001, "resubmit": True, "srun": {"cpu-bind": "cores"},
    },
    "24.05": {
        "name": "alpha", "constraint": None, "qos": None,
        "partition": "a100", "gpu_type": "a100", "gpus_per_node": None,
        "cpus_per_device": 15, "memory_gb_per_device": 119, "max_array_size": 1001, "resubmit": False,
        "partitions": {"a100": {"nodes": 2, "time_minutes": 1440, "memory_gb": 1006}},  # 7 and 8 of its type
        "srun": {"cpu-bind": "cores"},
    },
}  # fmt: skip
ALWAYS = {
    "account": None, "gpu_flag": "gpus-per-node", "device_memory_gb": None, "modules": [],
    "fabric": "auto", "master_suffix": "",
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.parametrize("version", EXPECTED)
def test_the_profile_of_each_version(version: str) -> None:
    files = [str(path) for path in sorted((OUTPUTS / version).iterdir())]
    expected = EXPECTED[version]
    assert main(["init-cluster", "--from", *files]) == 0
    (path,) = Path("site", "cluster").iterdir()
    assert path.stem == expected["name"]
    text = path.read_text()
    assert yaml.safe_load(text) == ALWAYS | expected
    assert text.startswith(f"# Slurm {version}.")


def test_a_run_takes_the_profile() -> None:
    files = [str(path) for path in sorted((OUTPUTS / "20.11").iterdir())]
    main(["init-cluster", "mine", "--from", *files])
    words = ["--config-dir=site", "cluster=mine", "gpus_per_node=auto", "launcher=script"]
    run = checked_run(CommandLine.parse(words))
    expected = EXPECTED["20.11"]
    assert run.config.gpus_per_node == expected["gpus_per_node"]
    assert run.config.launcher.cpus_per_device == expected["cpus_per_device"]
    assert run.config.launcher.memory_gb == expected["gpus_per_node"] * expected["memory_gb_per_device"]


def test_a_partition_without_gpus_has_no_automatic_number() -> None:
    files = [str(path) for path in sorted((OUTPUTS / "20.11").iterdir())]
    main(["init-cluster", "mine", "--from", *files])
    words = ["--config-dir=site", "cluster=mine", "launcher=script", "launcher.partition=batch"]
    with pytest.raises(ConfigError) as error:
        checked_run(CommandLine.parse([*words, "gpus_per_node=auto"]))
    assert str(error.value) == (
        "gpus_per_node = auto has no value here: nodes of partition batch have no GPU. "
        "Try gpus_per_node=1 cluster.gpus=false."
    )
    assert checked_run(CommandLine.parse([*words, "cluster.gpus=false", "gpus_per_node=auto"])).processes == 1
    asked = checked_run(CommandLine.parse(words))
    assert site_warnings(asked.config) == [
        "warning     gpus_per_node=1: nodes of partition batch have no GPU, and others have. "
        "Try another launcher.partition, or cluster.gpus=false."
    ]


def test_a_slurm_that_wants_accounts_is_told() -> None:
    Path("config.txt").write_text("AccountingStorageEnforce = associations,limits\nSLURM_VERSION = 24.05.4\n")
    Path("node.txt").write_text("NodeName=c1 CPUTot=40 Gres=(null) RealMemory=1 Partitions=batch\n")
    Path("partition.txt").write_text("PartitionName=batch Default=YES TotalNodes=1 State=UP\n")
    assert main(["init-cluster", "--from", "config.txt", "node.txt", "partition.txt"]) == 0
    (line,) = [
        line
        for line in Path("site/cluster/mysite.yaml").read_text().splitlines()
        if line.startswith("account:")
    ]
    assert line.endswith("# the project that pays: this Slurm refuses jobs without a known one")


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        (0, "resubmit: true # Slurm requeues no job, so a run continues in a new one (JobRequeue=0)"),
        (1, "resubmit: false # Slurm requeues jobs itself (JobRequeue=1)"),
    ],
)
def test_who_starts_a_job_again_is_said(setting: int, line: str) -> None:
    Path("config.txt").write_text(f"JobRequeue = {setting}\nSLURM_VERSION = 24.05.4\n")
    Path("node.txt").write_text("NodeName=c1 CPUTot=40 Gres=(null) RealMemory=1 Partitions=batch\n")
    Path("partition.txt").write_text("PartitionName=batch Default=YES TotalNodes=1 State=UP\n")
    assert main(["init-cluster", "--from", "config.txt", "node.txt", "partition.txt"]) == 0
    written = Path("site/cluster/mysite.yaml").read_text().splitlines()
    assert line in [" ".join(entry.split()) for entry in written]


@pytest.mark.parametrize(
    ("share", "size", "associations", "line"),
    [
        ("OverSubscribe=EXCLUSIVE", 1001, [],
         "pack: auto # a job of gpu gets whole nodes (OverSubscribe=EXCLUSIVE): runs of a sweep share jobs"),
        ("Exclusive=NODE OverSubscribe=NO", 1, [Association("bio", 4, 20)],
         "pack: auto # a job of gpu gets whole nodes (OverSubscribe=EXCLUSIVE); 4 of your jobs run at a time "
         "(MaxJobs); you may have 20 jobs (MaxSubmitJobs); there are no job arrays (MaxArraySize=1): "
         "runs of a sweep share jobs"),
        ("Exclusive=USER OverSubscribe=NO", 1001, [Association("bio", 4), Association("physics", 2)],
         "pack: off # 4 of your jobs run at a time (MaxJobs): auto lets runs of a sweep share jobs of whole "
         "nodes"),
        ("OverSubscribe=FORCE:2", 1001, [Association("bio")], None),
    ],
)  # fmt: skip
def test_packed_jobs_are_proposed_where_a_job_gets_whole_nodes(
    share: str, size: int, associations: list[Association], line: str | None
) -> None:
    """The forms of `scontrol show` of Slurm 20.11 to 26.05, and of `sacctmgr show assoc`."""
    records = read_records([
        f"MaxArraySize = {size}\nSLURM_VERSION = 24.05.4\n",
        f"PartitionName=gpu Default=YES TotalNodes=1 State=UP\n   ReqResv=NO {share}\n",
        "NodeName=c1 CPUTot=64 Gres=gpu:a100:4(S:0-1) RealMemory=1 Partitions=gpu\n",
    ])  # fmt: skip
    text = write_profile(records, name="mine", login=Login(associations), today=date(2026, 11, 28))
    lines = [" ".join(entry.split()) for entry in text.splitlines()]
    assert [entry for entry in lines if entry.startswith("pack:")] == ([line] if line else [])
    assert yaml.safe_load(text).get("max_array_size") == (size if size > 1 else None)


def test_a_site_without_gpus() -> None:
    Path("node.txt").write_text("NodeName=c1 CPUTot=40 Gres=(null) RealMemory=1 Partitions=batch\n")
    Path("partition.txt").write_text(
        "PartitionName=batch Default=YES MaxTime=UNLIMITED TotalNodes=1 State=UP\n"
    )
    assert main(["init-cluster", "--from", "node.txt", "partition.txt"]) == 0
    profile = yaml.safe_load(Path("site/cluster/mysite.yaml").read_text())
    assert (profile["gpus"], profile["partitions"]) == (False, {"batch": {"nodes": 1}})
    assert "gpus_per_node" not in profile


def test_slices_of_gpus_are_counted_by_their_size() -> None:
    """A job takes one type: 7 slices of one size say nothing about the others, and auto asks by type."""
    gres = {"m1": "gpu:1g.10gb:7", "m2": "gpu:3g.40gb:2,gpu:1g.10gb:1"}
    Path("all.txt").write_text(
        "".join(f"NodeName={name} CPUTot=64 Gres={text} Partitions=mig\n" for name, text in gres.items())
        + "PartitionName=mig MaxTime=UNLIMITED TotalNodes=2 State=UP\n"
    )
    assert main(["init-cluster", "mine", "--from", "all.txt"]) == 0
    text = Path("site/cluster/mine.yaml").read_text()
    profile = yaml.safe_load(text)
    assert (profile["gpu_type"], profile["gpus_per_node"]) == ("1g.10gb", None)
    assert profile["partitions"] == {"mig": {"nodes": 2}}
    (line,) = [line for line in text.splitlines() if line.startswith("gpu_type")]
    assert line.endswith("# a job takes one type; nodes of mig have 1 or 7 x 1g.10gb, 2 x 3g.40gb")


def test_what_slurm_keeps_for_itself_is_not_for_jobs() -> None:
    text = "NodeName=c1 CPUEfctv=36 CPUTot=40 RealMemory=200000 MemSpecLimit=20000 Partitions=batch\n"
    records = read_records([text])
    node = records.nodes["c1"]
    assert (node.cpus, node.memory_mb) == (36, 180_000)
    assert records.partitions["batch"].nodes == 1  # counted, as no partitions were given


@pytest.mark.parametrize("name", ["no", "1e5", "0123", "a: b", "x # y"])
def test_names_that_yaml_would_read_as_something_else(name: str) -> None:
    word = name.replace(" ", "_").replace(":", "_").replace("#", "_")
    Path("all.txt").write_text(
        f"NodeName=c1 CPUTot=4 Gres=gpu:{word}:2 RealMemory=1 Partitions={word}\n"
        f"PartitionName={word} MaxTime=UNLIMITED TotalNodes=1 State=UP\n"
    )
    assert main(["init-cluster", "mine", "--from", "all.txt"]) == 0
    profile = yaml.safe_load(Path("site/cluster/mine.yaml").read_text())
    assert (profile["partition"], list(profile["partitions"])) == (word, [word])


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", {}), ("", {}), ("gpu:4", {"": 4}), ("gpu:a100:4(S:0-1),nvme:1", {"a100": 4}),
        ("gpu:h100:2(S:0-1),gpu:h100:2(S:2-3)", {"h100": 4}), ("craynetwork:4,gpu:1", {"": 1}),
        ("gpu:3g.40gb:2,gpu:1g.10gb:1", {"3g.40gb": 2, "1g.10gb": 1}), ("gpumem:80", {}),
        ("gpu:tesla_v100-sxm2-32gb:8(S:0,1)", {"tesla_v100-sxm2-32gb": 8}),
    ],
)  # fmt: skip
def test_gpus_of_a_node(gres: str, gpus: dict[str, int]) -> None:
    assert gpus_of(gres) == gpus


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x/y"], "x/y can't name a profile: use letters, digits, _ and -. Try x-y.\n"),
        (["generic"], "cluster=generic comes with hpc_parallel. Try another name, such as mygeneric.\n"),
        (["there"], "site/cluster/there.yaml exists already. Try another name, such as there2, or another "
                    "--folder.\n"),
    ],
)  # fmt: skip
def test_names_that_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("site/cluster").mkdir(parents=True)
    Path("site/cluster/there.yaml").write_text("mine")
    files = [str(path) for path in sorted((OUTPUTS / "20.11").iterdir())]
    assert main(["init-cluster", *arguments, "--from", *files]) == 2
    assert capsys.readouterr().err == message
    assert [path.name for path in Path("site/cluster").iterdir()] == ["there.yaml"]
    assert Path("site/cluster/there.yaml").read_text() == "mine"


def test_files_that_are_no_outputs(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.txt").write_text("hello\n")
    Path("b.json").write_text('{"nodes": [{"name": "c1", "cpus": 4, "partitions": ["batch"]}]}')
    os.mkfifo("pipe")
    assert main(["init-cluster", "--from", "a.txt", "b.json", "pipe", "missing"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0].rstrip(":") for line in lines] == ["a.txt", "b.json", "pipe", "missing"]
    text = "can't be used: it is not the output of scontrol as text. Try the output of scontrol show node."
    assert lines[1] == f"b.json {text}"
    assert not Path("site").exists()


def test_a_machine_without_slurm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["init-cluster"]) == 3
    assert capsys.readouterr().err.startswith("Slurm does not answer here.")
