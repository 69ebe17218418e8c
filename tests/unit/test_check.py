"""`check`: what a login node can say without a job, with the exit code of the worst line."""

from __future__ import annotations

import os
import sys
import tempfile
from importlib.metadata import requires, version
from pathlib import Path

import psutil
import pytest
from packaging.requirements import Requirement

from hpc_parallel.__main__ import main
from hpc_parallel.machine.fabric_kind import FabricDevices, Port
from hpc_parallel.site import checks
from hpc_parallel.slurm import client
from tests.composed import prepared


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(client.shutil, "which", lambda name: None)
    return tmp_path


def states(output: str) -> dict[str, str]:
    """Subject -> state."""
    words = [line.split() for line in output.splitlines() if not line.startswith(" ")]
    return {subject: state for state, subject, *_ in words if state in ("ok", "warning", "error")}


def test_a_healthy_machine_without_slurm(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "strategy=pipeline", "nodes=2"]) == 0
    output = capsys.readouterr().out
    subjects = ("configuration", "python", "packages", "torch", "environment", "slurm", "fabric", "run")
    assert states(output) == dict.fromkeys(subjects, "ok")
    assert version("torch") in output
    assert list(Path().iterdir()) == []


def test_a_wrong_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "nodes=2", "training.global_batch_size=3", "launcher=local"]) == 2
    output = capsys.readouterr().out
    assert "Try training.global_batch_size=2 or" in output
    subjects = ("python", "packages", "torch", "environment", "slurm", "fabric", "run")
    assert states(output) == {"configuration": "error", **dict.fromkeys(subjects, "ok")}


def test_a_wrong_key_does_not_hide_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["training.step=3", "nodes=0", "launcher=slurm", "cluster=cpu", "+launcher.modules=[a]"]
    assert main(["check", *words, "launcher.snapshot=false"]) == 2
    output = capsys.readouterr().out
    wrong = [line for line in output.splitlines() if line.startswith("error")]
    assert [line.split()[1] for line in wrong] == ["configuration", "configuration", "slurm"]
    assert "Try training.steps=3." in wrong[0]
    assert "nodes = 0 must be at least 1" in wrong[1]
    assert states(output)["modules"] == "ok"  # the words about the site still count


SHELL = {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "4", "HOME": "/root", "MY_NCCL_X": "1"}


@pytest.mark.parametrize(
    ("words", "shell", "state", "text"),
    [
        ([], {"HOME": "/"}, "ok", "this shell sets no NCCL_*, GLOO_* or OMP_NUM_THREADS"),
        ([], SHELL, "ok", "NCCL_DEBUG=WARN, OMP_NUM_THREADS=4: a job keeps what this shell sets"),
        (["+launcher.extra.export=NONE"], SHELL, "ok",
         "NCCL_DEBUG=WARN, OMP_NUM_THREADS=4: not passed on, because of --export=NONE"),
        (["+cluster.environment={NCCL_DEBUG: INFO, OMP_NUM_THREADS: 4}"], SHELL, "warning",
         "NCCL_DEBUG=WARN takes precedence over INFO of cluster.environment. Try unset NCCL_DEBUG before the "
         "submission."),
    ],
)  # fmt: skip
def test_what_a_job_inherits(words: list[str], shell: dict[str, str], state: str, text: str) -> None:
    line = checks.environment_line(prepared(*words).config, environment=shell)
    assert (line.state, line.text) == (state, text)


AVAILABLE = "module() { printf '%s\\n' /opt/modules: cuda/12.6 'gcc/13.2(default)' gcc/12.1 openmpi; }"


@pytest.mark.parametrize(
    ("names", "state", "part"),
    [
        ("[gcc,cuda/12.6]", "ok", "gcc, cuda/12.6: all are available"),
        ("[gcc/13.2,openmpi]", "ok", "all are available"),
        ("[cuda/12,gcc,nccl]", "warning", "`module avail` does not list cuda/12, nccl."),
    ],
)
def test_modules_that_this_host_does_not_have(
    names: str, state: str, part: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / ".bash_profile").write_text(AVAILABLE)
    monkeypatch.setenv("HOME", str(here))
    (line,) = checks.module_lines(prepared(f"launcher.modules={names}").config)
    assert (line.state, line.subject) == (state, "modules")
    assert part in line.text


def test_without_module_no_module_is_judged(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))
    (here / ".bash_profile").write_text("unset -f module")
    (line,) = checks.module_lines(prepared("launcher.modules=[gcc]").config)
    assert (line.state, line.text) == ("ok", "gcc: not checked, there is no `module` here")
    assert list(checks.module_lines(prepared().config)) == []


def test_scratch_of_another_host_is_a_note(here: Path) -> None:
    config = prepared("cluster.scratch=$WHERE/x").config
    (line,) = checks.scratch_lines(config, environment={"WHERE": "/nowhere"})
    assert (line.state, line.text.partition(";")[0]) == ("ok", "/nowhere/x is not on this host")
    (here / "x").mkdir()
    (line,) = checks.scratch_lines(config, environment={"WHERE": str(here)})
    assert line.text.startswith(f"{here}/x exists here;")


def test_a_disk_of_one_host_has_a_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "file_system", lambda folder: "tmpfs")
    *_, line = checks.folder_lines(prepared("launcher=script"))
    assert line.state == "warning"
    assert line.text.endswith("a job needs a shared disk. Try run_dir=FOLDER on one.")


def test_slurm_is_wanted_and_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "launcher=slurm", "launcher.snapshot=false"]) == 1
    output = capsys.readouterr().out
    assert states(output)["slurm"] == "error"
    assert "there is no sbatch on this machine" in output


def test_packages_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = [Requirement(text) for text in requires("hpc-parallel") or ()]
    assert len(needed) > 5
    monkeypatch.setattr(checks, "requires", lambda name: ["numpy<1", "no-such-package", "torch>=2"])
    _, packages, _ = checks.python_lines(prepared().config)
    assert packages.state == "error"
    assert packages.text == (
        f"numpy {version('numpy')} is not <1; no-such-package is missing. "
        "Try pip install -e . with this Python."
    )


def test_the_python_of_the_job_is_asked_and_not_this_one(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = here / "python3.99"
    python.write_text("""#!/bin/sh\necho '["3.99.1", [["Torch", "9.1+cpu"], ["numpy", "0.5"]]]'\n""")
    python.chmod(0o755)
    monkeypatch.setattr(checks, "requires", lambda name: ["numpy>=1", "submitit"])
    config = prepared("launcher=script", "cluster=cpu", f"launcher.python={python}").config
    found, packages, torch = checks.python_lines(config)
    assert (found.state, found.text) == ("ok", f"3.99.1, {python}")
    assert packages.text == (
        "numpy 0.5 is not >=1; submitit is missing. Try pip install -e . with this Python."
    )
    assert torch.text == "9.1+cpu (gloo)"
    python.write_text("#!/bin/sh\nexit 1\n")
    (line,) = checks.python_lines(config)
    assert (line.state, line.text) == (
        "error", f"{python} does not run here. Try launcher.python={sys.executable}.",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "state"),
    [
        (("cluster=generic",), "warning"),
        (("cluster=mpi",), "warning"),
        (("cluster=cpu",), "ok"),
        (("device=cpu",), "ok"),
    ],
)
def test_a_torch_without_gpus(words: tuple[str, ...], state: str) -> None:
    config = prepared("launcher=script", *words).config
    assert checks.torch_line(config, {"torch": "2.13.0+cpu"}).state == state
    assert checks.torch_line(config, {"torch": "2.13.0", "nvidia-nccl-cu13": "2.28"}).state == "ok"


INFINIBAND = FabricDevices([Port("mlx5_0", "1", "InfiniBand", Path("/sys"))], [], [])
NOTHING = FabricDevices([], [], [])


@pytest.mark.parametrize(
    ("expected", "devices", "state"),
    [
        ("auto", NOTHING, "ok"), ("auto", INFINIBAND, "ok"), ("infiniband", INFINIBAND, "ok"),
        ("infiniband", NOTHING, "warning"), ("roce", INFINIBAND, "warning"), ("tcp", INFINIBAND, "warning"),
    ],
)  # fmt: skip
def test_the_fabric_that_a_profile_expects(
    expected: str, devices: FabricDevices, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "fabric_devices", lambda: devices)
    assert checks.fabric_line(prepared(f"cluster.fabric={expected}").config).state == state


def test_the_file_system_of_a_folder(here: Path) -> None:
    types = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}
    assert checks.file_system(Path("/proc/self")) == types["/proc"]
    parents = [str(path) for path in (here, *here.parents) if str(path) in types]
    assert checks.file_system(here) == types[parents[0]]


def test_a_folder_that_others_may_write(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own lie below one that is closed
        os.chmod(folder, 0o777)
        monkeypatch.chdir(folder)
        trust, space = checks.folder_lines(prepared("launcher=script", "run_dir=deep/run"))
    assert (trust.state, trust.subject, space.subject) == ("error", "run folder", "run folder")
    assert "others could replace it" in trust.text
