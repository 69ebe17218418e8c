"""The Python of a job: what its batch script runs, with a conda, a module system and an srun of the test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_parallel.config import job_python
from hpc_parallel.launch.batch_script import ScriptLauncher, render, render_array
from hpc_parallel.launch.prepare import PreparedRun
from hpc_parallel.launch.resume import resumed
from hpc_parallel.launch.slurm_launcher import SlurmLauncher
from hpc_parallel.problems import ConfigError, spell
from tests.composed import prepared

HOOK = """
conda() {
    if [ "$1" = activate ] && [ -d "$2/conda-meta" ]; then export CONDA_PREFIX=$2 PATH=$2/bin:$PATH
    else echo "no $1 of $2" >&2; return 1; fi
}
"""
PYTHON = """#!/bin/sh
printf '%s %s %s %s\\n' "$0" "${CONDA_PREFIX:-none}" "$2" "$3" >> "$HOME/calls"
[ "$3" = conclude ] || touch "$HOME/r/summary.json" # as a rank 0 that completes
"""
SRUN = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do case $1 in --output | --error) shift ;; esac; shift; done
exec "$@"
"""


class Site:
    """A home with a conda of its own, and a shell that runs batch scripts."""

    def __init__(self, home: Path) -> None:
        self.home, self.conda = home, home / "mini conda"
        self.program("bin/srun", SRUN)
        self.program("mini conda/bin/conda", "#!/bin/sh\n")
        hook = self.conda / "etc/profile.d/conda.sh"
        hook.parent.mkdir(parents=True)
        hook.write_text(HOOK)
        for folder in ("mini conda", "mini conda/envs/torch", "scratch/far"):
            self.environment(folder)
        (home / ".conda").mkdir()
        (home / ".conda/environments.txt").write_text(f"{home}/scratch/far\n{home}/gone\n")

    def environment(self, folder: str) -> None:
        self.program(f"{folder}/bin/python", PYTHON)
        (self.home / folder / "conda-meta").mkdir()

    def program(self, name: str, text: str) -> Path:
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def submit(self, script: str) -> subprocess.CompletedProcess[str]:
        module = f"() {{ PATH={self.home}/$2:$PATH; }}"
        environment = {
            "PATH": f"{self.home}/bin:/usr/bin:/bin", "HOME": str(self.home), "SLURM_JOB_ID": "7",
            "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0", "BASH_FUNC_module%%": module,
        }  # fmt: skip
        return subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)

    @property
    def calls(self) -> list[str]:
        """The Python, the prefix of conda and the module of each call, in order."""
        return (self.home / "calls").read_text().splitlines()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    site = Site(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CONDA_EXE", str(site.conda / "bin" / "conda"))
    for name in ("CONDA_ENVS_DIRS", "CONDA_ENVS_PATH"):
        monkeypatch.delenv(name, raising=False)
    return site


def script_run(*words: str) -> PreparedRun:
    run = prepared("launcher=script", "launcher.snapshot=false", "cluster=cpu", "run_dir=r", *words)
    run.folder.create()
    return run


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "folder"),
    [("torch", "mini conda/envs/torch"), ("base", "mini conda"), ("far", "scratch/far"),
     ("scratch/far", "scratch/far"), ("~/mini conda/envs/torch", "mini conda/envs/torch")],
)  # fmt: skip
def test_a_job_runs_the_python_of_its_conda_environment(site: Site, name: str, folder: str) -> None:
    run = script_run(f"launcher.conda={spell(name)}")
    done = site.submit(render(run))
    assert (done.returncode, done.stderr.splitlines()[1:]) == (0, [])
    prefix = site.home / folder
    assert site.calls == [f"{prefix}/bin/python {prefix} hpc_parallel.job rank"]


@pytest.mark.processes
def test_arrays_submitit_and_a_new_submission_run_it_too(site: Site) -> None:
    run = script_run("launcher.conda=torch", "launcher.setup=['true']")
    tasks = site.home / "tasks"
    tasks.mkdir()
    (tasks / "0").symlink_to(run.folder.path)
    ScriptLauncher().write_script(run)
    scripts = [
        render_array(run, tasks=tasks, name="n", count=1), SlurmLauncher().preview(run),
        run.folder.resubmission.read_text(),
    ]  # fmt: skip
    for script in scripts:
        done = site.submit(script)
        assert (done.returncode, done.stderr.splitlines()[1:]) == (0, [])
    prefix = site.home / "mini conda/envs/torch"
    modules = ["hpc_parallel.job rank", "-m submitit.core._submit", "hpc_parallel.job rank"]  # python -u -m
    assert site.calls == [f"{prefix}/bin/python {prefix} {module}" for module in modules]


def test_a_resumed_run_keeps_it(site: Site) -> None:
    words = ("launcher=script", "launcher.snapshot=false", "run_dir=r", "launcher.conda=torch")
    run = prepared(*words)
    ScriptLauncher().start(run)
    assert "launcher.conda=torch" in resumed([f"resume={run.folder.path}"])


@pytest.mark.processes
def test_an_environment_that_does_not_activate_stops_the_job(site: Site) -> None:
    script = render(script_run("launcher.conda=torch"))
    (site.home / "mini conda/envs/torch/conda-meta").rmdir()
    done = site.submit(script)
    line = f"conda activate '{site.home}/mini conda/envs/torch'"
    assert done.returncode == 1
    assert done.stderr.splitlines()[1:] == [
        f"no activate of {site.home}/mini conda/envs/torch", f"setup line failed with exit code 1: {line}",
    ]  # fmt: skip
    assert site.calls == [f"{site.home}/mini conda/envs/torch/bin/python none hpc_parallel.job conclude"]


@pytest.mark.processes
def test_a_python_of_a_module_is_found_in_the_job(site: Site) -> None:
    run = script_run("launcher.python=python3.77", "launcher.modules=[special]")
    failed = site.submit(render(run))
    assert "setup line failed with exit code 1: command -v python3.77 > /dev/null\n" in failed.stderr
    python = site.program("special/python3.77", PYTHON)
    done = site.submit(render(run))
    assert (done.returncode, site.calls) == (0, [f"{python} none hpc_parallel.job rank"])


@pytest.mark.processes
def test_a_path_needs_no_setup(site: Site) -> None:
    python = site.program("uv's/.venv/bin/python", PYTHON)
    run = script_run('launcher.python="~/uv\'s/.venv/bin/python"')
    assert site.submit(render(run)).returncode == 0
    assert site.calls == [f"{python} none hpc_parallel.job rank"]


APPTAINER = ("launcher.container=a.sif", "cluster.container=apptainer")


@pytest.mark.parametrize(
    ("words", "rank", "host"),
    [
        (APPTAINER, "python3", sys.executable),
        ((*APPTAINER, "launcher.python=/opt/conda/bin/python"), "/opt/conda/bin/python", sys.executable),
        ((*APPTAINER, "launcher.python=python3.12"), "python3.12", sys.executable),
        ((*APPTAINER, "launcher.conda=torch"), "HOME/mini conda/envs/torch/bin/python",
         "HOME/mini conda/envs/torch/bin/python"),
        ((), sys.executable, sys.executable),
        (("launcher.python=HOME/mini\\ conda/bin/python", "launcher.conda=torch"),
         "HOME/mini conda/bin/python", "HOME/mini conda/bin/python"),
    ],
)  # fmt: skip
def test_ranks_run_the_python_of_the_image_and_the_job_ends_outside_of_it(
    site: Site, words: tuple[str, ...], rank: str, host: str
) -> None:
    home = str(site.home)
    launcher = script_run(*(word.replace("HOME", home) for word in words)).config.launcher
    found = job_python.rank_python(launcher), job_python.host_python(launcher)
    assert found == (rank.replace("HOME", home), host.replace("HOME", home))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["launcher.conda=torhc"],
         "launcher.conda = torhc is not one of base, torch, far. Try launcher.conda=torch."),
        (["launcher.conda=scratch/fra"], "launcher.conda = scratch/fra is not a folder here. "
         "Try launcher.conda=far."),
        (["launcher.conda=empty"], "launcher.conda = empty has no Python "
         "(HOME/mini conda/envs/empty/bin/python). "
         "Try conda install -p 'HOME/mini conda/envs/empty' python."),
        (["launcher.conda=torch", "launcher.venv=v"], "launcher.venv = v can't be with launcher.conda=torch: "
         "each is the environment of the job. Try launcher.venv=null."),
        (["launcher.venv=scratch/far"], "launcher.venv = scratch/far is an environment of conda. "
         "Try launcher.conda=HOME/scratch/far."),
        (["launcher.python=scratch/far"], "launcher.python = scratch/far is no program here. "
         "Try launcher.python=HOME/scratch/far/bin/python."),
        (["launcher.python=python3.77"], "launcher.python = python3.77 is not on the PATH of this shell, "
         f"and the job has no modules and no setup that could add it. Try launcher.python={sys.executable}."),
        (["launcher.python=''"], "launcher.python = '' must be a path or a name. "
         f"Try launcher.python={sys.executable}."),
    ],
)  # fmt: skip
def test_what_the_job_could_not_run_is_refused(site: Site, words: list[str], message: str) -> None:
    (site.conda / "envs/empty/conda-meta").mkdir(parents=True)
    if "empty" not in words[0]:
        (site.conda / "envs/empty/conda-meta").rmdir()
    with pytest.raises(ConfigError) as refused:
        prepared("launcher=script", *words)
    assert list(map(str, refused.value.problems)) == [message.replace("HOME", str(site.home))]


def test_without_conda_an_environment_can_not_be_activated(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CONDA_EXE")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    (site.home / ".conda/environments.txt").unlink()
    messages = {
        "mine": "names no environment, because no conda is known here. Load its module, or name its folder.",
        "scratch/far": "can't be activated, because no conda with an etc/profile.d/conda.sh is known here. "
        f"Load its module, or try launcher.python={site.home}/scratch/far/bin/python.",
    }
    for text, rule in messages.items():
        with pytest.raises(ConfigError) as refused:
            prepared("launcher=script", f"launcher.conda={text}")
        assert str(refused.value) == f"launcher.conda = {text} {rule}"


@pytest.mark.parametrize(
    ("words", "warning"),
    [
        (["launcher.setup=['source ~/x.sh && conda activate torch']"],
         "launcher.setup: source ~/x.sh && conda activate torch does not change the Python of the job, "
         f"which is {sys.executable}. Try launcher.conda=torch."),
        (["launcher.setup=['mamba activate torch']"], "Try launcher.conda=torch."),
        (["launcher.setup=['. .venv/bin/activate']"], "Try launcher.venv=.venv."),
        (["cluster.setup=['source /a/bin/activate']"], "Try launcher.venv=/a."),
        (["launcher.setup=['conda activate torch']", "launcher.python=/bin/sh"], ""),
        (["launcher.setup=['conda deactivate','source /etc/profile']"], ""),
        (["launcher.modules=[cuda/12.6,python/3.12]"],
         "launcher.modules: python/3.12 does not change the Python of the job, which is "
         f"{sys.executable}. Try launcher.python=python3."),
        (["cluster.modules=[Miniconda3]"], "Try launcher.python=python3."),
        (["launcher.modules=[python/3.11,pythonista/1]"], ""),  # the first is loaded here
        (["launcher.modules=[python/3.12]", "launcher.python=python3"], ""),
        (["launcher=local", "launcher.setup=['conda activate torch']", "launcher.conda=torch"],
         "launcher.conda, launcher.setup are for jobs: this run uses the Python of this machine."),
    ],
)  # fmt: skip
def test_what_changes_no_python_is_announced(
    site: Site, words: list[str], warning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOADEDMODULES", "gcc/13:python/3.11")
    notes = prepared("launcher=script", "launcher.snapshot=false", *words).notes
    if warning:
        (note,) = notes
        assert note.startswith("warning     ")
        assert note.endswith(warning)
    else:
        assert notes == []


def test_names_follow_the_folders_of_the_environment(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.environment("mine/torch")
    monkeypatch.setenv("CONDA_ENVS_DIRS", f"{site.home}/nothing{os.pathsep}{site.home}/mine")
    launcher = prepared("launcher=script", "launcher.conda=torch").config.launcher
    assert job_python.job_python(launcher) == f"{site.home}/mine/torch/bin/python"
