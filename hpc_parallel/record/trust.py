"""Who else could write what this user is about to run or to unpickle."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from hpc_parallel.problems import ConfigError, spell

_MOST_LINKS = 40  # as the kernel follows (path_resolution(7))


class UntrustedError(RuntimeError):
    """Another user may write here; the message says where, and what mends it."""


def require_private(path: Path, *, parents: bool = True) -> None:
    """Nobody but this user (and root) can change what is at `path`, or put something else in its place.

    Every folder on the way counts, and every link: who may write one, unless it is sticky, can rename what
    is in it. What lies behind a folder that only its owner may enter is out of others' reach whatever its
    own mode. A group that is the user's alone (useradd's own, of the same name) is the user.

    parents: false looks at `path` alone.

    Raises UntrustedError with the first place that fails and its mend; FileNotFoundError.
    """
    user, closed = os.geteuid(), False
    places = list(_way(path)) if parents else [path]
    for index, place in enumerate(places):
        status = place.lstat() if parents else place.stat()
        if status.st_uid not in (user, 0) and not _is_roots_in_a_container(place, status.st_uid):
            owner = _name_of(status.st_uid)
            raise UntrustedError(
                f"{place} belongs to {owner}, who could put other content there. Use a folder of your own."
            )
        if stat.S_ISLNK(status.st_mode):
            continue  # a link's mode says nothing: who may change it is its folder's matter
        sticky = status.st_mode & stat.S_ISVTX and index < len(places) - 1  # its entries are their owners'
        if not closed and not sticky and (who := _other_writers(status, user=user)):
            mend = f"chmod go-w {place}" if status.st_uid == user else "use a folder of your own"
            raise UntrustedError(
                f"{place} (mode {stat.S_IMODE(status.st_mode):04o}) can be written by {who}. Try: {mend}"
            )
        closed = closed or (stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o011)


def _is_roots_in_a_container(place: Path, owner: int) -> bool:
    """Whether root owns a top-level folder, as a user namespace without root shows it (Apptainer, podman).

    There every unmapped user looks like "nobody" (user_namespaces(7)), but only root makes top-level folders.
    """
    if len(place.parts) > 2:
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
    """Refuse to run from `folder` if others could replace what is in it, unless the user trusts them.

    key: what named the folder. Raises ConfigError.
    """
    if shared_folder:
        return
    try:
        require_private(folder)
    except UntrustedError as error:
        raise ConfigError([
            f"{key} = {spell(str(folder))} would hold what the run executes, and others could replace it: "
            f"{str(error).rstrip('.')}. If you trust them: launcher.shared_folder=true"
        ]) from error  # fmt: skip


def owner_name(path: Path) -> str | None:
    """The name of the user that owns `path`; None for this user and root, and if there is nothing."""
    try:
        owner = path.lstat().st_uid
    except OSError:
        return None
    return None if owner in (os.geteuid(), 0) else _name_of(owner)


def _other_writers(status: os.stat_result, *, user: int) -> str | None:
    if status.st_mode & stat.S_IWOTH:
        return "anyone"
    if status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid, user=user):
        return f"the group {_group_of(status.st_gid)}"
    return None


def _is_own_group(group: int, *, user: int) -> bool:
    try:
        known, who = grp.getgrgid(group), pwd.getpwuid(user)
    except KeyError:
        return False
    return group == who.pw_gid and known.gr_name == who.pw_name and set(known.gr_mem) <= {who.pw_name}


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


def _way(path: Path) -> Iterator[Path]:
    """Every folder and link that decides where `path` leads, from the root to what it names."""
    parts = list(path.absolute().parts[1:])
    here, links = Path("/"), 0
    yield here
    while parts:
        part = parts.pop(0)
        if part == "..":
            here = here.parent
            continue
        place = here / part
        yield place
        if place.is_symlink():
            links += 1
            if links > _MOST_LINKS:
                raise UntrustedError(f"{path} leads through too many links.")
            target = Path(os.readlink(place))
            here = Path("/") if target.is_absolute() else here
            parts = [part for part in target.parts if part != "/"] + parts
        else:
            here = place
