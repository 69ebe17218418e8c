"""Check names, folders and flags against Slurm, the shell and the file system, and the Python of a job."""

from __future__ import annotations

import os
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpc_parallel.config.job_python import HOOK, find_environment, named
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.script import TASK, absolute
from hpc_parallel.config.site_schema import HERE
from hpc_parallel.problems import Problem, Problems, as_override, nearest, shell_word, spell
from hpc_parallel.record.run_folder import is_run_folder, unreadable
from hpc_parallel.record.safe_read import DamagedError, list_folder, read_text
from hpc_parallel.slurm.short_forms import minutes_of

MOST_BYTES = 3800  # of a run folder's path: Linux allows 4,095, with the files inside
PATH_RULE = (
    "must be a printable path without % or backslash (Slurm's patterns) or colon (ends a path), of at most "
    f"{MOST_BYTES:,} bytes, and 255 in each name"
)
MOST_FEWER = 64  # than `nodes`: each number of nodes is checked as a run of its own
# Flags of sbatch that the launchers set, with their configuration key (None: there is no key).
LAUNCHER_FLAGS = {
    "nodes": "nodes", "ntasks-per-node": "gpus_per_node", "ntasks": "gpus_per_node",
    "gpus-per-node": "gpus_per_node", "gres": "gpus_per_node", "job-name": "name",
    "partition": "launcher.partition", "account": "launcher.account", "qos": "launcher.qos",
    "constraint": "launcher.constraint", "exclude": "launcher.exclude", "wckey": "launcher.wckey",
    "time": "launcher.time_minutes", "mem": "launcher.memory_gb",
    "cpus-per-task": "launcher.cpus_per_device",
    "output": None, "error": None, "open-mode": None, "array": None, "wrap": None, "parsable": None,
    "test-only": None, "wait": "launcher.wait", "no-kill": "launcher.spares",
}  # fmt: skip

_OF_STANDBY = ("input", "mem", "mem-per-cpu", "mem-per-gpu", "pty")  # flags of srun that it sets or needs
_WEBHOOK = re.compile(r"https://[A-Za-z0-9.-]+(:\d{1,5})?([/?]\S*)?", re.ASCII)


def find_problems(config: RunConfig) -> Problems:
    yield from _names(config)
    yield from _launcher(config)
    yield from _spares(config)


def _names(config: RunConfig) -> Problems:
    """Names that become part of a path or of a line of shell code."""
    name, current = config.name, Path.cwd()
    if name[:1] in ("", ".") or not is_path(name) or "/" in name or len(name) > 100:
        suggestion = (
            re.sub(r"[^\w.-]+", "-", name).strip("-.").encode()[:100].decode(errors="ignore") or "run"
        )
        rule = (
            "can't name a folder: use up to 100 printable characters (255 bytes in UTF-8) "
            "without / \\ : and % (Slurm's patterns)"
        )
        if name[:1] == "." and name.strip("."):
            rule = "would name a hidden folder, which status does not list"
        yield Problem("name", name, rule, (suggestion,))
    folder = Path(os.path.expanduser(config.run_dir or "runs")).absolute()
    if config.run_dir == "" or not is_path(str(folder)):
        legal = "runs/mine" if is_path(str(current)) else os.path.expanduser("~/runs/mine")
        yield Problem(
            "run_dir", str(folder) if config.run_dir is None else config.run_dir, PATH_RULE, (legal,)
        )
    elif config.run_dir is not None and (refusal := unreadable(folder)):
        yield f"run_dir = {config.run_dir} can't be used: {refusal}"
    elif (run := next((place for place in folder.parents if is_run_folder(place)), None)) is not None:
        rule = f"would lie inside the run folder {run}"
        yield Problem("run_dir", config.run_dir, rule, (_free(str(run)),))
    elif (
        config.resume is None
        and config.run_dir is not None
        and os.path.lexists(folder)
        and (not os.path.isdir(folder) or list_folder(folder))
    ):
        rule = "is not empty; a run is never overwritten"
        yield Problem("run_dir", config.run_dir, rule, (_free(config.run_dir),))


def is_path(text: str) -> bool:
    """Whether Slurm and PYTHONPATH take the text literally, and Linux and a line of a script can hold it."""
    if not text.isprintable() or set(text) & set("%\\:"):
        return False
    path = os.fsencode(text)
    return len(path) <= MOST_BYTES and max(map(len, path.split(b"/"))) <= 255


def _free(folder: str) -> Path | None:
    """The folder's name with the first free number."""
    numbered = (Path(f"{folder.rstrip('/')}-{number}") for number in range(2, 1000))
    return next((path for path in numbered if not os.path.lexists(os.path.expanduser(path))), None)


def _launcher(config: RunConfig) -> Problems:
    launcher = config.launcher
    for index, pattern in enumerate(launcher.snapshot_exclude):
        if not pattern.strip("/*"):
            rule = f"at {index} would leave out all source"
            others = [other for other in launcher.snapshot_exclude if other.strip("/*")]
            yield Problem("launcher.snapshot_exclude", launcher.snapshot_exclude, rule, (others,))
            break
    if launcher.exclude and "/" in launcher.exclude:
        rule = "is a file, to which no restart could add a host: name the hosts themselves"
        if hosts := _hosts_in(launcher.exclude):
            rule += f", as {as_override('launcher.exclude', ','.join(hosts))}"
        yield Problem("launcher.exclude", launcher.exclude, rule, (None,))
    if (address := launcher.notify) and re.match(r"\w+:/", address) and not _WEBHOOK.fullmatch(address):
        secure = re.sub(r"^\w+:/+([^/@]*@)?", "https://", address)
        rule = "must be a command, or the address of a webhook without a password, by https"
        yield Problem("launcher.notify", address, rule, (secure if _WEBHOOK.fullmatch(secure) else None,))
    for key, flags in (("launcher.extra", launcher.extra), ("cluster.extra", config.cluster.extra)):
        for flag, value in flags.items():
            yield from _extra_flag(key, str(flag), value)
    for key, modules in (("cluster", config.cluster.modules), ("launcher", launcher.modules)):
        for index, module in enumerate(modules):
            if not module.strip() or not module.isprintable():
                rule = "must be the name of a module, such as cuda/12.4"
                yield Problem(f"{key}.modules[{index}]", module, rule)


def _hosts_in(file: str) -> list[str]:
    """The hosts in a file that Slurm reads: a list in each line, and comments."""
    lines: list[str] = []
    with suppress(OSError, ValueError, DamagedError):
        lines = read_text(Path(file), follow=True).splitlines()
    lists = [hosts for line in lines if (hosts := line.partition("#")[0].strip(" \t,"))]
    return lists if all(re.fullmatch(r"[\w.,\[\]-]*", hosts) for hosts in lists) else []


def _spares(config: RunConfig) -> Problems:
    """Spares, fewer nodes and standby need a job of the run's own, and a start after a failure."""
    launcher = config.launcher
    for key, value, off in (
        ("spares", launcher.spares, 0), ("min_nodes", launcher.min_nodes, None),
        ("standby", launcher.standby, False),
    ):  # fmt: skip
        if value is None or value <= 0:
            continue
        if launcher.kind in HERE:
            rule = f"needs a job of the run's own, and launcher.kind={launcher.kind} submits none"
            yield Problem(f"launcher.{key}", value, rule, (off,))
        elif not launcher.max_restarts:
            rule = "has no use: launcher.max_restarts=0 lets no start follow a failure"
            if config.task.name == "train" and config.training.checkpoint_every is None:
                rule += ", and a training without checkpoints needs training.checkpoint_every first"
            yield Problem(f"launcher.{key}", value, rule, (off,))
    if launcher.standby and config.task.name == TASK:
        rule = "is for our own training: your script imports torch itself"
        yield Problem("launcher.standby", True, rule, (False,))
    elif launcher.standby and (start := config.cluster.start) != "srun":
        yield Problem("launcher.standby", True, f"needs cluster.start=srun, and it is {start}", (False,))
    elif launcher.standby and (
        own := [flag for flag in _OF_STANDBY if config.cluster.srun.get(flag) is not None]
    ):
        rule = f"needs the standard input of srun and its --mem=0, and cluster.srun has {', '.join(own)}"
        yield Problem("launcher.standby", True, rule, (False,))
    least = launcher.min_nodes
    if least is not None and config.task.name == TASK:
        rule = "is for our own training: only your script knows how it splits its batch"
        yield Problem("launcher.min_nodes", least, rule, (None,))
    elif least is not None and not config.nodes - MOST_FEWER <= least <= config.nodes:
        rule = f"must be at most nodes={config.nodes}, and at most {MOST_FEWER} fewer"
        nearest_legal = min(max(1, config.nodes - MOST_FEWER, least), config.nodes)
        yield Problem("launcher.min_nodes", least, rule, (nearest_legal,))


def _extra_flag(extra: str, flag: str, value: Any) -> Problems:
    key = f"{extra}.{flag}"
    if flag == "M":
        flag = "clusters"
    if not re.fullmatch(r"[a-z][a-z0-9-]*", flag):
        suggestion = re.sub(r"[^a-z0-9-]", "-", flag.lower()).lstrip("-0123456789")
        near = as_override(f"+{extra}.{suggestion or 'FLAG'}", value)
        yield f"{key} is not a flag of sbatch. Try {near}."
    elif flag == "clusters":
        yield (
            f"{key}: status, cancel and resume would ask another Slurm than the one that has the job. "
            f"Try SLURM_CLUSTERS={value} in your shell, for all commands."
        )
    elif flag in LAUNCHER_FLAGS:
        config_key = LAUNCHER_FLAGS[flag]
        config_value = None if config_key is None else _config_value(flag, str(value))
        offer = "" if config_value is None else f" Try {as_override(str(config_key), config_value)}."
        yield f"{key}: this flag is set by {config_key or 'the launcher'}.{offer}"
    elif isinstance(value, dict | list) or not str(value).isprintable():
        yield Problem(key, value, "must be one printable value, or true for a flag without one")


def _config_value(flag: str, value: str) -> str | int | None:
    """A flag's value in the unit of our key: minutes, gigabytes, a count; None if it can't be converted."""
    if flag == "time":
        return minutes_of(value)
    if flag == "mem":
        amount = re.fullmatch(r"(\d+)([KMGT]?)B?", value, re.IGNORECASE)
        if amount is None or amount[1] == "0":
            return None
        scale = {"K": 2**-20, "": 2**-10, "M": 2**-10, "G": 1, "T": 2**10}[amount[2].upper()]
        return f"{int(amount[1]) * scale:g}"
    if flag == "wait":
        return "true"
    if flag in ("partition", "account", "qos", "constraint", "exclude", "wckey", "job-name"):
        return value
    count = re.search(r"(?:^|:)([1-9]\d*)$", value)
    return count and count[1]


def python_problems(config: RunConfig) -> Problems:
    launcher, python = config.launcher, config.launcher.python or ""
    if not python.strip() or not python.isprintable():
        yield Problem("launcher.python", python, "must be a path or a name", (sys.executable,))
    elif launcher.container is not None:
        return  # the program is in the image
    elif os.sep in python:
        path, inside = absolute(python), f"{absolute(python)}/bin/python"
        if not (os.path.isfile(path) and os.access(path, os.X_OK)):
            legal = inside if os.path.exists(inside) else sys.executable
            yield Problem("launcher.python", python, "is no program here", (legal,))
    elif not launcher.modules and not launcher.setup and shutil.which(python) is None:
        rule = "is not on the PATH of this shell, and the job has no modules and no setup that could add it"
        yield Problem("launcher.python", python, rule, (sys.executable,))


def conda_problems(config: RunConfig) -> Problems:
    """`launcher.conda` must be an environment that has Python and can be activated."""
    text = config.launcher.conda or ""
    environment, names = find_environment(text), named()
    if environment is None:
        rule = "is not a folder here" if os.sep in text else f"is not one of {', '.join(names)}"
        if not names:
            rule = "names no environment, because no conda is known here. Load its module, or name its folder"
        yield Problem("launcher.conda", text, rule, tuple(nearest(Path(text).name, names) or [*names][:2]))
    elif not os.path.exists(environment.python):
        command = f"conda install -p {shell_word(environment.folder)} python"
        yield f"launcher.conda = {text} has no Python ({environment.python}). Try {command}."
    elif environment.hook is None:
        yield (
            f"launcher.conda = {text} can't be activated, because no conda with an {HOOK} is known here. "
            f"Load its module, or try {as_override('launcher.python', environment.python)}."
        )


def venv_problems(config: RunConfig) -> Problems:
    launcher, venv = config.launcher, config.launcher.venv or ""
    folder = absolute(venv)
    if launcher.conda is not None:
        rule = f"can't be with launcher.conda={spell(launcher.conda)}: each is the environment of the job"
        yield Problem("launcher.venv", venv, rule, (None,))
    elif os.path.isdir(folder / "conda-meta"):
        conda = as_override("launcher.conda", folder)
        yield f"launcher.venv = {venv} is an environment of conda. Try {conda}."
    elif not os.path.exists(folder / "bin" / "activate"):
        current = Path(sys.prefix)
        legal = (current if os.path.exists(current / "bin" / "activate") else None,)
        rule = "is not a virtual environment (it has no bin/activate)"
        yield Problem("launcher.venv", venv, rule, legal)
