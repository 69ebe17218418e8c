"""What Slurm is given: exact flags, and scripts in which a value is never run by mistake."""

from __future__ import annotations

import json
import os
import pickletools
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from jinja2 import UndefinedError

from hpc_parallel.launch import batch_script
from hpc_parallel.launch.batch_script import ScriptLauncher, render, sbatch_flags, srun_arguments
from hpc_parallel.launch.prepare import PreparedRun
from hpc_parallel.launch.slurm_launcher import SlurmLauncher, submit
from hpc_parallel.slurm.submitit_executor import Executor
from tests.composed import prepared

NASTY = ["a b", "it's", 'say "x"', "$(touch pwned)", "`touch pwned`", "; touch pwned", "& touch pwned",
         "Grüße", "#x", "$HOME", "~", "*", "-n", "a\tb"]  # fmt: skip
TYPEABLE = [text for text in NASTY if text.isprintable()]
pytestmark = pytest.mark.usefixtures("here")


def quoted(text: str) -> str:
    """As Hydra's grammar writes a text."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


BASE = {"job-name": "data", "nodes": 2, "ntasks-per-node": 4, "cpus-per-task": 1, "time": 60,
        "signal": "USR2@90", "requeue": True}  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], {"gpus-per-node": "4"}),
        (["cluster.gpu_type=a100"], {"gpus-per-node": "a100:4"}),
        (["cluster=gres"], {"gres": "gpu:4"}),
        (["cluster=gres", "cluster.gpu_type=h200"], {"gres": "gpu:h200:4"}),
        (["cluster=cpu"], {}),
        (["cluster=cpu", "cluster.gpu_type=a100"], {}),
        (["cluster=cpu", "launcher.memory_gb=1.5"], {"mem": "1536M"}),
        (["cluster=cpu", "launcher.memory_gb=0.0001"], {"mem": "1M"}),
        (["cluster=cpu", "launcher.wckey=w"], {"wckey": "w"}),
        (["cluster=cpu", "+launcher.extra.requeue=true", "+launcher.extra.overcommit=false"],
         {"requeue": True}),
        (["cluster=cpu", "+launcher.extra.comment=x y", "+launcher.extra.nice=null"], {"comment": "x y"}),
        (
            ["cluster=cpu", "launcher.partition=p", "launcher.account=a", "launcher.qos=q",
             "launcher.constraint=c", "launcher.exclude='n[1-2]'"],
            {"partition": "p", "account": "a", "qos": "q", "constraint": "c", "exclude": "n[1-2]"},
        ),
    ],
)  # fmt: skip
def test_flags_are_exactly_these(overrides: list[str], expected: dict[str, object]) -> None:
    run = prepared("nodes=2", "gpus_per_node=4", "training.global_batch_size=16", *overrides)
    assert sbatch_flags(run) == BASE | expected


def test_a_profile_speaks_for_every_job_and_the_command_line_replaces_it() -> None:
    profile = (
        "launcher=script", "nodes=2", "gpus_per_node=4", "training.global_batch_size=16",
        "cluster.constraint=fast", "cluster.cpus_per_device=8", "cluster.memory_gb_per_device=60",
        "+cluster.extra={exclusive: true, comment: site}", "+cluster.srun={cpu-bind: cores, mpi: none}",
        "cluster.modules=[gcc]", "cluster.setup=['export A=1']",
    )  # fmt: skip
    run = prepared(*profile, "launcher.modules=[cuda]", "launcher.setup=['export B=1']")
    assert sbatch_flags(run) == BASE | {
        "gpus-per-node": "4", "constraint": "fast", "cpus-per-task": 8, "mem": "245760M", "exclusive": True,
        "comment": "site",
    }  # fmt: skip
    assert srun_arguments(run)[-2:] == ["--cpu-bind=cores", "--mpi=none"]
    lines = [line for line in render(run).splitlines() if line.startswith("eval ")]
    words = [shlex.split(line)[1] for line in lines]
    assert words == ["module load gcc", "module load cuda", "export A=1", "export B=1"]
    own = prepared(
        *profile, "launcher.constraint=null", "launcher.cpus_per_device=2", "launcher.memory_gb=5",
        "+launcher.extra.exclusive=false", "+launcher.extra.comment=mine", "cluster.srun.mpi=null",
    )  # fmt: skip
    assert sbatch_flags(own) == BASE | {
        "gpus-per-node": "4", "cpus-per-task": 2, "mem": "5120M", "comment": "mine",
    }  # fmt: skip
    assert srun_arguments(own)[-1] == "--cpu-bind=cores"


def test_one_process_gets_all_of_a_node() -> None:
    """nn.DataParallel: one task that sees every GPU and has the cores of all."""
    run = prepared("strategy=dataparallel", "gpus_per_node=4", "launcher.cpus_per_device=3")
    flags = sbatch_flags(run)
    assert (flags["nodes"], flags["ntasks-per-node"], flags["cpus-per-task"]) == (1, 1, 12)
    assert flags["gpus-per-node"] == "4"
    assert "--cpus-per-task=12" in srun_arguments(run)
    assert "#SBATCH --ntasks-per-node=1\n" in render(run)


def sbatch_lines(script: str) -> dict[str, str | None]:
    """The options that a shell, and sbatch, read in the script's `#SBATCH` lines."""
    options: dict[str, str | None] = {}
    for line in script.splitlines():
        if line.startswith("#SBATCH "):
            (word,) = shlex.split(line.removeprefix("#SBATCH "), comments=True)
            flag, equals, value = word.removeprefix("--").partition("=")
            options[flag] = value if equals else None
    return options


@pytest.mark.parametrize("text", TYPEABLE)
def test_values_reach_sbatch_unchanged(text: str) -> None:
    run = prepared("nodes=1", f"name={quoted(text)}", f"launcher.partition={quoted(text)}",
                   f"run_dir={quoted('runs/' + text)}", "+launcher.extra.requeue=true")  # fmt: skip
    for script in (render(run), render(run, payload=True)):
        options = sbatch_lines(script)
        assert (options["job-name"], options["partition"]) == (text, text)
        assert options["requeue"] is None
        assert options["output"].startswith(f"{run.folder.path}/slurm/%")
    assert run.folder.path == Path.cwd() / "runs" / text


@pytest.mark.parametrize("launcher", [ScriptLauncher(), SlurmLauncher()], ids=["script", "slurm"])
def test_bash_reads_the_scripts(launcher: ScriptLauncher | SlurmLauncher, tmp_path: Path) -> None:
    lines = ",".join(quoted(text) for text in TYPEABLE)
    run = prepared(f"launcher.setup=[{lines}]", f"launcher.modules=[{lines}]", f"name={quoted(TYPEABLE[1])}")
    subprocess.run(["bash", "-n"], input=launcher.preview(run), text=True, check=True)
    assert list(tmp_path.iterdir()) == []


STUB = """#!/bin/sh
for word in "$@"; do printf '%s\\n' "$word"; done >> "$CALLS"
"""


MODULE = 'module() { for word; do echo "module <$word>"; done; }\n'


class Node:
    """Runs a batch script without its srun, with bash, its python and `module` replaced by recorders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = folder / "calls"
        self.venv = folder / "my venv's"
        (self.venv / "bin").mkdir(parents=True)
        (self.venv / "bin" / "activate").write_text('echo "activated $#"\n')
        python = self.venv / "bin" / "python"
        python.write_text(STUB)
        python.chmod(0o755)

    def run(
        self,
        *overrides: str,
        then: str = "",
        completes: bool = False,
        module: str = MODULE,
        kept: Mapping[str, str] = MappingProxyType({}),
        restarts: int = 0,
    ) -> subprocess.CompletedProcess[str]:
        run = prepared(f"launcher.venv={quoted(str(self.venv))}", "launcher.snapshot=false", *overrides)
        run.folder.create()
        for name, text in kept.items():  # of an earlier start
            (run.folder.path / name).write_text(text)
        written = f"touch {shlex.quote(str(run.folder.summary))}\n" if completes else ""
        before_ranks = render(run).rpartition("\nset +e")[0]
        script = f"{module}{before_ranks}\n{written}{then}"
        environment = {**os.environ, "CALLS": str(self.calls), "SLURM_JOB_ID": "7"}
        environment |= {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
        return subprocess.run(
            ["bash", "-c", script], cwd=self.folder, env=environment, capture_output=True, text=True
        )


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_names_of_modules_are_only_names(node: Node) -> None:
    done = node.run(f"launcher.modules=[{','.join(quoted(text) for text in TYPEABLE)}]", completes=True)
    assert done.returncode == 0, done.stderr
    loaded = [
        line for line in done.stdout.splitlines() if line != "module <load>" and line.startswith("module")
    ]
    assert loaded == [f"module <{text}>" for text in TYPEABLE]
    assert done.stdout.splitlines()[-1] == "activated 0"
    assert not (node.folder / "pwned").exists()
    assert not node.calls.exists()  # nothing to conclude


# As Environment Modules 3: the exit code is that of `eval` of nothing, and `show` prints to stderr.
MODULES_3 = """
MODULE_VERSION={version} LOADEDMODULES=base/1 _LMFILES_=/mf/base/1
module() {{ case $* in
    "load gcc") LOADEDMODULES+=:gcc/9 ;; "load cc") LOADEDMODULES+=:icc ;;
    "show default") printf -- '---\\n/mf/base/1:\\n\\nsetenv BASE /b:\\n---\\n' >&2 ;;
    "show base2") printf -- '---\\n/mf/base/2:\\n\\n---\\n' >&2 ;;
    show*) echo "ModuleCmd_Display.c(140):ERROR:105: Unable to locate a modulefile for '$2'" >&2 ;;
esac; }}
"""


@pytest.mark.parametrize(
    ("version", "names", "missing"),
    [
        ("3.2.10", "gcc,cc,base,base/1,gcc/9", None),  # cc is an alias of icc
        ("3.2.10", "gcc,default", None),  # an alias of what is loaded
        ("3.2.10", "gcc,cuda,base", "cuda"),
        ("3.2.10", "gcc,base2,base", "base2"),  # it exists, and failed
        ("5.3.0", "cuda", None),  # has an exit code of its own
    ],
)
def test_a_module_that_was_not_loaded_ends_the_job(
    node: Node, version: str, names: str, missing: str | None
) -> None:
    module = MODULES_3.format(version=version)
    done = node.run(f"launcher.modules=[{names}]", module=module, completes=True)
    assert done.returncode == (0 if missing is None else 1), done.stderr
    stopped = f"setup line failed with exit code 1: module load {missing}"
    assert (stopped in done.stderr.splitlines()) == (missing is not None)


@pytest.mark.parametrize("text", TYPEABLE)
def test_a_failing_line_stops_the_job_with_its_text_and_code(node: Node, text: str) -> None:
    line = f"sh -c 'exit 7' {shlex.quote(text)}"
    done = node.run(f"launcher.setup=[{quoted(line)},{quoted('echo on')}]", f"run_dir={quoted('r/' + text)}",
                    then="echo still on")  # fmt: skip
    assert done.returncode == 7
    attempt = "hpc_parallel attempt 0 of job 7 on \n"
    assert done.stderr == f"{attempt}setup line failed with exit code 7: {line}\n"
    assert " on" not in done.stdout
    folder = node.folder / "r" / text
    assert node.calls.read_text().splitlines() == [
        "-m", "hpc_parallel.job", "conclude", str(folder), "7", "--log", f"{folder}/slurm/7.out",
        "--again",
    ]  # fmt: skip
    assert not (node.folder / "pwned").exists()


def test_setup_lines_run_like_typed_lines(node: Node) -> None:
    lines = ["export SITE='it'\"'\"'s $((1+1))'", "declare -a LIST=(one two)", "true && COUNT=$#", "cd /"]
    done = node.run(
        f"launcher.setup=[{','.join(quoted(line) for line in lines)}]",
        then='printf "%s|" "$SITE" "${LIST[1]}" "$COUNT" "$PWD"',
    )
    assert done.stdout.splitlines()[-1] == "it's $((1+1))|two|0|/|"


def test_a_line_that_bash_cannot_read_stops_the_job(node: Node) -> None:
    done = node.run(f"launcher.setup=[{quoted('echo (')}]", then="echo still on")
    assert done.returncode != 0
    assert "setup line failed" in done.stderr
    assert "still on" not in done.stdout


def test_slurms_warning_does_not_end_the_setup_lines(node: Node) -> None:
    """The shell that starts mpirun gets SIGUSR2 before the time limit, also while these lines run."""
    done = node.run("launcher.setup=['kill -USR2 $$']", then="echo still on")
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["still on"]), done.stderr


@pytest.mark.parametrize(("code", "completes"), [(0, True), (0, False), (1, False), (137, True)])
def test_the_end_is_concluded_and_keeps_its_code(node: Node, code: int, completes: bool) -> None:
    """A job that ends with code 0 has not completed by that: rank 0 writes the summary."""
    assert node.run(then=f"(exit {code})", completes=completes).returncode == code
    assert node.calls.exists() == (code != 0 or not completes)


@pytest.mark.parametrize(
    ("outcome", "restarts", "starts"),
    [
        ("completed", 1, False), ("pruned", 2, False), ("completed", 0, True), ("failed", 1, True),
        ("cancelled", 1, True), ("preempted", 1, True), (None, 1, True),
    ],
)  # fmt: skip
def test_a_requeued_run_that_has_completed_does_not_start(
    node: Node, outcome: str | None, restarts: int, starts: bool
) -> None:
    """Slurm 24.05 and newer requeue the job of such a run once more if it was preempted."""
    summary = json.dumps({"outcome": outcome, "strategy": "data"}, indent=2)
    kept = {} if outcome is None else {"summary.json": summary}
    done = node.run("launcher.setup=['exit 9']", kept=kept, restarts=restarts)
    assert done.returncode == (9 if starts else 0), done.stderr
    assert done.stderr.endswith("the run has ended: nothing is left to do in this start\n") != starts
    assert node.calls.exists() == starts


@pytest.mark.parametrize(
    ("owner", "queue", "restarts", "starts"),
    [
        ("105", "105", 1, False), ("105_3", "105_3", 1, False),
        ("105", "105", 0, True),  # a first start is checked by its ranks
        ("105 over", "105", 1, True), ("105", "", 1, True), ("7", "7", 1, True),
        ("6_31", "6_31", 1, True), (None, "105", 1, True),
    ],
)  # fmt: skip
def test_a_requeued_job_leaves_a_run_alone_that_goes_on_as_a_newer_one(
    node: Node, owner: str | None, queue: str, restarts: int, starts: bool
) -> None:
    """It would remove how the start before has ended, and write how its own ranks were refused."""
    job_id, _, over = str(owner).partition(" ")
    about = {"job_id": job_id, "waits": False, "over": bool(over)}
    squeue = f'squeue() {{ [ "$*" != "--all --noheader --jobs={queue}" ] || echo " {queue} main run R"; }}\n'
    kept = {
        "stopped.json": "{}",
        "owner.json": json.dumps({"host": "n1"} if owner is None else about, indent=2),
    }
    done = node.run("launcher.setup=['exit 9']", module=squeue, kept=kept, restarts=restarts)
    assert done.returncode == (9 if starts else 1), done.stderr
    refusal = f"the run goes on as job {owner}: this start of job 7 does nothing\n"
    assert done.stderr.endswith(refusal) != starts
    assert node.calls.exists() == starts
    assert (next(node.folder.glob("**/owner.json")).parent / "stopped.json").exists() != starts


@pytest.mark.parametrize(("code", "status"), [(0, 1), (3, 3)])
@pytest.mark.parametrize("sourced", [False, True])
def test_a_setup_line_that_exits_does_not_complete_the_job(
    node: Node, code: int, status: int, sourced: bool
) -> None:
    (node.folder / "site.sh").write_text(f"exit {code}\n")
    line = f"source {node.folder}/site.sh" if sourced else f"exit {code}"
    done = node.run(f"launcher.setup=['true',{quoted(line)},'true']", then="echo still on")
    assert done.returncode == status
    attempt = "hpc_parallel attempt 0 of job 7 on \n"
    assert done.stderr == f"{attempt}setup line ended the job with exit code {code}: {line}\n"
    assert "still on" not in done.stdout
    assert node.calls.read_text().splitlines()[4] == str(status)


def test_srun_starts_one_worker_a_device(tmp_path: Path) -> None:
    run = prepared("nodes=2", "gpus_per_node=2", "launcher.cpus_per_device=3", "run_dir='it is'")
    *_, srun, following, done = render(run).splitlines()
    assert (following, done) == ("hpc_parallel_next $?", "done")
    assert shlex.split(srun) == [
        "srun", "--cpus-per-task=3", "--distribution=block:block", "--kill-on-bad-exit=1", "--wait=0",
        "sh", "-c", 'trap "" USR2; exec "$@"', "rank",
        sys.executable, "-m", "hpc_parallel.job", "rank", str(tmp_path / "it is"),
    ]  # fmt: skip


def test_ranks_that_wait_have_memory_beside_those_that_train() -> None:
    """Slurm counts what steps take for each CPU (`DefMemPerCPU`, `--mem-per-cpu`) also if they overlap."""
    words = ("nodes=2", "+launcher.extra.mem-per-cpu=1G", "launcher=script")
    assert "--mem=0" in srun_arguments(prepared(*words, "launcher.standby=true"))
    assert not any("--mem" in word for word in srun_arguments(prepared(*words)))


@pytest.mark.parametrize("lost", ["run_folder", "python", "log", "modules", "setup", "start"])
def test_a_template_without_a_value_is_an_error(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = batch_script._values

    def values(run: PreparedRun, suffix: str) -> dict[str, object]:
        return {name: value for name, value in whole(run, suffix).items() if name != lost}

    monkeypatch.setattr(batch_script, "_values", values)
    with pytest.raises(UndefinedError, match=lost):
        render(prepared("nodes=1"))


@pytest.fixture
def submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PreparedRun:
    """A run that submitit has handed to an `sbatch` that keeps its script in `given`."""
    stub = tmp_path / "bin" / "sbatch"
    stub.parent.mkdir()
    stub.write_text(
        f'#!/bin/sh\nfor last; do :; done; cp "$last" {tmp_path}/given\necho Submitted batch job 7\n'
    )
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stub.parent}:{os.environ['PATH']}")
    run = prepared("nodes=2", "launcher.modules=[cuda]", "launcher.snapshot=false")
    run.folder.create()
    assert submit(run).id == "7"
    return run


def test_submitit_submits_the_preview_which_starts_its_payload(
    submitted: PreparedRun, tmp_path: Path
) -> None:
    given = (tmp_path / "given").read_text()
    assert given == SlurmLauncher().preview(submitted) == submitted.folder.batch_script.read_text()
    payload = Executor(submitted.folder.slurm, script="", time_minutes=1)._submitit_command_str
    logs = f"--unbuffered --output={submitted.folder.slurm}/%j_%t_log.out"
    *_, marker, srun, _, _ = given.splitlines()
    assert marker == "export SUBMITIT_EXECUTOR=slurm"
    early = 'sh -c \'trap "" USR2; exec "$@"\' rank'
    assert srun == " ".join(["srun", logs, *srun_arguments(submitted), early, payload])
    assert "wckey" not in given


def test_the_payload_is_a_name_and_a_path(submitted: PreparedRun) -> None:
    """submitit pickles with cloudpickle, which would take a closure by its code."""
    (pickle,) = submitted.folder.slurm.glob("*.pkl")
    opcodes = pickletools.genops(pickle.read_bytes())
    names = {argument for _, argument, _ in opcodes if isinstance(argument, str)}
    assert {"hpc_parallel.job", "rank", str(submitted.folder.path)} <= names
    modules = {name for name in names if "." in name and not name.startswith("/")}
    assert modules == {"hpc_parallel.job", "submitit.core.utils"}


def test_script_writes_its_preview(capsys: pytest.CaptureFixture[str]) -> None:
    run: PreparedRun = prepared("nodes=2", "run_dir='my run'")
    assert ScriptLauncher().launch(run) == 0
    assert run.folder.batch_script.read_text() == ScriptLauncher().preview(run)
    assert f"sbatch '{run.folder.batch_script}'" in capsys.readouterr().out
    assert run.folder.slurm.is_dir()
