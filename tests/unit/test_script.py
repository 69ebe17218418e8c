"""A script of the user's own, until it starts: its words, its variables, and what is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from hpc_parallel.__main__ import main as command
from hpc_parallel.config.checks.all_checks import find_problems
from hpc_parallel.config.checks.script_checks import script_warnings
from hpc_parallel.config.command_line import CommandLine
from hpc_parallel.config.compose import compose_run
from hpc_parallel.config.resolve import resolve
from hpc_parallel.config.script import arguments_of, fill, resume_words
from hpc_parallel.failure import failure
from hpc_parallel.failure.supervisor import watching
from hpc_parallel.launch.batch_script import render, sbatch_flags
from hpc_parallel.launch.checked_run import checked_run
from hpc_parallel.machine.world import World
from hpc_parallel.problems import ConfigError
from hpc_parallel.record import attempts
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.script import script_failure, script_metrics, script_rank

LOCAL = "launcher=local"
METRICS = r"step (?P<step>\d+).* loss (?P<loss>[\d.]+)"
VALUES = {"{run}": "/runs/1", "{rank}": "3", "{seed}": "7"}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import os; os.environ['RANK']\n")
    return tmp_path


def composed(*words: str) -> Any:
    line = CommandLine.parse(words)
    return resolve(compose_run(line.overrides, **line.places).config)[0]


def problems(*words: str) -> list[str]:
    try:
        line = CommandLine.parse(words)
        checked_run(line)
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


@pytest.mark.parametrize(
    "word",
    ["--lr", "3e-4", "a,b", "a b", "${x}", r"\${x}", "$(x)", "it's", '"', "", "{a: b}", "[1]", "new\nline",
     "\\", "\\\\", "é", "--"],
)  # fmt: skip
def test_words_after_the_dashes_arrive_as_they_were_typed(word: str) -> None:
    config = composed(LOCAL, "--", "train.py", word, "last")
    assert config.script.words == [word, "last"]
    assert (config.script.file, config.task.name, config.name) == ("train.py", "script", "train")


@pytest.mark.parametrize(
    ("words", "key", "value", "name"),
    [
        (("-m", "package.module", "x"), "module", "package.module", "module"),
        (("./solver", "x"), "command", "./solver", "solver"),
        (("bin/my solver.sh", "x"), "command", "bin/my solver.sh", "my-solver"),
    ],
)
def test_a_module_or_a_program(words: tuple[str, ...], key: str, value: str, name: str) -> None:
    config = composed(LOCAL, "--", *words)
    assert getattr(config.script, key) == value
    assert (config.script.words, config.name) == (["x"], name)


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("--key value", ["--lr", "3e-4", "--fast", "--layers", "1", "2", "--model.dim", "8"]),
        ("-key value", ["-lr", "3e-4", "-fast", "-layers", "1", "2", "-model.dim", "8"]),
        ("--key=value", ["--lr=3e-4", "--fast=True", "--slow=False", "--none=None", "--layers=[1, 2]",
                         "--model.dim=8"]),
        ("key=value", ["lr=3e-4", "fast=true", "slow=false", "none=null", "layers=[1,2]", "model.dim=8"]),
    ],
)  # fmt: skip
def test_arguments_are_written_in_the_style_of_the_script(style: str, expected: list[str]) -> None:
    words = ("lr=3e-4", "fast=true", "slow=false", "none=null", "layers=[1,2]", "model.dim=8")
    script = vars(
        composed(
            LOCAL, f"script.style={style}", *(f"script.arguments.{w}" for w in words), "--", "t.py"
        ).script
    )
    assert arguments_of(script, values=VALUES) == expected


def test_placeholders_are_filled_and_other_braces_stay() -> None:
    words = ("--", "t.py", "{seed}", "{x}", "{{rank}}", "{{x}}")
    script = vars(composed(LOCAL, "script.arguments.out={run}/{rank}", *words).script)
    assert arguments_of(script, values=VALUES) == ["7", "{x}", "{rank}", "{{x}}", "--out", "/runs/1/3"]
    assert fill("{run}", {**VALUES, "{run}": "/runs/{seed}"}) == "/runs/{seed}"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--", "trai.py"), "script.file = trai.py does not exist in"),
        (("--", "trai.py"), "Try script.file=train.py."),
        (("--", "bad.py"), "script.file = bad.py can't be compiled: line 1: "),
        (("--", "./plain"), "script.command = ./plain is not executable. Try chmod +x ./plain."),
        (("--", "./missing"), "script.command = ./missing does not exist."),
        (("--", "plain"), "a program of this folder is ./plain"),
        (("--", "no-such-program"), "is not on the PATH"),
        (("--", "torchrun", "--nnodes", "2", "own/net.py"), "as in -- own/net.py, or try script.start=node"),
        (("--", "python", "-u", "-m", "torch.distributed.run", "train.py"), "run starts processes"),
        (("--", "-m", "torch.distributed.launch", "train.py"), "or try script.start=node"),
        (("script.start=nodes", "--", "train.py"), "Try script.start=node."),
        (("script.torchrun=[--max-restarts=1]", "--", "train.py"), "is not read. Try script.start=torchrun."),
        (("script.start=torchrun", "script.torchrun=[--max-restarts=1]", "script.requeue_codes=[75]", "--",
          "train.py"), "both start the ranks again"),
        (("--", "-m", "nope.x"), "nope.x can't be found: there is no nope in the import path."),
        (("--", "-m", "json.nope"), "script.module = json.nope can't be found: there is no nope in json."),
        (("--", "-m", "logging"), "is a package without a __main__.py"),
        (("--", "-m", "train.py"), "there is no py in train; a file needs no -m."),
        (("--",), "a script comes after it. Try -- train.py."),
        (("task=infer", "--", "train.py"), "task=infer can't be with a script after --"),
        (("task=script",), "task=script names no script."),
        (("script.file=train.py",), "Try task=script."),
        (("task=script", "script.file=train.py", "script.module=json"), "file and script.module are set"),
        (("strategy=fsdp", "training.steps=3", "model=tiny", "--", "train.py"),
         "strategy, training.steps, model are for the training of hpc_parallel"),
        (("fabric.require=true", "--", "train.py"), "fabric.require: a script can't use this yet."),
        (("script.working_directory=nowhere", "--", "train.py"), "nowhere is not a folder"),
        (("script.style=--k", "--", "train.py"), "is not one of --key value, --key=value, -key value"),
        (("script.requeue_codes=[0,75,200]", "--", "train.py"), "[0,200] must be exit codes from 1 to 125"),
        (("launcher=script", "cluster.start=mpirun", "script.start=torchrun", "--", "train.py"),
         "Try script.start=ranks or script.start=node."),
        (("script.metrics=(", "--", "train.py"), "is not a regular expression"),
        (("script.metrics=loss (?P<loss>.*)", "--", "train.py"), "has no group (?P<step>"),
        (("script.resume_arguments='", "--", "train.py"), "script.resume_arguments"),
        (("script.fil=train.py",), "there is no key script.fil. Try script.file"),
    ],
)  # fmt: skip
def test_what_can_not_start_is_refused_in_a_sentence(
    here: Path, words: tuple[str, ...], sentence: str
) -> None:
    (here / "bad.py").write_text("def f(:\n")
    (here / "plain").write_text("")
    found = problems(*([] if words[0].startswith("launcher=") else [LOCAL]), *words)
    assert any(sentence in problem for problem in found), found


def test_a_package_that_pip_installed_as_editable_is_found(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """setuptools maps its name to a folder by a finder, not by the import path."""
    (here / "source").mkdir()
    (here / "source" / "start.py").write_text("print(1)\n")

    class Finder:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
            place = here / "source"
            if name != "edited":
                return None
            return spec_from_file_location(
                name, place / "__init__.py", submodule_search_locations=[str(place)]
            )

    assert problems(LOCAL, "--", "-m", "edited.start")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
    assert problems(LOCAL, "--", "-m", "edited.start") == []
    assert "edited.sta can't be found" in problems(LOCAL, "--", "-m", "edited.sta")[0]


def test_every_problem_is_told_at_once() -> None:
    assert len(problems(LOCAL, "nodes=0", "model=tiny", "--", "trai.py")) == 3


def test_a_script_that_is_no_part_of_a_group_is_warned_of(here: Path) -> None:
    (here / "alone.py").write_text("print(1)\n")
    (here / "parts.py").write_text("import os\nRANK = os.environ['RANK']\n")
    (here / "whole.py").write_text("import parts\n")
    for name, nodes, expected in (("alone", 2, 1), ("alone", 1, 0), ("whole", 2, 0), ("train", 2, 0)):
        assert len(list(script_warnings(composed(LOCAL, f"nodes={nodes}", "--", f"{name}.py")))) == expected


@pytest.mark.parametrize(
    ("line", "suggestion"),
    [
        ("python train.py --lr 1", "-- train.py."),
        ("/usr/bin/python3.12 -u -m train --lr 1", "-- -m train."),
        ("python3 -c 1 train.py", None),
        ("bash -x run.sh --lr 1", "-- ./run.sh."),
        ("bash run --lr 1.sh", "-- ./run."),
        ("bash train.py", "-- train.py."),
        ("bash -o pipefail run", None),
        ("/bin/sh jobs/run.sh", "-- jobs/run.sh."),
        ("bash -lc run.sh", None),
        ("pythons train.py", None),
        ("train.py tool.py", None),
    ],
)
def test_an_interpreter_that_is_typed_before_the_script_is_warned_of(
    line: str, suggestion: str | None
) -> None:
    found = [text.rpartition("Try ")[2] for text in script_warnings(composed(LOCAL, "--", *line.split()))]
    assert found == ([] if suggestion is None else [suggestion])


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        ("#SBATCH --nodes=2\npython train.py\n", (), ["#SBATCH"]),
        ("torchrun --standalone train.py\n", (), ["runs torchrun"]),
        ("#SBATCH -N 2\n  srun python train.py\n", (), ["#SBATCH", "runs srun"]),
        ("exec python3 -m torch.distributed.run train.py\n", ("nodes=1",), []),
        ("exec python3 -m torch.distributed.run train.py\n", (), ["runs python3 -m torch.dist"]),
        ("torchrun --nnodes=2 train.py\n", ("script.start=node",), []),
        ("OMP_NUM_THREADS=1 time torchrun train.py\n", (), ["runs torchrun"]),
        ("# not torchrun\npython train.py\n", (), []),
    ],
)
def test_a_batch_script_is_warned_of(
    text: str, words: tuple[str, ...], expected: list[str], here: Path
) -> None:
    (here / "job.sh").write_text(text)
    found = list(script_warnings(composed(LOCAL, "nodes=2", *words, "--", "./job.sh")))
    assert len(found) == len(expected)
    assert all(word in warning for word, warning in zip(expected, found, strict=True))
    assert list(script_warnings(composed(LOCAL, "nodes=2", *words, "--", "train.py", "job.sh"))) == []


@pytest.mark.parametrize("nodes", [1, 3])
def test_any_number_of_devices_is_legal_whatever_a_training_would_need(nodes: int) -> None:
    config = composed(LOCAL, f"nodes={nodes}", "gpus_per_node=5", "--", "train.py")
    assert find_problems(config) == []


def slurm_world(rank: int, **more: str) -> tuple[World, dict[str, str]]:
    """Rank `rank` of four on two hosts, with Slurm's variables."""
    environment = {
        "SLURM_JOB_ID": "41234", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank // 2), "SLURM_LOCALID": str(rank % 2),
        "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NUM_NODES": "2",
        **more,
    }  # fmt: skip
    return World.discover(environment), environment


def test_the_variables_are_those_of_torchrun(here: Path) -> None:
    world, environment = slurm_world(3)
    cluster: dict[str, object] = {"port": None, "master_suffix": "-ib", "start": "srun"}
    script = {"start": "ranks"}
    config = {"cluster": cluster, "nodes": 2, "launcher": {"kind": "slurm"}, "script": script}
    folder = RunFolder(here)
    found = script_rank.torchrun_variables(folder, config, world=world, environment=environment)
    assert found.items() >= {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "n1-ib", "MASTER_PORT": "21234",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }.items()  # fmt: skip
    attempts.end(folder, how="killed")
    for start, count in (("ranks", "1"), ("torchrun", "2")):
        script["start"] = start
        variables = {**environment, "TORCHELASTIC_RESTART_COUNT": "2"}
        found = script_rank.torchrun_variables(folder, config, world=world, environment=variables)
        assert found["TORCHELASTIC_RESTART_COUNT"] == count
    moved = script_rank.rendezvous(config, world=world, environment=environment, start=4)
    assert moved == ("n1-ib", "21230")  # 20000 + (41234 + 4 * 4999) % 20000
    other = {**environment, "SLURM_STEP_ID": "3"}  # another run of the same packed job
    beside = script_rank.rendezvous(config, world=world, environment=other, start=4)
    assert beside == ("n1-ib", "23369")  # 3 * 713 further
    cluster["port"] = 29500
    assert script_rank.rendezvous(config, world=world, environment=environment, start=1) == ("n1-ib", "29500")
    by_torchrun = {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "41234.0", "MASTER_PORT": "7",
        "SLURM_JOB_NODELIST": "n[1-2]",
    }  # fmt: skip
    world = World.discover(by_torchrun)
    for address, expected in (("n2.site.org", "n2-ib"), ("10.0.0.1", "10.0.0.1"), ("n2-ib", "n2-ib")):
        environment = {**by_torchrun, "MASTER_ADDR": address}
        place = script_rank.rendezvous(config, world=world, environment=environment, start=1)
        assert place == (expected, "7")


@pytest.mark.parametrize(("start", "tasks", "cpus", "threads"), [("ranks", 2, 3, 3), ("node", 1, 6, 3)])
def test_a_process_for_each_node_has_all_its_cores_and_the_threads_of_its_own_ranks(
    start: str, tasks: int, cpus: int, threads: int, here: Path
) -> None:
    shape = ("nodes=2", "gpus_per_node=2", "launcher.cpus_per_device=3")
    words = "{rank} {nodes} {devices} {processes}"
    line = ("launcher=script", f"script.start={start}", *shape, "--", "train.py", words)
    run = checked_run(CommandLine.parse(line))
    flags = sbatch_flags(run)
    assert (flags["ntasks-per-node"], flags["cpus-per-task"]) == (tasks, cpus)
    world, environment = slurm_world(
        1, SLURM_CPUS_PER_TASK=str(cpus), SLURM_PROCID="1", SLURM_NODEID=str(1 // tasks),
        SLURM_LOCALID=str(1 % tasks), SLURM_STEP_NUM_TASKS=str(2 * tasks),
        SLURM_STEP_TASKS_PER_NODE=f"{tasks}(x2)",
    )  # fmt: skip
    values = run.values | {"device": "cpu"}
    script_rank.set_variables(run.folder, values, world=world, environment=environment)
    assert environment["OMP_NUM_THREADS"] == str(threads)
    words, *_ = script_rank.command_of(run.folder, values, rank=1, variables=environment)
    assert words[-1] == "1 2 2 4"


@pytest.mark.parametrize("start", ["train.py", "-m train", "./tool"])
def test_a_run_in_place_imports_from_the_working_directory_only_for_a_module(here: Path, start: str) -> None:
    """Else a `statistics.py` there would end the processes that start the script."""
    (here / "tool").touch(mode=0o755)
    words = ("launcher=script", "launcher.snapshot=false", "--", *start.split())
    run = checked_run(CommandLine.parse(words))
    is_safe = start != "-m train"
    assert ("PYTHONSAFEPATH" in run.variables) == is_safe
    assert ("export PYTHONSAFEPATH=1" in render(run).splitlines()) == is_safe
    root = str(Path(script_rank.__file__).parents[2])
    assert (run.variables.get("PYTHONPATH", "").split(os.pathsep)[0] == root) == is_safe


def test_torchrun_gets_the_words_of_the_user() -> None:
    shape = ("launcher=script", "script.start=torchrun", "nodes=2", "gpus_per_node=2")
    words = ("script.torchrun=[--max-restarts=2,--tee,3]", "--", "train.py")
    run = checked_run(CommandLine.parse([*shape, *words]))
    (line,) = [line for line in render(run).splitlines() if "--module" in line]
    assert line.split("--max-restarts=2 --tee 3 --module hpc_parallel.job rank")[1:]
    assert run.processes == 4


@pytest.mark.parametrize(
    ("visible", "node", "expected"),
    [
        ("0,1,2,3", 0, "0,1"),
        ("4,5,6,7", 1, "6,7"),
        ("0,1", 1, None),
        ("", 0, None),
        ("GPU-a,GPU-b", 0, "GPU-a,GPU-b"),
    ],
)
def test_simulated_nodes_share_the_visible_gpus(visible: str, node: int, expected: str | None) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": visible}
    assert script_rank.visible_devices(environment, node=node, per_node=2) == expected


@pytest.mark.parametrize(
    ("log", "kind", "message"),
    [
        ("Traceback (most recent call last):\n  File \"{file}\", line 7, in f\n    x\nValueError: bad\n",
         "error", "ValueError: bad (train.py:7)"),
        ("[rank1]: Traceback (most recent call last):\n[rank1]:   File \"{file}\", line 7, in f\n"
         "[rank1]: RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:3\n",
         "lost_peer", "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:3 (train.py:7)"),
        ("Traceback (most recent call last):\n  File \"{file}\", line 7, in f\n"
         "torch.OutOfMemoryError: CUDA out of memory. Tried\n",
         "out_of_memory", "OutOfMemoryError: CUDA out of memory. Tried (train.py:7)"),
        ("  File \"{file}\", line 2\n    x y\n      ^\nSyntaxError: invalid syntax\n",
         "error", "SyntaxError: invalid syntax (train.py:2)"),
        ("usage: train.py\ntrain.py: error: no\n\n", "error",
         "the script ended with exit code 1: train.py: error: no"),
        ("", "error", "the script ended with exit code 1"),
        ("Traceback (most recent call last):\n  File \"{file}\", line 9, in <module>\n"
         "ValueError: Caught ValueError in DataLoader worker process 0.\n"
         "Original Traceback (most recent call last):\n  File \"{file}\", line 4, in __getitem__\n"
         "ValueError: sample 5 is broken\n\n", "error", "ValueError: sample 5 is broken (train.py:4)"),
        ("Traceback (most recent call last):\ntorch.distributed.elastic.errors.ChildFailedError: \n"
         "Failures:\n[1]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : -15 (pid: 2)  (SIGTERM)\n"
         "Root Cause (first observed failure):\n[0]:\n  rank      : 1 (local_rank: 1)\n"
         "  exitcode  : 3 (pid: 4) \n  error_file: <N/A>\n", "error",
         "ChildFailedError: rank : 1 (local_rank: 1), exitcode : 3 (pid: 4)"),
        ("Traceback (most recent call last):\n  File \"{file}\", line 7, in <module>\nValueError: the cause\n"
         "Exception ignored in: <function A.__del__ at 0x7>\nTraceback (most recent call last):\n"
         "  File \"{file}\", line 4, in __del__\nRuntimeError: at the exit\n",
         "error", "ValueError: the cause (train.py:7)"),
        ("Traceback (most recent call last):\n  File \"{file}\", line 9, in <module>\n"
         "RuntimeError: Error(s) in loading state_dict for Net:\n\tMissing key(s): \"a\". \n[W1] exit\n",
         "error", 'RuntimeError: Error(s) in loading state_dict for Net: Missing key(s): "a". (train.py:9)'),
        ("Traceback (most recent call last):\n  File \"{file}\", line 7, in <module>\nValueError: handled\n"
         "no data: give --data\n[rank0]:[W1130 00:52:25.1 x.cpp:7] Warning: destroy\n",
         "error", "ValueError: handled (train.py:7); the log ends with: no data: give --data"),
        ("Traceback (most recent call last):\n  File \"{file}\", line 3, in f\nValueError: a\n\nDuring\n\n"
         "  + Exception Group Traceback (most recent call last):\n  |   File \"{file}\", line 7, in f\n"
         "  | ExceptionGroup: two went (2 sub-exceptions)\n  +-+---------------- 1 ----------------\n"
         "    | Traceback (most recent call last):\n    |   File \"{file}\", line 3, in f\n"
         "    | ValueError: a\n    +---------------- 2 ----------------\n    | TypeError: b\n"
         "    +------------------------------------\n",
         "error", "ExceptionGroup: two went (2 sub-exceptions) (train.py:7)"),
    ],
)  # fmt: skip
def test_the_cause_is_read_from_the_log(here: Path, log: str, kind: str, message: str) -> None:
    folder = RunFolder(here / "run")
    folder.create()
    world, _ = slurm_world(1)
    before = "Traceback (most recent call last):\nKeyError: 'of an earlier start'\n"
    text = before + log.replace("{file}", str(here / "train.py"))
    folder.log(1, "err").write_text(text)
    script_failure.record(folder, world=world, returncode=1, log_start=len(before))
    (found,) = failure.records(folder)
    assert (found.kind, found.message, found.host) == (kind, message, "n1")


@pytest.mark.parametrize(
    ("log", "code", "end"),
    [
        ("Traceback (most recent call last):\nRuntimeError: DataLoader worker (pid 7) is killed by signal: "
         "Killed. \n", 1, "signal: Killed.; out of memory in cgroup /job_7"),
        ("run.sh: line 3: 77 Killed  python train.py\n", 137, "train.py; out of memory in cgroup /job_7"),
        ("Traceback (most recent call last):\nValueError: bad\n", 1, "ValueError: bad"),  # of another rank
    ],
)  # fmt: skip
def test_a_process_of_the_script_that_ran_out_of_memory_is_told(
    here: Path, log: str, code: int, end: str
) -> None:
    folder = RunFolder(here / "run")
    folder.create()
    world, _ = slurm_world(1)
    folder.log(1, "err").write_text(log)
    script_failure.record(folder, world=world, returncode=code, log_start=0, cgroup="/job_7")
    assert failure.records(folder)[0].message.endswith(end)


def test_a_line_of_a_package_that_is_installed_elsewhere_is_not_the_users(here: Path) -> None:
    files = [here / "train.py", here / "lib" / "python3.9" / "site-packages" / "package" / "save.py"]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert script_failure.users_line([f'  File "{file}", line 4, in save' for file in files]) == "train.py:4"


def test_an_exit_code_of_the_scripts_own_is_not_blamed_on_a_traceback_that_it_has_handled(here: Path) -> None:
    folder = RunFolder(here / "run")
    folder.create()
    world, _ = slurm_world(0)
    folder.log(0, "err").write_text("Traceback (most recent call last):\nKeyError: 1\ndone\n")
    script_failure.record(folder, world=world, returncode=75, log_start=0)
    assert failure.records(folder)[0].message == "the script ended with exit code 75: done"


RAISED = 'Traceback (most recent call last):\n  File "x.py", line 7, in f\nValueError: bad\n'


@pytest.mark.parametrize(
    ("log", "aborted"),
    [
        (RAISED, True),
        (f"{RAISED}terminate called without an active exception\n", True),
        (
            f"{RAISED}Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n",
            True,
        ),
        (f"{RAISED}trying again\n", False),  # the script has handled it
        ("terminate called without an active exception\n", False),
        ("", False),
    ],
)
def test_an_abort_at_the_exit_does_not_hide_the_exception(here: Path, log: str, aborted: bool) -> None:
    folder = RunFolder(here / "run")
    folder.create()
    folder.log(1, "err").write_text(log)
    assert script_failure.was_aborted_at_exit(folder, rank=1, log_start=0) is aborted
    if aborted:
        world, _ = slurm_world(1)
        script_failure.record(folder, world=world, returncode=-signal.SIGABRT, log_start=0)
        (record,) = failure.records(folder)
        assert record.message.startswith("ValueError: bad")
        assert record.message.endswith(", then SIGABRT at its exit")


def test_without_a_command_the_words_after_the_dashes_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["--", "missing.py"]) == 2
    assert "script.file = missing.py does not exist" in capsys.readouterr().err


def test_a_dry_run_shows_the_words_and_the_variables(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    from hpc_parallel.commands.run_command import main

    assert main(["launcher=script", "nodes=2", "dry_run=true", "--", "train.py", "--lr", "1"]) == 0
    shown = capsys.readouterr()
    assert "#SBATCH --nodes=2" in shown.out
    assert "hpc_parallel.job rank" in shown.out
    assert f"/code/{here.name}/train.py --lr 1\n" in shown.err
    for line in ("LOCAL_WORLD_SIZE=1", "WORLD_SIZE=2", "MASTER_ADDR=<the first host>"):
        assert f"  {line}\n" in shown.err
    assert not (here / "runs").exists()
    assert "RANK" not in os.environ


def test_the_words_of_a_restart_need_the_files_that_they_name(here: Path) -> None:
    words = ("script.resume_arguments=--resume {run}/last.pt --quiet", "--", "train.py")
    script = vars(composed(LOCAL, *words).script)
    values = {**VALUES, "{run}": str(here)}
    assert resume_words(script, values=values, folder=here) == ([], here / "last.pt")
    (here / "last.pt").touch()
    assert resume_words(script, values=values, folder=here) == (
        ["--resume", f"{here}/last.pt", "--quiet"],
        None,
    )


class Child:
    """A process that only counts its signals."""

    pid, returncode = 2**31 - 1, None  # no process has this number

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.received: list[int] = []
        monkeypatch.setattr(os, "kill", lambda process, number: self.send_signal(number))

    def send_signal(self, number: int) -> None:
        self.received.append(number)


@pytest.mark.parametrize(
    ("stop_signal", "reaches_all", "number", "received"),
    [
        ("none", True, signal.SIGUSR2, []), ("none", True, signal.SIGTERM, []),
        ("none", False, signal.SIGTERM, [signal.SIGTERM]), ("none", False, signal.SIGUSR2, []),
        ("SIGUSR1", True, signal.SIGUSR2, [signal.SIGUSR1]),
        ("SIGUSR1", True, signal.SIGTERM, [signal.SIGUSR1]),
        ("SIGTERM", True, signal.SIGTERM, []),  # Slurm has sent it to the script too
        ("SIGTERM", False, signal.SIGTERM, [signal.SIGTERM]),
        ("SIGUSR2", True, signal.SIGUSR2, []),
    ],
)  # fmt: skip
def test_each_signal_reaches_the_script_once(
    stop_signal: str, reaches_all: bool, number: int, received: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = script_rank.Relay(stop_signal, in_job=True, reaches_all=reaches_all, stop_prefix="stop")
    child = Child(monkeypatch)
    relay.connect(child)  # type: ignore[arg-type]
    relay(number, None)
    assert child.received == received


@pytest.mark.parametrize(
    ("stop_signal", "reaches_all", "first", "received"),
    [
        ("SIGUSR1", True, signal.SIGTERM, [signal.SIGUSR1]),
        ("SIGUSR1", False, signal.SIGTERM, [signal.SIGUSR1]),
        ("SIGUSR1", True, signal.SIGUSR2, [signal.SIGUSR1]),
        ("SIGUSR2", True, signal.SIGUSR2, []),  # Slurm has sent it to the script too
        ("SIGUSR2", False, signal.SIGUSR2, [signal.SIGUSR2]),
    ],
)
def test_a_script_that_saves_is_not_asked_again(
    stop_signal: str, reaches_all: bool, first: signal.Signals, received: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Slurm sends SIGTERM again at the end of a preemption's grace time, and at the limit after SIGUSR2."""
    relay = script_rank.Relay(stop_signal, in_job=True, reaches_all=reaches_all, stop_prefix="stop")
    child = Child(monkeypatch)
    relay.connect(child)  # type: ignore[arg-type]
    for number in (first, signal.SIGTERM):
        relay(number, None)
    assert child.received == received
    assert relay.stopped_by == first.name


@pytest.mark.parametrize(
    ("stop_signal", "number", "received"),
    [
        ("none", signal.SIGUSR2, []), ("none", signal.SIGTERM, [signal.SIGTERM]),
        ("SIGUSR1", signal.SIGUSR2, [signal.SIGUSR1]), ("SIGTERM", signal.SIGTERM, [signal.SIGTERM]),
        ("SIGUSR2", signal.SIGUSR2, [signal.SIGUSR2]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("reaches_all", [False, True])
def test_a_signal_that_came_before_the_script_reaches_it(
    stop_signal: str, number: int, received: list[int], reaches_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = script_rank.Relay(stop_signal, in_job=True, reaches_all=reaches_all, stop_prefix="stop")
    relay(number, None)
    child = Child(monkeypatch)
    relay.connect(child)  # type: ignore[arg-type]
    assert child.received == received
    relay(signal.SIGUSR1, None)
    assert len(child.received) == len(received) + (not reaches_all)


@pytest.mark.parametrize(
    ("number", "returncode", "stops"),
    [
        (None, 75, True), (None, 0, False), (None, 1, False), (signal.SIGUSR2, 0, True),
        (signal.SIGUSR2, 1, False), (signal.SIGUSR2, -signal.SIGUSR1, True), (signal.SIGUSR2, 143, True),
        (signal.SIGTERM, -signal.SIGTERM, True), (signal.SIGTERM, -signal.SIGKILL, False),
    ],
)  # fmt: skip
def test_an_end_is_a_stop_only_if_it_was_asked_for(
    number: int | None, returncode: int, stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = script_rank.Relay("SIGUSR1", in_job=True, reaches_all=True, stop_prefix="stop")
    relay.connect(Child(monkeypatch))  # type: ignore[arg-type]
    if number is not None:
        relay(number, None)
    assert (relay.stop_of(returncode, requeue_codes=[75]) is not None) == stops


@pytest.mark.parametrize(
    ("shell", "printed"),
    [
        ("{python} saves.py; echo shell goes on", "saved\nshell goes on\n"),
        ("trap 'echo trap' USR1; {python} saves.py & wait; kill $!", "trap\n"),
    ],
)
def test_a_stop_signal_is_for_the_program_of_a_shell_script(here: Path, shell: str, printed: str) -> None:
    """A shell without a trap would end by it, and the program would be ended while it saves."""
    (here / "saves.py").write_text("""
import pathlib, signal, sys, time
def save(number, frame):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGUSR1, save)
pathlib.Path("ready").touch()
time.sleep(60)
""")
    (here / "train.sh").write_text(f"#!/bin/bash\n{shell.format(python=sys.executable)}\n")
    (here / "train.sh").chmod(0o755)
    relay = script_rank.Relay("SIGUSR1", in_job=True, reaches_all=True, stop_prefix=str(here / "stop"))
    with subprocess.Popen(["./train.sh"], stdout=subprocess.PIPE, text=True) as script:
        while not (here / "ready").exists():
            time.sleep(0.05)
        relay.connect(script)  # type: ignore[arg-type]
        relay(signal.SIGUSR2, None)
        assert script.communicate()[0] == printed


@pytest.mark.parametrize(("patience_s", "ends"), [(600.0, ("saved\n", 0)), (0.2, ("", -signal.SIGUSR1))])
def test_the_warning_before_a_time_limit_waits_for_the_handler_of_a_script(
    here: Path, patience_s: float, ends: tuple[str, int]
) -> None:
    """But not for ever: a script may want to end by the signal."""
    program = """
import pathlib, signal, sys, time
print_saved = lambda *_: sys.exit(print("saved", flush=True))
while not pathlib.Path("warned").exists():
    time.sleep(0.01)
signal.signal(signal.SIGUSR1, print_saved)
time.sleep(60)
"""
    relay = script_rank.Relay(
        "SIGUSR1", in_job=True, reaches_all=True, stop_prefix=str(here / "stop"), patience_s=patience_s
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as script:
        relay.connect(script)
        relay(signal.SIGUSR2, None)
        if patience_s > 1:
            relay.ask()
            (here / "warned").touch()
        while script.poll() is None:
            time.sleep(0.05)
            relay.ask()
        assert (script.communicate()[0], script.returncode) == ends
    stop = relay.stop_of(script.returncode, requeue_codes=[])
    assert stop is not None
    assert stop.signal == "SIGUSR2"


def test_a_signal_during_a_check_does_not_ask_the_script_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of the checks looks for the script's processes while the handler runs."""
    relay = script_rank.Relay("SIGUSR1", in_job=True, reaches_all=True, stop_prefix="stop")
    child = Child(monkeypatch)
    relay.connect(child)  # type: ignore[arg-type]
    find = script_rank.receivers

    def interrupted(process: int, number: int) -> list[int]:
        monkeypatch.setattr(script_rank, "receivers", find)
        relay(signal.SIGTERM, None)
        return find(process, number)

    monkeypatch.setattr(script_rank, "receivers", interrupted)
    relay(signal.SIGUSR2, None)
    assert child.received == [signal.SIGUSR1]


def test_a_script_that_slurm_has_signalled_before_its_parent_was_asked_to_stop() -> None:
    relay = script_rank.Relay("SIGUSR2", in_job=True, reaches_all=True, stop_prefix="stop")
    stop = relay.stop_of(-signal.SIGUSR2, requeue_codes=[])
    assert stop is not None
    assert (stop.signal, stop.code) == ("SIGUSR2", -signal.SIGUSR2)


@pytest.mark.parametrize(
    ("line", "figures"),
    [
        ("step 3 of 9 loss 1.5", {"step": 3, "loss": 1.5}),
        ("step 4 of 9 loss nan", {"step": 4, "loss": None}),
        ("step 5 of 9 loss 8.1e-05, lr 1e-3", {"step": 5, "loss": 0.000081}),
        ("step 5 of 9 loss 1.5.2", None), ("loss 2", None), ("", None),
    ],
)  # fmt: skip
def test_figures_are_read_from_a_line(line: str, figures: dict[str, float] | None) -> None:
    found = script_metrics.figures_of(line, re.compile(r"step (?P<step>\d+).* loss (?P<loss>[\d.]+|nan)"))
    assert (found and {key: found[key] for key in found if key != "time"}) == figures


def test_the_figures_of_a_progress_bar_are_read_while_it_runs(here: Path) -> None:
    path = here / "out"
    path.touch()
    log = script_metrics._Log(path, lambda line: script_metrics.figures_of(line, re.compile(METRICS)))
    path.write_text("\rstep 1 loss 4\rstep 2 lo")
    assert [line["step"] for line in log.read(is_last=False)] == [1]
    path.write_text("\rstep 1 loss 4\rstep 2 loss 3\n")
    assert [(line["step"], line["loss"]) for line in log.read(is_last=False)] == [(2, 3)]


def test_every_line_is_read_once_also_the_last_without_an_end(here: Path) -> None:
    folder = RunFolder(here / "run")
    folder.create()
    earlier = "step 1 loss 9\n"
    folder.log(0, "out").write_text(earlier)
    folder.metrics.write_text('{"step": 1, "loss": 9}\n{"step": 2, "loss": 8}\n')  # of the earlier start
    reading = watching([script_metrics.MetricsWriter(folder, pattern=METRICS)])
    with reading, folder.log(0, "out").open("a") as log:  # the log is closed first
        log.write("x" * 3 * 2**20 + "\nstep 2 loss 4\nste")
        log.flush()
        time.sleep(1.5)
        log.write("p 3 loss 2")
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 9), (2, 4), (3, 2)]
