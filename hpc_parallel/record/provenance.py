"""The origin of a run, for `environment.json`: its command, working directory and source."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from hpc_parallel.record.credentials import is_credential_file
from hpc_parallel.record.git_source import git
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import DamagedError, read_json
from hpc_parallel.record.snapshot import Snapshot

PREDICTED = "predicted"  # the key of the figures that were planned before the start
DIFF_BYTES = 4 * 2**20  # of a diff: environment.json must stay within the limits of record/safe_read.py
GitState = Callable[[Path], dict[str, Any]]
_HEADER = re.compile(r"^(Name|Version):[ \t]*(.*?)[ \t]*$", re.MULTILINE)


def origin(
    folder: RunFolder,
    *,
    overrides: Sequence[str],
    config_dir: Path | None,
    snapshot: Snapshot | None,
    command: Sequence[str] | None = None,
    state: GitState | None = None,
) -> dict[str, Any]:
    """What only the submitting process knows; rank 0 adds what only the job knows.

    command: null for the command line of this process.
    state: `source_state`, or a version that caches git's answers for many runs.

    `import_path` lists the folders from which `rerun` imports. A folder that is kept in the run folder is
    given relative to it. `import_path` is null if no source was to be kept, and empty if all source is
    installed.
    """
    state = state or source_state
    record: dict[str, Any] = {
        "command": sys.argv if command is None else list(command),
        "overrides": list(overrides),
        "config_dir": config_dir and str(config_dir),
        "working_directory": str(Path.cwd()),
        "executable": sys.executable,
        "submit_host": platform.node(),
        "submitted": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "rerun_of": None,
        "import_path": None,
        "checkouts": {},
        "left_out": [],
        **state(Path.cwd()),
    }
    if snapshot is None:
        return record
    record["import_path"] = [
        os.path.relpath(path, folder.path) if path.is_relative_to(folder.code) else str(path)
        for path in snapshot.import_path
    ]
    if snapshot.origin is not None:
        return record | _source_of_first_run(snapshot.origin, folder=folder, config_dir=config_dir)
    checkouts = {
        str(root): {"copy": copy.name, "git_commit": state(root)["git_commit"]}
        for root, copy in snapshot.copies.items()
    }
    left_out = sorted({*record["left_out"], *snapshot.left_out})
    return record | {"checkouts": checkouts, "left_out": left_out}


def read_environment(folder: RunFolder) -> dict[str, Any]:
    """The content of `environment.json`; empty if it can't be read."""
    try:
        return read_json(folder.environment) or {}
    except (OSError, DamagedError):
        return {}


def _source_of_first_run(first: RunFolder, *, folder: RunFolder, config_dir: Path | None) -> dict[str, Any]:
    """The entries of a run that copies the source kept with `first`. The current checkouts are not used."""
    environment = read_json(first.environment) or {}
    entries = {key: environment.get(key) for key in ("git_commit", "git_diff", "checkouts")}
    if config_dir is not None and config_dir.is_relative_to(first.code):  # the copy holds it too
        entries["config_dir"] = str(folder.code / config_dir.relative_to(first.code))
    return entries | {"rerun_of": str(first.path)}


def installed_packages() -> dict[str, str]:
    """Name -> version of all packages that Python can import; a broken one without a name is left out."""
    return dict(_installed_packages())


@cache  # a rank reads them three times: hundreds of small files, often on a network file system
def _installed_packages() -> list[tuple[str, str]]:
    """Names and versions, sorted by name.

    `Distribution.metadata` would parse each file as an e-mail, which takes ten times as long.
    """
    packages = []
    for distribution in distributions():
        # In the order of importlib: the file of a wheel, the file in a folder .egg-info, a file .egg-info.
        texts = map(distribution.read_text, ("METADATA", "PKG-INFO", ""))
        text = next(filter(None, texts), "")
        head = dict(_HEADER.findall(text.partition("\n\n")[0]))
        if name := head.get("Name"):
            packages.append((name, head.get("Version", "")))
    return sorted(packages)


def source_state(directory: Path) -> dict[str, Any]:
    """The git commit and uncommitted diff of `directory`; both null if it is not a checkout.

    The diff leaves out files that look like credentials, and is null if it is larger than DIFF_BYTES.
    `left_out` lists what is missing.
    """
    ask = partial(git, directory, errors="replace")
    if (commit := ask("rev-parse", "HEAD")) is None:
        return {"git_commit": None, "git_diff": None, "left_out": []}
    diff_command = ("diff", "--no-ext-diff", "--no-renames", "--no-relative", "--submodule=short")
    changed = (ask(*diff_command, "--name-only", "-z", "HEAD") or "").split("\0")
    left_out = [name for name in changed if is_credential_file(name)]
    excluded = [f":(top,exclude,literal){name}" for name in left_out]
    diff = ask(*diff_command, "HEAD", "--", ":(top)", *excluded)
    if diff is not None and len(json.dumps(diff)) > DIFF_BYTES:
        return {"git_commit": commit.strip(), "git_diff": None, "left_out": [*left_out, "git_diff"]}
    return {"git_commit": commit.strip(), "git_diff": diff, "left_out": left_out}
