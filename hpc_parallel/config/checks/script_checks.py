"""Check the user's script: before the job queues, refuse what would fail on every device."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import warnings
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from hpc_parallel.config.checks.suggestions import paths_near
from hpc_parallel.config.job_python import environment_key, is_chosen
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.script import KINDS, NODE, RANKS, TASK, TORCHRUN, absolute, beginning, may_mention
from hpc_parallel.config.task_schema import ScriptConfig
from hpc_parallel.layout.layout import processes_per_node
from hpc_parallel.problems import Problem, Problems, shell_word

# Keys of our own training, which a script does not read.
UNREAD = ("strategy", "model", "data", "optimizer", "training", "weights")
NOT_YET = ("profile", "preflight", "fabric")
LAUNCHERS = (
    "torchrun", "srun", "mpirun", "mpiexec", "accelerate", "deepspeed", "-m torch.distributed.run",
    "-m torch.distributed.launch", "-m accelerate.commands.launch", "-m deepspeed.launcher.runner",
)  # fmt: skip
_INTERPRETER = re.compile(r"python[\d.]*|(ba|da|k|z)?sh")
_GIVEN = re.compile(r"-\w*c|-m|.+\.(py|sh)")  # how an interpreter is told what to run
# A line of a shell script that starts processes, and the options of a batch script.
_STARTS = re.compile(
    r"^[ \t]*(?:(?:exec|time|\w+=\S*)[ \t]+)*(srun|torchrun|mpirun|mpiexec|accelerate launch|deepspeed"
    r"|\S*python[\d.]* -m torch\.distributed\.(?:run|launch))\b", re.MULTILINE,
)  # fmt: skip
_SHELL = re.compile(r"\.(sh|sbatch|slurm)$")
_SBATCH = re.compile("^#SBATCH ", re.MULTILINE)
# Words in a program that knows that it is one of several processes.
_DISTRIBUTED = re.compile(
    rb"RANK|WORLD_SIZE|SLURM_|init_process_group|torch\.distributed|torchrun|accelerate|lightning|deepspeed"
    rb"|transformers|mpi4py|horovod|jax|tensorflow|composer|colossalai|\bray\b|hydra|job_context"
)


def find_problems(config: RunConfig, overrides: Sequence[str] = ()) -> Problems:
    """overrides: those of the command line; a key that no script reads is a problem."""
    script = config.script
    if config.task.name != TASK:
        if changed := [key for key, value in vars(script).items() if value != getattr(ScriptConfig(), key)]:
            yield f"script.{changed[0]} needs task=script, and this is {config.task.name}. Try task=script."
        return
    named = [f"script.{kind}" for kind in KINDS if getattr(script, kind)]
    if len(named) != 1:
        what = f"{' and '.join(named)} are set, but one run starts one" if named else "task=script names no"
        yield f"{what} script. Try -- train.py at the end of the line, or script.file=train.py."
        return
    yield from _unread(overrides)
    started = f"-m {script.module}" if script.module else Path(script.command or "").name
    if script.start != NODE and (launcher := {started, _run_by_interpreter(script)} & set(LAUNCHERS)):
        own = next((word for word in script.words if word.endswith(".py")), "train.py")
        yield (
            f"{launcher.pop()} starts processes itself, and hpc_parallel does that already: name the script "
            f"alone, as in -- {shell_word(own)}, or try script.start=node, which starts it once a node."
        )
    elif script.file:
        yield from _file(config, script.file)
    elif script.module:
        yield from _module(config, script.module)
    elif script.command:
        yield from _command(config, script.command)
    folder = script.working_directory
    if folder is not None and "{run}" not in folder and not os.path.isdir(absolute(folder)):
        yield Problem("script.working_directory", folder, "is not a folder", (None, "{run}"))
    yield from _start(config)
    if wrong := [code for code in script.requeue_codes if not 0 < code < 126]:
        yield Problem("script.requeue_codes", wrong, "must be exit codes from 1 to 125", ([75],))
    yield from _metrics(script.metrics)
    try:
        shlex.split(script.resume_arguments or "")
    except ValueError as error:
        yield f"script.resume_arguments can't be split into words: {error}."


def script_warnings(config: RunConfig) -> Iterator[str]:
    """Warn about a script that may be intended, but is more often a mistake."""
    script, file = config.script, config.script.file
    if program := _run_by_interpreter(script):
        yield (
            f"{script.command} is a program here: what it runs is not checked, is not kept (later edits "
            f"change the run), and launcher.python does not choose it. Try -- {program}."
        )
    if config.task.name != TASK:
        return
    processes = config.nodes * processes_per_node(config.strategy, gpus_per_node=config.gpus_per_node)
    yield from _shell_warnings(script, processes=processes)
    if file is None:
        return
    if processes > 1 and not may_mention(absolute(file), _DISTRIBUTED):
        yield (
            f"{file} never reads RANK or WORLD_SIZE and calls no init_process_group: each of the "
            f"{processes} processes will do the whole work."
        )


def _shell_warnings(script: ScriptConfig, *, processes: int) -> Iterator[str]:
    """Warn about a batch script, and about a shell script that each process would start with its launcher."""
    file = next(filter(_SHELL.search, [script.command, *script.words[:1]] if script.command else []), "")
    content = beginning(absolute(file)).decode(errors="replace")
    if _SBATCH.search(content):
        yield (
            f"The #SBATCH lines of {file} are not read: give nodes=, gpus_per_node= and keys of launcher. "
            "before --, and the Python script in place of the batch script."
        )
    if script.start == RANKS and processes > 1 and (launcher := _STARTS.search(content)):
        yield (
            f"{file} runs {launcher[1]}, and each of the {processes} processes will start it. Name "
            "the Python script alone after --, or try script.start=node, which starts it once a node."
        )


def _run_by_interpreter(script: ScriptConfig) -> str:
    """`train.py`, `-m train` or `./run.sh` if an interpreter is to run this; empty for anything else."""
    name = Path(script.command or "").name
    words = iter(script.words if _INTERPRETER.fullmatch(name) else ())
    operand = [word for word in script.words[:1] if name.endswith("sh") and word[:1] not in ("-", "+", "")]
    first = next((word for word in words if word in operand or _GIVEN.fullmatch(word)), "-c")
    is_program = first in operand and not first.endswith(".py")
    if is_program or first.endswith(".sh"):  # without a slash it is looked up on the PATH
        return shell_word(os.path.join(os.path.dirname(first) or ".", os.path.basename(first)))
    return shlex.join([first, *islice(words, first == "-m")]) if not first.endswith("c") else ""


def _unread(overrides: Sequence[str]) -> Problems:
    keys = dict.fromkeys(override.partition("=")[0].lstrip("+~") for override in overrides)
    if unread := [key for key in keys if key.partition(".")[0] in UNREAD]:
        verb, them = ("is", "it") if len(unread) == 1 else ("are", "them")
        yield (
            f"{', '.join(unread)} {verb} for the training of hpc_parallel; your script does not read {them}. "
            "Give your script its arguments after --."
        )
    for key in keys:
        if key in NOT_YET or key.partition(".")[0] in NOT_YET:
            yield f"{key}: a script can't use this yet. Try the same line without it."


def _start(config: RunConfig) -> Problems:
    script = config.script
    if script.start == TORCHRUN and config.cluster.start == "mpirun":
        rule = "needs srun, and cluster.start is mpirun"
        yield Problem("script.start", TORCHRUN, rule, (RANKS, NODE))
    if script.torchrun and script.start != TORCHRUN:
        yield f"script.torchrun = {script.torchrun} is not read. Try script.start=torchrun."
    if script.requeue_codes and any(re.match("--max[-_]restarts", word) for word in script.torchrun):
        yield (
            "script.requeue_codes and torchrun's --max-restarts would both start the ranks again: leave one "
            "out."
        )


def _file(config: RunConfig, file: str) -> Problems:
    path = absolute(file)
    if not os.path.isfile(path):
        rule = "is a folder" if os.path.isdir(path) else f"does not exist in {path.parent}"
        yield Problem("script.file", file, rule, _near(file, path))
    elif not os.access(path, os.R_OK):
        yield Problem("script.file", file, "can't be read by you")
    elif not _has_other_python(config):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compile(path.read_bytes(), file, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            line = f"line {error.lineno}: " if isinstance(error, SyntaxError) and error.lineno else ""
            text = error.msg if isinstance(error, SyntaxError) else str(error)
            yield f"script.file = {file} can't be compiled: {line}{text}."


def _module(config: RunConfig, module: str) -> Problems:
    """If the job runs another Python, that Python looks for the module later (launch/import_check.py)."""
    from hpc_parallel.config.find_module import module_problem

    if not _has_other_python(config) and (rule := module_problem(module)):
        is_file = os.path.isfile(module) or module.endswith(".py")
        yield Problem("script.module", module, rule + "; a file needs no -m" * is_file)


def _command(config: RunConfig, command: str) -> Problems:
    if os.sep not in command:
        if environment_key(config) is None and shutil.which(command) is None:
            here = (f"./{command}",) if os.path.isfile(command) else ()
            rule = "is not on the PATH" + (f"; a program of this folder is {here[0]}" if here else "")
            yield Problem("script.command", command, rule, here)
    elif not os.path.isfile(path := absolute(command)):
        rule = "is a folder" if os.path.isdir(path) else "does not exist"
        yield Problem("script.command", command, rule, _near(command, path))
    elif not os.access(path, os.X_OK):
        yield f"script.command = {command} is not executable. Try chmod +x {shell_word(command)}."


def _metrics(pattern: str | None) -> Problems:
    try:
        groups = re.compile(pattern or "(?P<step>)").groupindex
    except re.error as error:
        yield f"script.metrics = {pattern} is not a regular expression: {error}."
        return
    if "step" not in groups:
        yield f"script.metrics = {pattern} has no group (?P<step>\\d+), the number of the step."


def _near(text: str, path: Path) -> tuple[str, ...]:
    """Similar names in the folder of `path`, written like `text`."""
    return tuple(os.path.join(os.path.dirname(text), near.name) for near in paths_near(path))


def _has_other_python(config: RunConfig) -> bool:
    is_job = config.launcher.kind != "local"
    return is_job and (is_chosen(config.launcher) or environment_key(config) is not None)
