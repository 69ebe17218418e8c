"""The source that a job runs, copied at its submission: edits made while it waits change nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc_parallel.config.problems import ConfigError, Problem
from hpc_parallel.launch.run_folder import is_run_folder

MOST_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Snapshot:
    """Which checkouts are copied where, and from where a process imports once they are."""

    copies: Mapping[Path, Path]  # checkout -> its copy
    import_path: tuple[Path, ...]  # empty where nothing is copied

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """What makes Python import from the copies first; no folder of its own choice comes before."""
        if not self.import_path:
            return {}
        given = [environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else []
        return {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join([*map(str, self.import_path), *given])}

    def take(self) -> None:
        for root, copy in self.copies.items():
            for name in source_files(root):
                target = copy / name
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                shutil.copy2(root / name, target)


def plan_snapshot(destination: Path, *, working_directory: Path) -> Snapshot:
    """Copy what git tracks and what it does not ignore, of the working directory's checkout (a model of the
    user's own) and of this package's. An installed package does not change under a waiting job, and stays.

    Raises ConfigError where that is more than MOST_BYTES: then it is not source alone.
    """
    package = Path(__file__).resolve().parents[2]
    places = {place: checkout_of(place) for place in (working_directory, package)}
    roots = list(dict.fromkeys(root for root in places.values() if root is not None))
    names = [root.name if root.name not in [r.name for r in roots[:i]] else f"{root.name}-{i}"
             for i, root in enumerate(roots)]  # fmt: skip
    copies = {root: destination / name for root, name in zip(roots, names, strict=True)}
    size = sum((root / name).stat().st_size for root in roots for name in source_files(root))
    if size > MOST_BYTES:
        rule = (
            f"would copy {size >> 20} MiB from {' and '.join(map(str, roots))}, where {MOST_BYTES >> 20} are "
            "source at the most: let git ignore the rest"
        )
        raise ConfigError([Problem("launcher.snapshot", True, rule, (False,))])
    copied = [copies[root] / place.relative_to(root) for place, root in places.items() if root is not None]
    return Snapshot(copies, tuple(dict.fromkeys([*copied, working_directory])) if copied else ())


def checkout_of(place: Path) -> Path | None:
    """The root of the git checkout that holds `place`; None where there is none."""
    found = _git(place, "rev-parse", "--show-toplevel")
    return Path(found.strip()) if found else None


def source_files(root: Path) -> list[str]:
    """Names of the files that git tracks (submodules' too) or does not ignore, as they are on the disk now.

    Run folders are left out, or each would hold all before it.
    """
    tracked = _git(root, "ls-files", "--cached", "--recurse-submodules", "-z") or ""
    new = _git(root, "ls-files", "--others", "--exclude-standard", "-z") or ""
    names = [name for name in (tracked + new).split("\0") if name]
    folders = {folder for name in names for folder in Path(name).parents}
    runs = {folder for folder in folders if is_run_folder(root / folder)}
    return [
        name
        for name in names
        if (root / name).is_file() and (not runs or runs.isdisjoint(Path(name).parents))
    ]


def _git(directory: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=directory, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.decode(errors="surrogateescape")
