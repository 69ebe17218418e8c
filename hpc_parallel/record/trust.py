"""Check whether other users could write what this user is about to run or unpickle."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from hpc_parallel.problems import ConfigError, shell_word, spell
from hpc_parallel.shadowing import is_own_group

_MAX_LINKS = 40  # the kernel's limit (path_resolution(7))


class UntrustedError(RuntimeError):
    """Another user may write here; the message names the path and suggests a fix."""


def require_private(path: Path, *, parents: bool = True) -> None:
    """Check that only this user and root can change or replace what is at `path`.

    Every folder and link on the path counts: a user who can write to a folder without the sticky bit can
    rename its entries. If only its owner can enter a folder, others reach nothing below it, whatever the
    modes are there. A group with this user as its only member counts as the user (useradd creates such a
    group with the user's name).

    parents: if false, check `path` alone.

    Raises UntrustedError, which names the first part of the path that fails and a fix, and FileNotFoundError.
    """
    user, closed = os.geteuid(), False
    parts = list(_resolution(path)) if parents else [path]
    for index, part in enumerate(parts):
        status = part.lstat() if parents else part.stat()
        if status.st_uid not in (user, 0) and not _is_roots_in_a_container(part, status.st_uid):
            owner = _name_of(status.st_uid)
            raise UntrustedError(
                f"{part} belongs to {owner}, who could put other content there. Use a folder of your own."
            )
        if stat.S_ISLNK(status.st_mode):
            continue  # the mode of a link has no meaning: its folder decides who can change it
        sticky = status.st_mode & stat.S_ISVTX and index < len(parts) - 1  # only owners can rename entries
        if not closed and not sticky and (writers := _other_writers(status)):
            suggestion = (
                f"chmod go-w {shell_word(part)}" if status.st_uid == user else "use a folder of your own"
            )
            mode = f"{stat.S_IMODE(status.st_mode):04o}"
            raise UntrustedError(f"{part} (mode {mode}) can be written by {writers}. Try: {suggestion}")
        closed = closed or (stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o011)


def _is_roots_in_a_container(path: Path, owner: int) -> bool:
    """Whether root owns a top-level folder that is seen from a user namespace without root.

    In such a namespace (Apptainer, podman), every unmapped user looks like "nobody" (user_namespaces(7)).
    Only root creates top-level folders.
    """
    if len(path.parts) > 2:
        return False
    try:
        unmapped = int(Path("/proc/sys/kernel/overflowuid").read_text())
        ranges = [
            tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()
        ]
    except (OSError, ValueError):
        return False
    return owner == unmapped and not any(first <= 0 < first + count for first, _, count in ranges)


def require_trusted(folder: Path, *, key: str, shared_folder: bool) -> None:
    """Refuse to run from `folder` if others could replace its content, unless the user trusts them.

    folder: an absolute path; if it does not exist, the nearest folder above it counts. key: the setting that
    named it.

    Raises ConfigError.
    """
    if shared_folder:
        return
    try:
        require_private(next(place for place in (folder, *folder.parents) if os.path.lexists(place)))
    except UntrustedError as error:
        raise ConfigError([
            f"{key} = {spell(str(folder))} would hold what the run executes, and others could replace it: "
            f"{str(error).rstrip('.')}. If you trust them: launcher.shared_folder=true"
        ]) from error  # fmt: skip


def owner_name(path: Path) -> str | None:
    """The name of the user who owns `path`; None for this user and root, and if it does not exist."""
    try:
        owner = path.lstat().st_uid
    except OSError:
        return None
    return None if owner in (os.geteuid(), 0) else _name_of(owner)


def _other_writers(status: os.stat_result) -> str | None:
    if status.st_mode & stat.S_IWOTH:
        return "anyone"
    if status.st_mode & stat.S_IWGRP and not is_own_group(status.st_gid):
        return f"the group {_group_of(status.st_gid)}"
    return None


def _name_of(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"


def _group_of(group: int) -> str:
    try:
        return grp.getgrgid(group).gr_name
    except KeyError:
        return str(group)


def _resolution(path: Path) -> Iterator[Path]:
    """Every folder and link through which `path` resolves, from the root to its target."""
    names = list(path.absolute().parts[1:])
    folder, links = Path("/"), 0
    yield folder
    while names:
        name = names.pop(0)
        if name == "..":
            folder = folder.parent
            continue
        entry = folder / name
        yield entry
        if entry.is_symlink():
            links += 1
            if links > _MAX_LINKS:
                raise UntrustedError(f"{path} leads through too many links.")
            target = Path(os.readlink(entry))
            folder = Path("/") if target.is_absolute() else folder
            names = [name for name in target.parts if name != "/"] + names
        else:
            folder = entry
