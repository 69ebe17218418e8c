"""Slurm's commands: all start in slurm/, the controller is asked once, and a lost answer leaves no job."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import hpc_parallel
from hpc_parallel.run import main
from hpc_parallel.slurm import client, submit
from hpc_parallel.slurm.client import MISSING, UNANSWERED, run
from hpc_parallel.slurm.submit import SiteRefusedError, submit_script

PACKAGE = Path(hpc_parallel.__file__).parent
PROGRAMS = {
    "sbatch", "srun", "salloc", "squeue", "scontrol", "sacct", "sacctmgr", "sinfo", "scancel", "sprio",
    "sshare", "sstat",
}  # fmt: skip
STARTERS = {
    "run", "Popen", "call", "check_call", "check_output", "getoutput", "getstatusoutput", "system", "popen",
    "spawnv", "spawnvp", "spawnlp", "execv", "execvp", "execvpe", "execlp", "posix_spawn", "posix_spawnp",
    "create_subprocess_exec", "create_subprocess_shell",
}  # fmt: skip
HARMLESS = {"which", "key", "one_of"}  # finds a program; a default and the choices of a key


def starts(source: str) -> Iterator[str]:
    """Each program of Slurm that the source starts.

    That is a call whose first argument is such a name, or a list that begins with one; for functions that
    start a process also a shell line. A constant of the module counts as what it holds.
    """
    if not any(name in source for name in (*PROGRAMS, "submitit")):
        return  # most files: to parse all of them takes 3 s
    tree = ast.parse(source)
    constants = {
        target.id: node.value
        for node in ast.walk(tree) if isinstance(node, ast.Assign)
        for target in node.targets if isinstance(target, ast.Name)
    }  # fmt: skip
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        arguments = [*call.args, *(word.value for word in call.keywords if word.arg in ("args", "file"))]
        if name in HARMLESS or not arguments:
            continue
        word = first_word(arguments[0], dict(constants))
        if word in PROGRAMS or (name in STARTERS and word.partition(" ")[0] in PROGRAMS):
            yield word
    for node in ast.walk(tree):
        modules = (
            [alias.name for alias in node.names] if isinstance(node, ast.Import)
            else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        )  # fmt: skip
        yield from (module for module in modules if module.partition(".")[0] == "submitit")


def first_word(node: ast.expr, constants: dict[str, ast.expr]) -> str:
    """The text that an expression begins with, without folders; empty if it is none."""
    match node:
        case ast.Constant(value=str(text)):
            return os.path.basename(text)
        case ast.Name(id=name) if name in constants:
            return first_word(constants.pop(name), constants)
        case ast.List(elts=[first, *_]) | ast.Tuple(elts=[first, *_]) | ast.JoinedStr(values=[first, *_]):
            return first_word(first, constants)
        case ast.Starred(value=first) | ast.BinOp(left=first):
            return first_word(first, constants)
    return ""


@pytest.mark.parametrize(
    "source",
    [
        'subprocess.run(["scancel", job], check=False)',
        'subprocess.Popen(("/usr/bin/srun", *words))',
        'run(["squeue"] + words)',
        'ask("sinfo", "-h")',
        '_SHOW = ("scontrol", "show")\nask(*_SHOW, job)',
        'COMMAND = ["sacct"]\nsubprocess.run(args=COMMAND)',
        'os.system("sbatch job.sh")',
        'os.system(f"sbatch {script}")',
        'os.execvp("srun", words)',
        "from submitit.slurm.slurm import SlurmExecutor",
    ],
)
def test_a_start_is_seen(source: str) -> None:
    assert len(list(starts(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        'shutil.which("sbatch")', 'print("sbatch job.sh")', 'say(f"srun: {flags}")', "run(command)",
        'CHOICES = {"cluster.start": ("srun", "torchrun")}', 'subprocess.run(["git", "log"])',
    ],
)  # fmt: skip
def test_a_word_is_no_start(source: str) -> None:
    assert list(starts(source)) == []


def test_only_one_folder_starts_slurms_commands() -> None:
    found = {
        str(file.relative_to(PACKAGE)): programs
        for file in PACKAGE.rglob("*.py")
        if (programs := set(starts(file.read_text()))) and file.parent != PACKAGE / "slurm"
    }
    assert found == {}


def stub(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho {name} $* >> {folder}/calls\n{script}\n")
    path.chmod(0o755)


def test_a_dry_run_asks_slurm_each_question_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it answers, and what its partitions have, though several parts of the command ask."""
    monkeypatch.setattr(client, "_KEPT_S", float("inf"))  # the minute may end during the command
    stub(tmp_path, "sbatch", "exit 0")
    stub(tmp_path, "scontrol", "echo Slurmctld is UP")
    stub(tmp_path, "sinfo", "echo 'main*|4|512000|infinite|gpu:a100:4|64|n[1-4]'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.chdir(tmp_path)
    words = ("nodes=2", "gpus_per_node=auto", "strategy=data", "dry_run=true", "launcher.snapshot=false")
    assert main([*words, "training.global_batch_size=16"]) == 0
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == ["scontrol ping", "sinfo -h -o %P|%D|%m|%l|%G|%c|%N", "scontrol --oneliner show node"]


def test_a_command_that_does_not_answer_or_is_not_there_has_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(tmp_path, "scancel", "exec sleep 1000")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    silent, missing = run("scancel", "7", waits_s=(0.1,)), run("no-such-command")
    assert (silent.returncode, missing.returncode) == (UNANSWERED, MISSING)
    assert "timed out after 0.1 seconds" in silent.stderr
    assert "No such file" in missing.stderr


def test_questions_go_to_one_cluster_whatever_the_shell_selects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sacct does not read SLURM_CLUSTERS."""
    for name in ("squeue", "sacct"):
        stub(tmp_path, name, 'echo "${SQUEUE_USERS-none} $SLURM_CLUSTERS $*"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SQUEUE_USERS", "another")
    monkeypatch.setenv("SLURM_CLUSTERS", "east")
    assert run("squeue", "-j", "7").stdout == "none east -j 7\n"
    assert run("sacct", "-j", "7").stdout == "another east -M east -j 7\n"
    assert run("sacct", "-j", "7", cluster="west").stdout == "another west -M west -j 7\n"


def test_what_stdin_holds_is_read_and_odd_bytes_do_not_stop_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(tmp_path, "sbatch", "cat; printf '\\377' >&2; exit 3")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    answer = run("sbatch", "--test-only", stdin="#!/bin/sh\n")
    assert (answer.returncode, answer.stdout, answer.stderr) == (
        3,
        "#!/bin/sh\n",
        "\N{REPLACEMENT CHARACTER}",
    )


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Slurm whose sbatch loses the answer; it has the jobs of the file `jobs`, if there is one."""
    commands = {
        "sbatch": "echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1",
        "squeue": f"cat {tmp_path}/jobs",
        "scancel": f"echo $* > {tmp_path}/cancelled",
        "scontrol": "exit 1",
        "sinfo": "exit 1",
    }
    for name, text in commands.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=":")
    monkeypatch.setattr(submit, "ANSWER_S", 0.0)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/batch_script.sh").write_text("#!/bin/sh\n")
    return tmp_path


@pytest.mark.parametrize(
    ("jobs", "told", "cancelled"),
    [
        (
            "12|12|PENDING|None|{run}/batch_script.sh\n13|13|RUNNING|None|/other.sh\n",
            "It had taken job 12",
            "12\n",
        ),
        ("13|13|RUNNING|None|/other.sh\n", "nothing was submitted", None),
        ("Welcome to Big.\n", "It may have taken the job", None),
        (None, "It may have taken the job", None),
    ],
)
def test_a_lost_answer_leaves_no_job_behind(
    site: Path, jobs: str | None, told: str, cancelled: str | None
) -> None:
    if jobs is not None:
        (site / "jobs").write_text(jobs.format(run=site / "run"))
    with pytest.raises(SiteRefusedError, match=told):
        submit_script(site / "run/batch_script.sh")
    done = site / "cancelled"
    assert (done.read_text() if done.exists() else None) == cancelled
