"""The Python of a job: `launcher.python`, the Python of a conda or virtual environment, or the current one.

A batch script names its Python by a path, so `conda activate` in `launcher.setup` alone changes nothing.
Environments of conda or mamba are found by their files, because starting conda takes a second.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.script import absolute
from hpc_parallel.config.site_schema import LauncherConfig
from hpc_parallel.problems import ConfigError, Problem
from hpc_parallel.record.safe_read import DamagedError, is_file, is_folder, list_folder, read_text

CHOICES = ("python", "conda", "venv")  # the keys of the launcher that choose it
_CONDA = re.compile(r"\b(?:conda|mamba|micromamba|source)\s+activate\s+([^\s;&|]+)")
_MODULE = re.compile(r"(?:cray-)?python[\d.]*|(?:ana|mini)conda\d*|miniforge\d*|mambaforge|conda|mamba", re.I)
_VENV = re.compile(r"(?:^|[;&|]\s*)(?:source|\.)\s+([^\s;&|]*)/bin/activate\b")
HOOK = Path("etc", "profile.d", "conda.sh")  # defines `conda activate` in a shell


def job_python(launcher: LauncherConfig) -> str:
    """The interpreter on the hosts of a job: a path, or a name that the job looks up on its PATH.

    Raises ConfigError if the conda environment no longer exists.
    """
    if launcher.python is not None:
        return str(absolute(launcher.python)) if os.sep in launcher.python else launcher.python
    if launcher.conda is not None:
        if (environment := find_environment(launcher.conda)) is None:
            raise ConfigError([Problem("launcher.conda", launcher.conda, "is no environment any more")])
        return str(environment.python)
    return sys.executable if launcher.venv is None else f"{absolute(launcher.venv)}/bin/python"


def host_python(launcher: LauncherConfig) -> str:
    """The interpreter of `job conclude`. It runs outside the container, and can run before the setup."""
    is_inside = launcher.container is not None and launcher.python is not None
    python = sys.executable if is_inside else job_python(launcher)
    return python if os.sep in python else sys.executable


def rank_python(launcher: LauncherConfig) -> str:
    """The interpreter of the ranks. In a container, `launcher.python` is a path or a name of the image."""
    return "python3" if launcher.container is not None and not is_chosen(launcher) else job_python(launcher)


def is_chosen(launcher: LauncherConfig) -> bool:
    """Whether a key says which Python the job runs."""
    return any(getattr(launcher, key) is not None for key in CHOICES)


def environment_key(config: RunConfig) -> str | None:
    """The key that sets commands before the job's Python, or the job's image; None if no key does.

    A local run ignores these keys.
    """
    if config.launcher.kind == "local":
        return None
    launcher, cluster = config.launcher, config.cluster
    commands: dict[str, str | list[str] | None] = {
        "launcher.container": launcher.container,
        "launcher.setup": launcher.setup, "launcher.modules": launcher.modules,
        "cluster.setup": cluster.setup, "cluster.modules": cluster.modules,
    }  # fmt: skip
    return next((key for key, lines in commands.items() if lines), None)


def warnings(config: RunConfig) -> Iterator[str]:
    """Warn about settings that seem to change the Python of the run, but do not."""
    launcher = config.launcher
    if launcher.kind == "local":
        for_jobs = (*CHOICES, "modules", "setup", "container")
        if unused := [f"launcher.{key}" for key in for_jobs if getattr(launcher, key)]:
            verb = "is" if len(unused) == 1 else "are"
            yield f"{', '.join(unused)} {verb} for jobs: this run uses the Python of this machine."
        return
    if is_chosen(launcher):
        return
    yield from _unused_modules(config)
    setups = [("cluster", line) for line in config.cluster.setup]
    for group, line in [*setups, *(("launcher", line) for line in launcher.setup)]:
        if match := _CONDA.search(line) or _VENV.search(line):
            yield (
                f"{group}.setup: {line.strip()} does not change the Python of the job, which is "
                f"{sys.executable}. Try launcher.{'conda' if match.re is _CONDA else 'venv'}={match[1]}."
            )


def _unused_modules(config: RunConfig) -> Iterator[str]:
    """Warn about Python modules that this shell has not loaded: the current Python can't need them."""
    if config.launcher.container is not None:
        return
    here = os.environ.get("LOADEDMODULES", "").split(":")
    for group, names in (("cluster", config.cluster.modules), ("launcher", config.launcher.modules)):
        for name in names:
            if name not in here and _MODULE.fullmatch(name.partition("/")[0]):
                yield (
                    f"{group}.modules: {name} does not change the Python of the job, which is "
                    f"{sys.executable}. Try launcher.python=python3."
                )


@dataclass(frozen=True)
class CondaEnvironment:
    """A folder with an environment, and the script that makes `conda activate` known to a shell."""

    folder: Path
    hook: Path | None  # None: no installation of conda is known here

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"


def find_environment(text: str, *, variables: Mapping[str, str] = os.environ) -> CondaEnvironment | None:
    """The environment of a name or a path; None if there is none."""
    folder = absolute(text) if os.sep in text else named(variables).get(text)
    if folder is None or not is_folder(folder):
        return None
    base = _base(variables)
    owners = [folder.parent.parent, folder] if base is None else [base]
    return CondaEnvironment(folder, next((path / HOOK for path in owners if is_file(path / HOOK)), None))


def named(variables: Mapping[str, str] = os.environ) -> dict[str, Path]:
    """The environments that have names, in the order in which conda looks: the first one of a name counts."""
    base, home = _base(variables), Path(variables.get("HOME", os.path.expanduser("~")))
    listed = [variables.get(name, "") for name in ("CONDA_ENVS_DIRS", "CONDA_ENVS_PATH")]
    folders = [Path(folder).expanduser() for text in listed for folder in text.split(os.pathsep) if folder]
    folders += [*([base / "envs"] if base is not None else []), home / ".conda" / "envs"]
    paths = [Path(entry.path) for folder in folders for entry in list_folder(folder)]
    with suppress(OSError, DamagedError):  # conda writes this file with its first environment
        paths += map(Path, read_text(home / ".conda" / "environments.txt", follow=True).split("\n"))
    environments = {} if base is None else {"base": base}
    for path in paths:
        if is_folder(path / "conda-meta") and path != base:
            environments.setdefault(path.name, path)
    return environments


def _base(variables: Mapping[str, str]) -> Path | None:
    """The folder of this shell's conda: from CONDA_EXE, otherwise from the first program on PATH."""
    path = variables.get("PATH", os.defpath)
    programs = [variables.get("CONDA_EXE"), *(shutil.which(name, path=path) for name in ("conda", "mamba"))]
    bases = [Path(program).resolve().parent.parent for program in programs if program]
    return next((base for base in bases if is_file(base / HOOK)), None)
