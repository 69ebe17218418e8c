"""The Python of a job: `launcher.python`, the Python of a conda or virtual environment, or the current one.

A batch script names its Python by a path, so `conda activate` in `launcher.setup` alone changes nothing.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from hpc_parallel.config.conda import find_environment
from hpc_parallel.config.node_devices import launcher_kind
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.site_schema import LauncherConfig
from hpc_parallel.problems import ConfigError, Problem

CHOICES = ("python", "conda", "venv")  # the keys of the launcher that choose it
_CONDA = re.compile(r"\b(?:conda|mamba|micromamba|source)\s+activate\s+([^\s;&|]+)")
_MODULE = re.compile(r"(?:cray-)?python[\d.]*|(?:ana|mini)conda\d*|miniforge\d*|mambaforge|conda|mamba", re.I)
_VENV = re.compile(r"(?:^|[;&|]\s*)(?:source|\.)\s+([^\s;&|]*)/bin/activate\b")


def job_python(launcher: LauncherConfig) -> str:
    """The interpreter on the hosts of a job: a path, or a name that the job looks up on its PATH.

    Raises ConfigError if the conda environment no longer exists.
    """
    if launcher.python is not None:
        return absolute(launcher.python) if os.sep in launcher.python else launcher.python
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


def warnings(config: RunConfig) -> Iterator[str]:
    """Warn about settings that seem to change the Python of the run, but do not."""
    launcher = config.launcher
    if launcher_kind(launcher.kind) == "local":
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


def absolute(path: str) -> str:
    """The path from the root; `~` is the home."""
    return str(Path(os.path.expanduser(path)).absolute())
