"""The sbatch flags of a run, and complete batch scripts.

A script starts one run, or an array of runs that need the same resources.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hpc_parallel.config.job_python import find_environment, host_python, rank_python
from hpc_parallel.config.places import find_folder
from hpc_parallel.config.script import absolute
from hpc_parallel.config.site_schema import LauncherConfig
from hpc_parallel.exit_codes import AGAIN, DONE
from hpc_parallel.launch.prepare import PreparedRun
from hpc_parallel.launch.run_files import written
from hpc_parallel.record import owner
from hpc_parallel.record.safe_write import write_text
from hpc_parallel.slurm.allocation import ALLOCATION, required
from hpc_parallel.slurm.node_room import Need, Room

Flags = dict[str, str | int | bool]
JOB = "$SLURM_JOB_ID"
ARRAY_TASK = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"  # the form that sacct and scancel accept


class ShellWord(str):
    """Text for the shell to expand. It is already quoted."""


def expandable(path: str) -> ShellWord:
    """A path whose `$VARIABLES` the job's shell expands. The shell names an unset variable and stops."""
    parts, end = [], 0
    for match in Template.pattern.finditer(path):
        name = match["named"] or match["braced"]
        if name or match["escaped"]:
            parts.append(_literal(path[end : match.start()] + ("" if name else "$")))
            parts.append(f'"${{{name}:?in cluster.scratch is not set in this job}}"' if name else "")
            end = match.end()
    return ShellWord("".join([*parts, _literal(path[end:])]))


def _literal(text: str) -> str:
    return shlex.quote(text) if text else ""


RUN = ShellWord('"$hpc_parallel_run"')  # the run folder of an array task


def sbatch_flags(run: PreparedRun) -> Flags:
    """The resources and the queue of a run, as long sbatch flags; True means a flag without a value.

    A flag that has its own key is also in `LauncherConfig` and in `LAUNCHER_FLAGS` (site_checks.py).
    """
    config, launcher = run.config, run.config.launcher
    receiver = "B:" if config.cluster.start == "mpirun" else ""  # B: signals the batch script only
    flags: Flags = {
        "job-name": config.name,
        "nodes": config.nodes + launcher.spares,
        "ntasks-per-node": run.processes_per_node,
        "cpus-per-task": run.cpus_per_process,
        "time": launcher.time_minutes,
        "signal": f"{receiver}{_signal(launcher.grace_s, minutes=launcher.time_minutes)}",
        "requeue": True,  # some sites disable it by default
        **gpu_flags(run),
    }
    if chooses_hosts(launcher):
        flags["no-kill"] = True
    if launcher.memory_gb is not None:
        # Never 0M, which means all memory of the node.
        flags["mem"] = f"{math.ceil(launcher.memory_gb * 1024)}M"
    for key in ("partition", "account", "qos", "constraint", "exclude", "wckey"):
        if (value := getattr(launcher, key)) is not None:
            flags[key] = value
    extra = config.cluster.extra | launcher.extra
    if extra.get("no-requeue"):
        del flags["requeue"]
    flags |= _set_flags(extra)
    if run.dependency:
        before = [str(flags["dependency"])] if "dependency" in flags else []
        flags |= {"dependency": ",".join([*before, run.dependency]), "kill-on-invalid-dep": "yes"}
    return flags


def _signal(grace_s: int, *, minutes: int) -> str:
    """A short job keeps half of its time, because Slurm may send this signal up to a minute early."""
    return f"USR2@{min(grace_s, 30 * minutes)}"


def _set_flags(flags: Mapping[str, Any]) -> Flags:
    """Remove the flags whose value is null or false."""
    return {flag: value for flag, value in flags.items() if value is not None and value is not False}


def gpu_flags(run: PreparedRun, *, count: int | None = None) -> Flags:
    """`--gpus-per-node` or `--gres`, as the cluster profile says; empty where no flag asks for GPUs.

    count: of a node; None: those of the run.

    `--gpus-per-task` is never used: it hides the GPUs of a node from each other (CUDA IPC, NCCL P2P).
    """
    cluster = run.config.cluster
    count = run.config.gpus_per_node if count is None else count
    if not cluster.gpus or cluster.gpu_flag == "none":
        return {}
    amount = f"{cluster.gpu_type}:{count}" if cluster.gpu_type else str(count)
    return {"gres": f"gpu:{amount}"} if cluster.gpu_flag == "gres" else {"gpus-per-node": amount}


def needs_own_script(run: PreparedRun) -> bool:
    """Whether submitit can't start the ranks, because it uses srun without a container."""
    return run.config.cluster.start != "srun" or run.config.launcher.container is not None


def srun_arguments(run: PreparedRun, *, packed: Need | None = None, room: Room | None = None) -> list[str]:
    """Flags of srun. The tasks are in the order of the ranks, and the first failing task ends the others.

    The CPUs are repeated because srun no longer takes them from sbatch (Slurm 22.05). torchrun is one task
    for each node, with the CPUs of all its ranks. packed: the place of the run in a packed job. room: what
    its nodes have, if runs share GPUs there.
    """
    ranks = run.processes_per_node if run.config.cluster.start == "torchrun" else 1
    tasks: Flags = {"ntasks": run.config.nodes, "ntasks-per-node": 1} if ranks > 1 else {}
    if chooses_hosts(run.config.launcher):
        tasks = _chosen_place(1 if ranks > 1 else run.processes_per_node)
    flags: Flags = {
        **tasks,
        "cpus-per-task": run.cpus_per_process * ranks,
        "distribution": "block:block",  # also for CPUs, so that rank 0 is near the first GPUs
        "kill-on-bad-exit": 1,
        "wait": 0,  # a task that ends with code 0 ends no other; slurm.conf may set another WaitTime
        # Slurm counts the memory for each CPU of steps that overlap, too. 0 is all of it, and not counted.
        **({"mem": 0} if run.config.launcher.standby else {}),
        **(_place_in_allocation(run) if packed is None else _place_in_pack(run, packed)),
        **({} if room is None else _shared_place(run, room)),
    }
    flags = _set_flags(flags) | _set_flags(run.config.cluster.srun)
    return [_word(flag, value) for flag, value in flags.items()]


def _word(flag: str, value: str | int | bool) -> str:
    text = f"--{flag}" if value is True else f"--{flag}={value}"
    return ShellWord(text) if isinstance(value, ShellWord) else text


def chooses_hosts(launcher: LauncherConfig) -> bool:
    """Whether each start in the job chooses its hosts: it has spares, or goes on with fewer."""
    return launcher.spares > 0 or launcher.min_nodes is not None


def _chosen_place(tasks_per_node: int) -> Flags:
    """The flags of a step on the hosts that the script has chosen for this start."""
    return {
        "nodes": ShellWord('"$SLURM_JOB_NUM_NODES"'),
        "nodelist": ShellWord('"$SLURM_JOB_NODELIST"'),
        "ntasks": ShellWord(f'"$((SLURM_JOB_NUM_NODES * {tasks_per_node}))"'),
        "ntasks-per-node": tasks_per_node,
    }


def _place_in_pack(run: PreparedRun, need: Need) -> Flags:
    """The flags of a step that has its place in a packed job for itself; the job says on which hosts."""
    tasks = run.processes_per_node
    return {
        "nodes": run.config.nodes,
        "nodelist": ShellWord('"$SLURM_JOB_NODELIST"'),
        "ntasks": run.config.nodes * tasks,
        "ntasks-per-node": tasks,
        "exact": True,
        "mem": f"{need.room.memory_mb}M" if need.room.memory_mb else 0,
        **gpu_flags(run),
    }


def _shared_place(run: PreparedRun, room: Room) -> Flags:
    """The flags of a step that shares its node. Its script then leaves it one GPU.

    Slurm gives a GPU to one step only, or to steps that overlap. It would give those the same CPUs and GPUs
    first, so each step has all of them, without binding.
    """
    everything: Flags = {"cpus-per-task": room.cpus, "mem": 0, **gpu_flags(run, count=room.gpus)}
    return everything | {"exact": False, "overlap": True, "cpu-bind": "none"}


def _place_in_allocation(run: PreparedRun) -> Flags:
    """The flags of a step in an allocation that is not the run's own, and may have other steps.

    Without `overlap` srun would wait for the end of the shell's own step (`srun --pty`). `mem=0` is all of
    the memory, so a second run can start.
    """
    hosts = hosts_here(run)
    if not hosts:
        return {}
    tasks = 1 if run.config.cluster.start == "torchrun" else run.processes_per_node
    cpus = required().cpus // tasks
    wanted = run.cpus_per_process * run.processes_per_node // tasks
    return {
        "nodes": len(hosts),
        "nodelist": ",".join(hosts),
        "ntasks": len(hosts) * tasks,
        "ntasks-per-node": tasks,
        "cpus-per-task": max(1, min(cpus, wanted)),
        "overlap": True,
        "mem": 0,
        **({} if cpus else {"overcommit": True}),
    }


def hosts_here(run: PreparedRun) -> tuple[str, ...]:
    """The hosts of a run in an allocation: the first ones. Empty for another launcher."""
    return required().hosts[: run.config.nodes] if run.config.launcher.kind == ALLOCATION else ()


def render(run: PreparedRun, *, payload: bool = False) -> str:
    """A complete batch script. payload: whether submitit starts the ranks, from its pickled payload."""
    suffix = "_0_log.out" if payload else ".out"  # submitit's name for the output of a job
    output: Flags = {"output": f"{run.folder.slurm}/%j{suffix}", "open-mode": "append"}
    values = {"flags": sbatch_flags(run) | output, "payload": payload}
    return _templates().get_template("job.sh.j2").render({**_values(run, suffix), **values})


def render_packed(
    run: PreparedRun, need: Need, *, room: Room | None = None, hosts: Sequence[str] = ()
) -> str:
    """The script of a run that has its place in a packed job, which starts it by bash.

    room: what its nodes have, if runs share GPUs there. hosts: of its place, if it is in an allocation.
    """
    arguments = srun_arguments(run, packed=need, room=room)
    values: dict[str, object] = {"flags": {}, "packed": not hosts}
    values |= {"hosts": ",".join(hosts), "srun_arguments": arguments, "shares_gpu": room is not None}
    return _templates().get_template("job.sh.j2").render({**_values(run, ".out"), **values})


def render_pack(
    first: PreparedRun, *, queue: Path, name: str, nodes: int, room: Room, minutes: int, grace_s: int
) -> str:
    """The batch script of a job of whole nodes that runs the queue in the folder `queue`.

    first: one of the runs. minutes: the time limit. grace_s: before it, in which the runs save.
    """
    flags: Flags = sbatch_flags(first) | {
        "job-name": name,
        "nodes": nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": room.cpus,
        "time": minutes,
        "signal": _signal(grace_s, minutes=minutes),
        "exclusive": True,
        "mem": 0,
        "output": f"{queue}/%j.out",
        "open-mode": "append",
        **gpu_flags(first, count=room.gpus),
    }
    values = {"flags": flags, "queue": str(queue), "python": host_python(first.config.launcher)}
    return _templates().get_template("pack.sh.j2").render(values)


def render_array(
    run: PreparedRun, *, tasks: Path, name: str, count: int, parallelism: int | None = None
) -> str:
    """A complete batch script for an array of `count` runs that need the same resources as `run`.

    tasks: a folder with one link for each task, named by its number, to the task's run folder.
    parallelism: the number of tasks that may run at the same time; None: no limit.
    """
    limit = "" if parallelism is None else f"%{parallelism}"
    array_flags: Flags = {
        "job-name": name,
        "array": f"0-{count - 1}{limit}",
        "output": f"{tasks}/%a/{run.folder.slurm.name}/%A_%a.out",
        "open-mode": "append",
    }
    array_values: dict[str, object] = {
        "flags": sbatch_flags(run) | array_flags,
        "tasks": str(tasks),
        "job": ARRAY_TASK,
        "run_folder": RUN,
        "log": ShellWord(f'"$hpc_parallel_run/{run.folder.slurm.name}/{ARRAY_TASK}.out"'),
        "import_path": _import_path(run),
    }
    return _templates().get_template("job.sh.j2").render({**_values(run, ".out"), **array_values})


def _import_path(run: PreparedRun) -> ShellWord | str:
    """PYTHONPATH for a batch script of many runs, whose copies of the source have the same relative path."""
    if run.imports is None:
        return ""
    return ShellWord(os.pathsep.join(
        f"{RUN}/{shlex.quote(str(path.relative_to(run.folder.path)))}"
        if path.is_relative_to(run.folder.path) else shlex.quote(str(path))
        for path in run.imports.import_path
    ))  # fmt: skip


def _values(run: PreparedRun, log_suffix: str) -> Mapping[str, object]:
    launcher, cluster = run.config.launcher, run.config.cluster
    arguments = cluster.container_arguments
    counts: Flags = {"nodes": run.config.nodes, "ntasks": run.processes}
    if chooses_hosts(launcher):
        counts = _chosen_place(run.processes_per_node)
    return {
        "tasks": None,
        "payload": False,
        "job": JOB,
        "python": host_python(launcher),
        "run_folder": str(run.folder.path),
        "slurm_folder": str(run.folder.slurm),
        "log": ShellWord(f'{shlex.quote(str(run.folder.slurm))}/"{JOB}"{log_suffix}'),
        "safe_path": run.imports is not None,
        "import_path": "" if run.imports is None else os.pathsep.join(map(str, run.imports.import_path)),
        "modules": [*cluster.modules, *launcher.modules],
        "conda": launcher.conda and find_environment(launcher.conda),
        "venv": launcher.venv and str(absolute(launcher.venv)),
        "program": _program(launcher),
        "setup": [*cluster.setup, *launcher.setup],
        # How the ranks are started, and in which container:
        "start": cluster.start,
        "again": AGAIN,
        "packed": False,
        "shares_gpu": False,
        "stands_by": launcher.standby,
        "notify": launcher.notify is not None,
        "frees_hosts": chooses_hosts(launcher) and run.config.training.memory_checkpoint_every is not None,
        "srun_arguments": srun_arguments(run),
        "mpirun_arguments": cluster.mpirun,
        "torchrun_arguments": run.config.script.torchrun,
        "nodes": counts["nodes"],
        "all_nodes": run.config.nodes,
        "smaller": bool(run.smaller),
        "hosts": ",".join(hosts_here(run)),
        "chooses_hosts": chooses_hosts(launcher),
        "checks_spares": launcher.spares > 0 and run.config.preflight.act != "off",
        "processes_per_node": run.processes_per_node,
        "processes": counts["ntasks"],
        "cpus_per_process": run.cpus_per_process,
        "master_suffix": cluster.master_suffix,
        "port": cluster.port,
        "runtime": cluster.container if launcher.container is not None else None,
        "image": launcher.container,
        "mounts": launcher.container_mounts,
        "scratch": cluster.scratch and expandable(cluster.scratch),
        "container_arguments": (["--nv"] if cluster.gpus else []) if arguments is None else arguments,
        "rank_python": rank_python(launcher),
    }


def _program(launcher: LauncherConfig) -> str | None:
    """The name of `launcher.python` that the job must find on its PATH; None for a path or in an image."""
    is_name = launcher.python is not None and os.sep not in launcher.python
    return launcher.python if is_name and launcher.container is None else None


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
    environment.filters["quote"] = lambda x: x if isinstance(x, ShellWord) else shlex.quote(str(x))
    return environment


class ScriptLauncher:
    """Writes the batch script into the run folder and leaves the submission to the user."""

    def preview(self, run: PreparedRun) -> str:
        return render(run)

    def start(self, run: PreparedRun) -> None:
        with written(run):
            self.write_script(run)
        owner.release(run.folder)  # nothing runs yet, and this process may continue

    def launch(self, run: PreparedRun) -> int:
        self.start(run)
        self.announce(run)
        return DONE

    def write_script(self, run: PreparedRun) -> None:
        """Write the batch script into the run folder, which must exist."""
        run.folder.slurm.mkdir(mode=0o700, exist_ok=run.resumes)
        for file in (run.folder.batch_script, run.folder.resubmission):
            write_text(file, render(run))

    def announce(self, run: PreparedRun) -> None:
        """Print the command that submits the script."""
        print(f"run folder  {run.folder.path}")
        print(f"submit      sbatch {shlex.quote(str(run.folder.batch_script))}")
