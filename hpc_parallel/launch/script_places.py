"""The places of the parts of a user's script: in the source that the run keeps, or their original places."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from hpc_parallel.config.script import absolute
from hpc_parallel.config.script_schema import ScriptConfig
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.snapshot import Snapshot


def script_folders(script: ScriptConfig) -> list[Path]:
    """The folder of a Python file: the script imports from it."""
    return [absolute(script.file).parent] if script.file else []


def script_places(script: ScriptConfig, *, folder: RunFolder, snapshot: Snapshot | None) -> dict[str, str]:
    """The keys `file`, `command` and `working_directory` for `config.yaml`.

    A path in the kept source is relative to the run folder, every other one is absolute. A command without a
    slash stays a name, which each host looks up on its PATH.
    """
    places = {"working_directory": str(absolute(script.working_directory or "."))}
    if script.working_directory and script.working_directory.startswith("{run}"):
        places["working_directory"] = script.working_directory
    for key, text in _paths(script).items():
        kept = _kept(text, snapshot)
        places[key] = str(absolute(text)) if kept is None else str(kept.relative_to(folder.path))
    return places


def kept_notes(script: ScriptConfig, *, snapshot: Snapshot | None) -> Iterator[str]:
    """A line for a script that the run does not keep."""
    for text in _paths(script).values():
        if snapshot is not None and _kept(text, snapshot) is None:
            yield f"not kept    {text} (git ignores it, or it is too large): later edits change the run"


def _paths(script: ScriptConfig) -> dict[str, str]:
    paths = {"file": script.file}
    if script.command and os.sep in script.command:
        paths["command"] = script.command
    return {key: text for key, text in paths.items() if text}


def _kept(text: str, snapshot: Snapshot | None) -> Path | None:
    return None if snapshot is None else snapshot.copy_of(absolute(text))
