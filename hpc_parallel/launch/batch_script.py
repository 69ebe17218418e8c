"""What a run asks of Slurm, and the whole batch script where submitit is not wanted: of one run, or of an
array of runs that ask for the same."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hpc_parallel.config.compose import find_folder
from hpc_parallel.exit_codes import DONE
from hpc_parallel.launch.prepare import PreparedRun
from hpc_parallel.record import owner
from hpc_parallel.record.safe_write import write_text

Flags = dict[str, str | int | bool]
JOB = "$SLURM_JOB_ID"
ARRAY_TASK = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"  # as sacct and scancel take it


class ShellWord(str):
    """A word that the shell is to expand: quoted as it should be already."""


RUN = ShellWord('"$hpc_parallel_run"')  # the folder of an array's task


def sbatch_flags(run: PreparedRun) -> Flags:
    """The resources and the queue of a run, as long flags of sbatch; true stands for a flag without value."""
    config, launcher = run.config, run.config.launcher
    flags: Flags = {
        "job-name": config.name,
        "nodes": config.nodes,
        "ntasks-per-node": run.processes_per_node,
        "cpus-per-task": run.cpus_per_process,
        "time": launcher.time_minutes,
        # Half of a short job is left to it: Slurm's clock for this is up to a minute early.
        "signal": f"USR2@{min(launcher.grace_s, 30 * launcher.time_minutes)}",
        "requeue": True,  # some sites forbid it unless asked
        **gpu_flags(run),
    }
    if launcher.memory_gb is not None:
        flags["mem"] = f"{math.ceil(launcher.memory_gb * 1024)}M"  # never 0M, which asks for all there is
    for key in ("partition", "account", "qos", "constraint", "exclude", "wckey"):
        if (value := getattr(launcher, key)) is not None:
            flags[key] = value
    if launcher.extra.get("no-requeue"):
        del flags["requeue"]
    return flags | {
        flag: value for flag, value in launcher.extra.items() if value is not None and value is not False
    }


def gpu_flags(run: PreparedRun) -> Flags:
    """`--gpus-per-node` or `--gres` by the site's profile; nothing on a cluster of CPUs.

    Never `--gpus-per-task`: it hides the GPUs of a node from each other (CUDA IPC, NCCL P2P).
    """
    cluster, count = run.config.cluster, run.config.gpus_per_node
    if not cluster.gpus:
        return {}
    amount = f"{cluster.gpu_type}:{count}" if cluster.gpu_type else str(count)
    return {"gres": f"gpu:{amount}"} if cluster.gpu_flag == "gres" else {"gpus-per-node": amount}


def srun_arguments(run: PreparedRun) -> list[str]:
    """The tasks in the order of the ranks; the first task that fails ends the others.

    The cpus are restated because srun no longer takes them from sbatch (Slurm 22.05).
    """
    return [
        f"--cpus-per-task={run.cpus_per_process}",
        "--distribution=block",
        "--kill-on-bad-exit=1",
        "--wait=60",
    ]


def environment_block(run: PreparedRun, *, log_suffix: str) -> str:
    """The lines before the first process; `log_suffix` follows the job id in the name of the job's output."""
    return _templates().get_template("environment.sh.j2").render(_values(run, log_suffix))


def render(run: PreparedRun) -> str:
    """A whole batch script that starts the workers without submitit."""
    output: Flags = {"output": f"{run.folder.slurm}/%j.out", "open-mode": "append"}
    return _whole(run, sbatch_flags(run) | output, tasks=None, **_values(run, ".out"))


def render_array(
    run: PreparedRun, *, tasks: Path, name: str, count: int, parallelism: int | None = None
) -> str:
    """A whole batch script for an array of `count` runs that ask for the same as `run`.

    tasks: a folder with a link for each task's number, to its run's folder, where its output goes too;
    parallelism: tasks at once, None for any number.
    """
    limit = "" if parallelism is None else f"%{parallelism}"
    own_flags: Flags = {
        "job-name": name,
        "array": f"0-{count - 1}{limit}",
        "output": f"{tasks}/%a/{run.folder.slurm.name}/%A_%a.out",
        "open-mode": "append",
    }
    own = {
        "job": ARRAY_TASK,
        "run_folder": RUN,
        "log_folder": ShellWord(f"{RUN}/{run.folder.slurm.name}"),
        "import_path": _import_path(run, folder=RUN),
    }
    flags = sbatch_flags(run) | own_flags
    return _whole(run, flags, tasks=str(tasks), **{**_values(run, ".out"), **own})


def _whole(run: PreparedRun, flags: Flags, **values: object) -> str:
    whole = {"flags": flags, "srun_arguments": srun_arguments(run), **values}
    return _templates().get_template("srun.sh.j2").render(whole)


def _import_path(run: PreparedRun, *, folder: ShellWord) -> ShellWord | str:
    """PYTHONPATH for a script that many runs share: their copies lie at the same place in each folder."""
    if run.snapshot is None:
        return ""
    path = run.folder.path
    return ShellWord(os.pathsep.join(
        f"{folder}/{shlex.quote(str(place.relative_to(path)))}"
        if place.is_relative_to(path) else shlex.quote(str(place))
        for place in run.snapshot.import_path
    ))  # fmt: skip


def _values(run: PreparedRun, log_suffix: str) -> Mapping[str, object]:
    launcher = run.config.launcher
    return {
        "job": JOB,
        "python": job_python(run),
        "run_folder": str(run.folder.path),
        "log_folder": str(run.folder.slurm),
        "log_suffix": log_suffix,
        "import_path": "" if run.snapshot is None else os.pathsep.join(map(str, run.snapshot.import_path)),
        "modules": launcher.modules,
        "venv": launcher.venv and str(Path(os.path.expanduser(launcher.venv)).absolute()),
        "setup": launcher.setup,
    }


def job_python(run: PreparedRun) -> str:
    """The interpreter of `launcher.venv`, or the one that runs now."""
    if run.config.launcher.venv is None:
        return sys.executable
    return str(Path(os.path.expanduser(run.config.launcher.venv)).absolute() / "bin" / "python")


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(find_folder("sbatch_templates")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # shell, not HTML: every value goes through `quote`
    )
    environment.filters["quote"] = _quote
    return environment


def _quote(value: object) -> str:
    return value if isinstance(value, ShellWord) else shlex.quote(str(value))


class ScriptLauncher:
    """Writes the batch script into the run folder and leaves the submission to the user."""

    def preview(self, run: PreparedRun) -> str:
        return render(run)

    def start(self, run: PreparedRun) -> None:
        with run.written():
            self.write_script(run)
        owner.release(run.folder)  # nothing runs there yet, and this process may live on

    def launch(self, run: PreparedRun) -> int:
        self.start(run)
        self.announce(run)
        return DONE

    def write_script(self, run: PreparedRun) -> None:
        """Into the run folder, which is there."""
        run.folder.slurm.mkdir(mode=0o700, exist_ok=run.resumes)
        write_text(run.folder.batch_script, render(run))
        write_text(run.folder.resubmission, render(run))

    def announce(self, run: PreparedRun) -> None:
        """Print how the user submits the script."""
        print(f"run folder  {run.folder.path}")
        print(f"submit      sbatch {shlex.quote(str(run.folder.batch_script))}")
