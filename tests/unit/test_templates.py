"""Every way to start a job, for every profile and container: legal shell, and exactly these words."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from hpc_parallel.config.compose import find_folder
from hpc_parallel.launch.batch_script import needs_own_script, render, render_array
from hpc_parallel.launch.prepare import PreparedRun
from hpc_parallel.problems import ConfigError
from tests.composed import prepared

PROFILES = sorted(path.stem for path in (find_folder("conf") / "cluster").glob("*.yaml"))
STARTS = ("srun", "torchrun", "mpirun")
CONTAINERS = {
    "none": (),
    "apptainer": ("cluster.container=apptainer", "launcher.container='/images/a b.sif'"),
    "pyxis": ("cluster.container=pyxis", "launcher.container='nvcr.io#nvidia/pytorch:25.01'"),
}
MOUNTS = "launcher.container_mounts=[/data,'/my files:/mnt']"
SHELLCHECK = shutil.which("shellcheck")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def started(start: str, container: str, *words: str) -> PreparedRun:
    mounts = [MOUNTS] if container != "none" else []
    layout = ("launcher=script", "launcher.snapshot=false", "nodes=2", "gpus_per_node=2")
    return prepared(*layout, f"cluster.start={start}", *CONTAINERS[container], *mounts, *words)


def last_command(script: str) -> list[str]:
    """The words of the command that starts the ranks; the shell's own words are left as they are."""
    lines = script.replace("\\\n", " ").splitlines()
    (line,) = [line for line in lines if line.startswith(("srun ", "mpirun "))]
    return shlex.split(line)


@pytest.mark.parametrize("profile", PROFILES)
def test_all_scripts_are_legal_shell(profile: str, tmp_path: Path) -> None:
    """For bash, and for shellcheck where it is installed (`make test` does that)."""
    scripts = []
    for start in STARTS:
        for container in CONTAINERS:
            bound = ["++cluster.srun.cpu-bind=cores"] if start == "torchrun" else []
            if (start, container) == ("mpirun", "pyxis"):
                continue  # refused, below
            run = started(
                start, container, f"cluster={profile}", "launcher.setup=['export A=\"b c\"']", *bound
            )
            for kind, text in (
                ("one", render(run)),
                ("array", render_array(run, tasks=tmp_path, name="n", count=3)),
            ):
                scripts.append(tmp_path / f"{start}-{container}-{kind}.sh")
                scripts[-1].write_text(text)
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True)
    if SHELLCHECK is None:
        pytest.skip("shellcheck is not installed: bash alone has read the scripts")
    checked = subprocess.run([SHELLCHECK, "--shell=bash", *scripts], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


RANK = ["python", "-m", "hpc_parallel.job", "rank", "RUN"]
MOUNTED = ["--bind", "/data", "--bind", "/my files:/mnt"]
APPTAINER = ["apptainer", "exec", "--nv", "--bind", "RUN", *MOUNTED, "/images/a b.sif"]
PYXIS = ["--container-image=nvcr.io#nvidia/pytorch:25.01",
         "--container-mounts=RUN:RUN,/data:/data,/my files:/mnt"]  # fmt: skip
SRUN = ["srun", "--cpus-per-task=3", "--distribution=block", "--kill-on-bad-exit=1", "--wait=60"]
NODES = ["srun", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=6", "--distribution=block",
         "--kill-on-bad-exit=1", "--wait=60"]  # fmt: skip
TORCHRUN = ["bash", "-c", 'trap "" USR2; exec "$@"', "torchrun"]
MODULE = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d",
          "--rdzv-id=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}",
          "--rdzv-endpoint=$hpc_parallel_firsti:29511", "--module", *RANK[2:]]  # fmt: skip
MPIRUN = ["mpirun", "-np", "4", "--mca", "btl", "^openib"]


@pytest.mark.parametrize(
    ("start", "container", "words"),
    [
        ("srun", "none", [*SRUN, *RANK]),
        ("srun", "apptainer", [*SRUN, *APPTAINER, "python3", *RANK[1:]]),
        ("srun", "pyxis", [*SRUN, *PYXIS, "python3", *RANK[1:]]),
        ("torchrun", "none", [*NODES, *TORCHRUN, "python", *MODULE]),
        ("torchrun", "apptainer", [*NODES, *TORCHRUN, *APPTAINER, "python3", *MODULE]),
        ("torchrun", "pyxis", [*NODES, *PYXIS, *TORCHRUN, "python3", *MODULE]),
        ("mpirun", "none", [*MPIRUN, *RANK, "&"]),
        ("mpirun", "apptainer", [*MPIRUN, *APPTAINER, "python3", *RANK[1:], "&"]),
    ],
)
def test_the_words_that_start_the_ranks(start: str, container: str, words: list[str]) -> None:
    run = started(
        start, container, "launcher.cpus_per_device=3", "cluster.mpirun=[--mca,btl,'^openib']",
        "cluster.port=29511", "cluster.master_suffix=i",
    )  # fmt: skip
    folder = str(run.folder.path)
    found = [word.replace(folder, "RUN") for word in last_command(render(run))]
    assert [Path(word).name if word.endswith("/bin/python") else word for word in found] == words
    assert needs_own_script(run) == (start != "srun" or container != "none")


def test_arguments_of_the_container() -> None:
    words = last_command(render(started("srun", "apptainer", "cluster.container_arguments=[--rocm]")))
    assert words[words.index("exec") + 1] == "--rocm"
    words = last_command(render(started("srun", "apptainer", "cluster=cpu")))
    assert words[words.index("exec") + 1] == "--bind"


@pytest.mark.parametrize(
    ("start", "signal"), [("srun", "USR2@90"), ("torchrun", "USR2@90"), ("mpirun", "B:USR2@90")]
)
def test_who_gets_the_signal_before_the_time_limit(start: str, signal: str) -> None:
    assert f"#SBATCH --signal={signal}\n" in render(started(start, "none"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["launcher.container=a.sif"],
         "cluster.container = null does not say what runs launcher.container. "
         "Try cluster.container=apptainer or cluster.container=pyxis."),
        (["launcher.container=a.sif", "cluster.container=pyxis", "cluster.start=mpirun"],
         "cluster.container = pyxis can't be with cluster.start=mpirun: pyxis is a plugin of srun. "
         "Try cluster.container=apptainer."),
        (["launcher.container=a.sif", "cluster.container=aptainer"],
         "cluster.container = aptainer is not one of apptainer, pyxis. Try cluster.container=apptainer."),
        (["launcher.container_mounts=[/data]"],
         "launcher.container_mounts = [/data] needs an image: launcher.container=IMAGE. "
         "Try launcher.container_mounts=[]."),
        (["launcher.container='a,b'", "cluster.container=pyxis"],
         "launcher.container = a,b must be one printable line without a comma."),
        (["cluster.start=mpi"],
         "cluster.start = mpi is not one of srun, torchrun, mpirun. Try cluster.start=mpirun."),
        (["cluster.start=torchrun", "+cluster.srun.cpu-bind='mask_cpu:f,f0'"],
         "cluster.srun.cpu-bind = mask_cpu:f,f0 is for one task a device, and cluster.start=torchrun starts "
         "one a node. Try cluster.srun.cpu-bind=cores."),
    ],
)  # fmt: skip
def test_what_can_not_be_started(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        prepared("launcher=script", *words)
    assert message in map(str, caught.value.problems)
