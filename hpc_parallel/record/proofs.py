"""Records which models gave the same results as one device on which layouts.

Each proof is one small file in this user's cache.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from hpc_parallel.record.safe_write import write_json
from hpc_parallel.record.trust import UntrustedError, require_private


def proofs_folder(environment: Mapping[str, str]) -> Path:
    """The folder of the proofs, below XDG_CACHE_HOME or ~/.cache."""
    cache = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache, "hpc_parallel", "proofs")


def is_proven(key: str, *, folder: Path) -> bool:
    """Whether the proof `key` (hexadecimal) is recorded, in a folder that only this user can change."""
    try:
        require_private(folder)
        return (folder / f"{key}.json").is_file()
    except (OSError, UntrustedError):
        return False


def record_proof(key: str, *, folder: Path, about: Mapping[str, object]) -> None:
    """Record the proof. If the folder can't be written, the next run only takes a few seconds longer."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(folder / f"{key}.json", {**about, "time": datetime.now(UTC).isoformat()})
    except OSError:
        pass
