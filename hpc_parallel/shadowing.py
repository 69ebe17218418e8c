"""Protects against modules of another user in the current folder, where `python -m` looks first.

The package runs this before it imports anything else. Until the folder is known to be safe, it is not on the
import path, and only modules that Python has already loaded are used. Python itself looks for `runpy` and
`hpc_parallel` before any code of this package runs. The command `hpc-parallel` avoids this.
"""

from __future__ import annotations

import os
import sys

PUBLIC = "other users may write there; try chmod go-w"
_COMMANDS = ("hpc_parallel", "hpc_parallel.run")
_ENDINGS = (".py", ".pyc", ".so")
# No code names these modules, but they are imported: Hydra's plugins, and what packages register with torch.
_SCANNED = (".dist-info", ".egg-info", ".egg-link", "hydra_plugins")


def guard_import_path(package: str) -> None:
    """Remove a folder that other users can write to from the import path of `python -m hpc_parallel...`.

    A command imports nothing from the current folder, where a `statistics.py` would hide Python's own.

    package: the folder of this package. If it is in the current folder, that folder stays on the import path,
    and this process ends with exit code 2 if another user's module would hide an installed one.
    """
    if sys.flags.safe_path or not sys.path:
        return
    folder = sys.path.pop(0)
    if is_private(folder or os.curdir):
        words = sys.orig_argv
        if "-m" not in words or words[words.index("-m") + 1] not in _COMMANDS:
            sys.path.insert(0, folder)
        return
    path = os.path.realpath(folder or os.curdir)
    if os.path.dirname(os.path.realpath(package)) == path:
        if names := hiding(path, sys.path):
            hidden = ", ".join(map(repr, names[:3]))
            _say(f"The folder {path!r} holds {hidden} of another user in place of the installed modules. "
                 "Try the command hpc-parallel, or another folder.")  # fmt: skip
            sys.exit(2)
        sys.path.insert(0, folder)
    elif any(_is_module(entry) for entry in _entries(path)):
        import shlex  # not from the folder, which is not on the path

        _say(f"Python modules in {path!r} are not imported, because other users may write there. "
             f"If you trust them: PYTHONPATH={shlex.quote(path)}")  # fmt: skip


def is_private(folder: str) -> bool:
    """Whether only this user and root can create files in the folder; False if it does not exist."""
    try:
        status = os.stat(folder)
    except OSError:
        return False
    if not _is_own(status) or status.st_mode & 0o002:
        return False
    return not status.st_mode & 0o020 or is_own_group(status.st_gid)


def hiding(folder: str, import_path: list[str]) -> list[str]:
    """Names in `folder` that belong to another user and hide a module of `import_path`."""
    foreign = [entry.name for entry in _entries(folder) if _is_module(entry) and not _is_own_entry(entry)]
    installed = {*sys.stdlib_module_names} if foreign else set()
    for path in import_path if foreign else ():
        installed |= {entry.name.partition(".")[0] for entry in _entries(path)}
    installed -= {"hpc_parallel"}
    return sorted(name for name in foreign if name.partition(".")[0] in installed or name.endswith(_SCANNED))


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:  # for example a zip file
        return []


def _is_module(entry: os.DirEntry[str]) -> bool:
    """Whether the entry can be imported. A folder without __init__ does not hide an installed module."""
    if entry.name.endswith((*_ENDINGS, *_SCANNED)):
        return True
    return any(child.name.startswith("__init__.") for child in _entries(entry.path))


def _is_own_entry(entry: os.DirEntry[str]) -> bool:
    try:
        return _is_own(entry.stat(follow_symlinks=False))
    except OSError:
        return False


def _is_own(status: os.stat_result) -> bool:
    return status.st_uid in (os.geteuid(), 0)


def is_own_group(group: int) -> bool:
    """Whether the user is the group's only member. useradd creates such a group (see record/trust.py)."""
    import grp  # safe: the current folder is not on the import path
    import pwd

    try:
        entry, user = grp.getgrgid(group), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group == user.pw_gid and entry.gr_name == user.pw_name and set(entry.gr_mem) <= {user.pw_name}


def _say(message: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"{message}\n")
