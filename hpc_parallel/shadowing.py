"""Modules that another user has put in the current folder, where `python -m` looks first.

The package imports this before anything else, so that only os and sys, which Python has loaded already, are
needed. Python itself looks for `runpy` and `hpc_parallel` before any code of ours runs: the command
`hpc-parallel` is the safe form.
"""

from __future__ import annotations

import os
import sys

_ENDINGS = (".py", ".pyc", ".so")
# What runs although it hides nothing: Hydra imports every plugin, torch what a distribution names for it.
_SCANNED = (".dist-info", ".egg-info", ".egg-link", "hydra_plugins")


def refuse_shadowed_modules() -> None:
    """End a `python -m hpc_parallel...` with code 2 if it would import modules of another user."""
    if sys.flags.safe_path or not sys.path:
        return
    folder = sys.path[0] or os.curdir
    if not (names := shadowed(folder, sys.path[1:])):
        return
    hidden = ", ".join(map(repr, names[:3]))
    sys.stderr.write(
        f"The current folder {folder!r} holds {hidden} of another user, which Python would import in place "
        "of the installed module. Try the command hpc-parallel, or another folder.\n"
    )
    sys.exit(2)


def shadowed(folder: str, import_path: list[str]) -> list[str]:
    """Names in `folder` that another user could have put there and that Python would import.

    import_path: the folders after it, whose modules they hide.
    """
    try:
        status = os.stat(folder)
        if _is_own(status) and not status.st_mode & 0o022:
            return []
        with os.scandir(folder) as entries:
            foreign = [
                entry.name for entry in entries
                if _is_module(entry)
                and not (_is_own(status) and _is_own(entry.stat(follow_symlinks=False)))
            ]  # fmt: skip
    except OSError:
        return []
    known = {*sys.stdlib_module_names} if foreign else set()
    for place in import_path if foreign else ():
        try:
            known |= {name.partition(".")[0] for name in os.listdir(place)}
        except OSError:
            continue  # a zip file, say
    known -= {"hpc_parallel"}
    return sorted(name for name in foreign if name.partition(".")[0] in known or name.endswith(_SCANNED))


def _is_own(status: os.stat_result) -> bool:
    return status.st_uid in (os.geteuid(), 0)


def _is_module(entry: os.DirEntry[str]) -> bool:
    """A folder counts with its __init__ alone: without one, an installed module comes first."""
    if entry.name.endswith((*_ENDINGS, *_SCANNED)):
        return True
    return any(os.path.exists(os.path.join(entry.path, f"__init__{ending}")) for ending in _ENDINGS)
