"""Find environments of conda or mamba by their files, without starting conda, which takes a second."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_parallel.record.safe_read import DamagedError, is_file, is_folder, list_folder, read_text

HOOK = Path("etc", "profile.d", "conda.sh")  # defines `conda activate` in a shell


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
    folder = Path(os.path.expanduser(text)).absolute() if os.sep in text else named(variables).get(text)
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
