"""Where a run comes from, for `environment.json`: what was said, from where, and which source that was."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from hpc_parallel.launch.run_folder import RunFolder
from hpc_parallel.launch.snapshot import Snapshot
from hpc_parallel.record.safe_read import read_json

State = Callable[[Path], dict[str, Any]]


def origin(
    folder: RunFolder,
    *,
    overrides: Sequence[str],
    config_dir: Path | None,
    snapshot: Snapshot | None,
    state: State | None = None,
) -> dict[str, Any]:
    """What only the submitting process knows; rank 0 adds what only the job does. `state`: `source_state`,
    or one that remembers for many runs what git said.

    `import_path` is what `rerun` imports from, relative to the run folder where it is kept there; null
    where no source was to be kept, empty where there was none but what is installed.
    """
    here, state = Path.cwd(), state or source_state
    said: dict[str, Any] = {
        "command": sys.argv,
        "overrides": list(overrides),
        "config_dir": config_dir and str(config_dir),
        "working_directory": str(here),
        "executable": sys.executable,
        "submit_host": platform.node(),
        "submitted": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "rerun_of": None,
        "import_path": None,
        "checkouts": {},
        **state(here),
    }
    if snapshot is None:
        return said
    kept = [
        os.path.relpath(place, folder.path) if place.is_relative_to(folder.code) else str(place)
        for place in snapshot.import_path
    ]
    if snapshot.origin is not None:  # today's checkouts are not what runs
        first = read_json(snapshot.origin.environment) or {}
        then = {key: first.get(key) for key in ("git_commit", "git_diff", "checkouts")}
        if config_dir is not None and config_dir.is_relative_to(snapshot.origin.code):  # kept again, too
            said["config_dir"] = str(folder.code / config_dir.relative_to(snapshot.origin.code))
        return said | then | {"import_path": kept, "rerun_of": str(snapshot.origin.path)}
    checkouts = {
        str(root): {"copy": copy.name, "git_commit": state(root)["git_commit"]}
        for root, copy in snapshot.copies.items()
    }
    return said | {"import_path": kept, "checkouts": checkouts}


def installed_packages() -> dict[str, str]:
    """Name -> version of all that Python can import here; a broken installation may have no name."""
    return dict(sorted((d.metadata["Name"], d.version) for d in distributions() if d.metadata["Name"]))


def source_state(directory: Path) -> dict[str, Any]:
    """The git commit and uncommitted diff of `directory`; nulls where it is no checkout."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=directory, capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.decode(errors="replace")

    commit = git("rev-parse", "HEAD")
    return {
        "git_commit": commit and commit.strip(),
        "git_diff": None if commit is None else git("diff", "--no-ext-diff", "HEAD"),
    }
