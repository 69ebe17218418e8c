"""Where a run comes from, for `environment.json`: what was said, from where, and which source that was."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from hpc_parallel.record.credentials import is_credential_file
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import read_json
from hpc_parallel.record.snapshot import Snapshot

DIFF_BYTES = 4 * 2**20  # environment.json must stay readable (record/safe_read.py)
State = Callable[[Path], dict[str, Any]]


def origin(
    folder: RunFolder,
    *,
    overrides: Sequence[str],
    config_dir: Path | None,
    snapshot: Snapshot | None,
    command: Sequence[str] | None = None,
    state: State | None = None,
) -> dict[str, Any]:
    """What only the submitting process knows; rank 0 adds what only the job does. `command`: None for the
    command line of this process. `state`: `source_state`, or one that remembers for many runs what git said.

    `import_path` is what `rerun` imports from, relative to the run folder where it is kept there; null
    where no source was to be kept, empty where there was none but what is installed.
    """
    here, state = Path.cwd(), state or source_state
    said: dict[str, Any] = {
        "command": sys.argv if command is None else list(command),
        "overrides": list(overrides),
        "config_dir": config_dir and str(config_dir),
        "working_directory": str(here),
        "executable": sys.executable,
        "submit_host": platform.node(),
        "submitted": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "rerun_of": None,
        "import_path": None,
        "checkouts": {},
        "left_out": [],
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
    left_out = sorted({*said["left_out"], *snapshot.left_out})
    return said | {"import_path": kept, "checkouts": checkouts, "left_out": left_out}


def installed_packages() -> dict[str, str]:
    """Name -> version of all that Python can import here; a broken installation may have no name."""
    return dict(sorted((d.metadata["Name"], d.version) for d in distributions() if d.metadata["Name"]))


def source_state(directory: Path) -> dict[str, Any]:
    """The git commit and uncommitted diff of `directory`; nulls if it is no checkout.

    The diff leaves out files that look like credentials, and is null if it is larger than DIFF_BYTES;
    `left_out` names what is missing.
    """

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=directory, capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.decode(errors="replace")

    if (commit := git("rev-parse", "HEAD")) is None:
        return {"git_commit": None, "git_diff": None, "left_out": []}
    words = ("diff", "--no-ext-diff", "--no-renames", "--no-relative", "--submodule=short")
    changed = (git(*words, "--name-only", "-z", "HEAD") or "").split("\0")
    left_out = [name for name in changed if is_credential_file(name)]
    excluded = [f":(top,exclude,literal){name}" for name in left_out]
    diff = git(*words, "HEAD", "--", ":(top)", *excluded)
    if diff is not None and len(json.dumps(diff)) > DIFF_BYTES:
        return {"git_commit": commit.strip(), "git_diff": None, "left_out": [*left_out, "git_diff"]}
    return {"git_commit": commit.strip(), "git_diff": diff, "left_out": left_out}
