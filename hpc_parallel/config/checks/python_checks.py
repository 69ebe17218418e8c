"""Check the Python that a job is told to run."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from hpc_parallel.config.conda import HOOK, find_environment, named
from hpc_parallel.config.job_python import absolute
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.problems import Problem, Problems, nearest, spell


def python_problems(config: RunConfig) -> Problems:
    """`launcher.python` must be a program that the job finds."""
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
    elif not environment.python.exists():
        command = f"conda install -p {spell(environment.folder)} python"
        yield f"launcher.conda = {text} has no Python ({environment.python}). Try {command}."
    elif environment.hook is None:
        yield (
            f"launcher.conda = {text} can't be activated, because no conda with an {HOOK} is known here. "
            f"Load its module, or try launcher.python={spell(environment.python)}."
        )


def venv_problems(config: RunConfig) -> Problems:
    """`launcher.venv` must be a virtual environment."""
    launcher, venv = config.launcher, config.launcher.venv or ""
    folder = Path(absolute(venv))
    if launcher.conda is not None:
        rule = f"can't be with launcher.conda={spell(launcher.conda)}: each is the environment of the job"
        yield Problem("launcher.venv", venv, rule, (None,))
    elif (folder / "conda-meta").is_dir():
        yield f"launcher.venv = {venv} is an environment of conda. Try launcher.conda={spell(folder)}."
    elif not (folder / "bin" / "activate").exists():
        current = Path(sys.prefix)
        legal = (current if (current / "bin" / "activate").exists() else None,)
        rule = "is not a virtual environment (it has no bin/activate)"
        yield Problem("launcher.venv", venv, rule, legal)
