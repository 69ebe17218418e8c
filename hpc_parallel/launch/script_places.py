"""The places of the parts of a user's script: in the source that the run keeps, or their original places."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from hpc_parallel.config.script import absolute, mentions
from hpc_parallel.config.task_schema import ScriptConfig
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.snapshot import Snapshot, kept_code

_OWN_FILE = re.compile(rb"\b__file__\b|\bargv\[0\]")


def script_folders(script: ScriptConfig) -> list[Path]:
    """The folder of a Python file, from which Python imports; if it is a link, that of its target.

    Also the folder of a program that another run keeps.
    """
    folders = {key: absolute(text).resolve().parent for key, text in _paths(script).items()}
    return [folder for key, folder in folders.items() if key == "file" or kept_code(folder) is not None]


def imports_here(script: ScriptConfig) -> bool:
    """Whether Python imports from the working directory: for `-m` and for the classes of our own tasks."""
    return not (script.file or script.command)


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
    """A line for a script that the run does not keep, and for one that may write beside its own file."""
    for text in _paths(script).values():
        if snapshot is not None and _kept(text, snapshot) is None:
            yield f"not kept    {text} (git ignores it, or it is too large): later edits change the run"
        elif snapshot is not None and mentions(absolute(text), _OWN_FILE):
            yield (
                f"in a copy   {text} uses __file__: what it writes there is not in the copy of the next run. "
                "Write to {run}, or try launcher.snapshot=false, which runs it in place."
            )


def _paths(script: ScriptConfig) -> dict[str, str]:
    paths = {"file": script.file}
    if script.command and os.sep in script.command:
        paths["command"] = script.command
    return {key: text for key, text in paths.items() if text}


def _kept(text: str, snapshot: Snapshot | None) -> Path | None:
    return None if snapshot is None else snapshot.copy_of(absolute(text))
