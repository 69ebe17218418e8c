"""The checkpoints of a run on disk: which are complete, which are undamaged, which can be removed.

This module does not import torch because the login node uses it too. A checkpoint is written as
`.step-<n>`, renamed to `step-<n>`, and counts once its marker exists. The marker holds the checksum of
`manifest.json`. The manifest holds the checksums of all other files, the step, and the configuration of
the run. Checksums detect torn, truncated and flipped bytes. They do not protect against forgery:
`record.trust` checks who can write there. The fastest checksum is therefore enough; SHA-256 is slower
than a current disk.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_128 as Digest

from hpc_parallel.problems import print_warning
from hpc_parallel.record.metrics_file import size
from hpc_parallel.record.safe_read import (
    DamagedError,
    is_real_folder,
    list_folder,
    open_regular,
    parse_json,
    read_bytes,
    read_json,
)
from hpc_parallel.record.safe_write import write_json, write_text
from hpc_parallel.record.values import integer, table, text

MANIFEST, MARKER, CHECKSUM = "manifest.json", "complete", "xxh3_128"
BEST = "best.json"
OF_BEST = "best"  # names the best checkpoint where a step is asked for
_DAMAGED = "damaged-step-"
_NAME = re.compile(r"step-(0|[1-9][0-9]{0,17})")
_DAMAGED_NAME = re.compile(rf"{_DAMAGED}([0-9]{{1,18}})")
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
_CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that has its marker. `damage` checks whether its files are intact."""

    path: Path
    step: int

    @property
    def manifest(self) -> dict[str, Any]:
        """The content of `manifest.json`. Raises DamagedError."""
        path = self.path / MANIFEST
        value = read_json(path)
        if value is None:
            raise DamagedError(path, "it is missing")
        return value

    def damage(self, *, part: int = 0, parts: int = 1) -> str | None:
        """Check the manifest and every `parts`-th file, starting at file `part`.

        Returns what is damaged, or None.
        """
        try:
            content = read_bytes(self.path / MANIFEST)
            marker = read_bytes(self.path / MARKER).decode(errors="replace")
            if Digest(content).hexdigest() != marker.strip():
                return f"{MANIFEST} is not what was written"
            manifest = table(parse_json(content.decode()))
            if manifest.get("step") != self.step:
                return f"{MANIFEST} is of step {manifest.get('step')}"
            if not (files := table(manifest.get("files"))):
                return f"{MANIFEST} lists no files"
            return next(
                filter(None, (self._damage_of(name, files) for name in sorted(files)[part::parts])), None
            )
        except DamagedError as error:
            return f"{error.path.name}: {error.reason}"
        except FileNotFoundError as error:
            return f"{Path(error.filename).name} is missing"
        except ValueError as error:
            return f"{MANIFEST}: {error}"

    def _damage_of(self, name: str, files: Mapping[str, Any]) -> str | None:
        listed = table(files[name])
        size_bytes = integer(listed.get("bytes"))
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            return f"{MANIFEST} names {name!r}, which is not a file of a checkpoint"
        with open_regular(self.path / name) as file:
            actual_bytes = os.fstat(file.fileno()).st_size
        if actual_bytes != size_bytes:
            return f"{name} has {actual_bytes} of {size_bytes} bytes"
        if checksum(self.path / name) != text(listed.get(CHECKSUM)):
            return f"{name} is not what was written (its checksum differs)"
        return None


def complete(folder: Path) -> list[Checkpoint]:
    """The checkpoints in `folder` that have their marker, newest first; links and files do not count."""
    checkpoints = [
        Checkpoint(Path(entry.path), step=int(match[1]))
        for entry in list_folder(folder)
        if (match := _NAME.fullmatch(entry.name)) and is_real_folder(entry) and _is_marked(Path(entry.path))
    ]
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.step, reverse=True)


def skipped(folder: Path) -> list[str]:
    """Names of links and files that are named like a checkpoint. They are never read or removed."""
    return sorted(
        entry.name
        for entry in list_folder(folder)
        if _NAME.fullmatch(entry.name) and not is_real_folder(entry)
    )


def _is_marked(path: Path) -> bool:
    try:
        return stat.S_ISREG((path / MARKER).lstat().st_mode)
    except OSError:
        return False


def unfinished_folder(folder: Path, step: int) -> Path:
    """The folder in which the checkpoint of `step` is written before it is renamed."""
    return folder / f".step-{step}"


def publish(
    folder: Path,
    *,
    step: int,
    files: Mapping[str, Mapping[str, Any]],
    about: Mapping[str, Any],
) -> None:
    """Turn the `unfinished_folder` into a checkpoint: write its manifest, rename it, write its marker.

    Each of these three changes is on the disk before the next one begins.

    files: name -> its `bytes` and its CHECKSUM; about: further entries of the manifest.
    """
    written, path = unfinished_folder(folder, step), folder / f"step-{step}"
    manifest = json.dumps({"step": step, **about, "files": files}, indent=1) + "\n"
    write_text(written / MANIFEST, manifest)
    sync_folder(written)
    if path.is_symlink() or path.is_file():  # not a checkpoint (`skipped`), but named like this one
        path.rename(folder / f"not-a-checkpoint-{path.name}")
    elif path.exists():  # a damaged checkpoint, whose step was trained again
        (path / MARKER).unlink(missing_ok=True)
        shutil.rmtree(path)
    written.rename(path)
    write_text(path / MARKER, Digest(manifest.encode()).hexdigest() + "\n")
    sync_folder(path)
    sync_folder(folder)
    for entry in list_folder(folder):
        damaged = _DAMAGED_NAME.fullmatch(entry.name)
        if damaged and int(damaged[1]) <= step and is_real_folder(entry):  # the new checkpoint replaces it
            shutil.rmtree(entry.path)


def keep_best(folder: Path, *, step: int, loss: float) -> None:
    """Record that the checkpoint of `step` is the best one, so that `prune` keeps it."""
    write_json(folder / BEST, {"step": step, "validation_loss": loss})


def best_step(folder: Path) -> int | None:
    """The step of the best checkpoint; None if none is recorded. Raises DamagedError."""
    return integer((read_json(folder / BEST) or {}).get("step"))


def prune(folder: Path, *, keep_last: int, keep_every: int | None) -> None:
    """Remove complete checkpoints except the newest `keep_last`, every `keep_every`-th step and the best."""
    try:
        best = best_step(folder)
    except DamagedError as error:
        print_warning(f"no checkpoint is removed: {error}")
        return
    for checkpoint in complete(folder)[keep_last:]:
        if not _is_kept(checkpoint, best=best, keep_every=keep_every):
            (checkpoint.path / MARKER).unlink()  # first, so that a half-removed checkpoint does not count
            shutil.rmtree(checkpoint.path)


def _is_kept(checkpoint: Checkpoint, *, best: int | None, keep_every: int | None) -> bool:
    return checkpoint.step == best or (keep_every is not None and checkpoint.step % keep_every == 0)


def shortage(folder: Path, *, keep_last: int, keep_every: int | None) -> str | None:
    """Why the next two checkpoints, as large as the newest, will not be written; None if nothing is known.

    The one that is removed between them makes room for the second. A quota counts where the file system
    can reserve space (fallocate(2)), or reports the quota as its size.
    """
    checkpoints = complete(folder)
    listed = table(checkpoints[0].manifest.get("files")) if checkpoints else {}
    size_bytes = sum(integer(table(file).get("bytes")) or 0 for file in listed.values())
    best = best_step(folder)
    makes_room = any(
        not _is_kept(checkpoint, best=best, keep_every=keep_every)
        for checkpoint in checkpoints[keep_last - 1 :]
    )
    needed = size_bytes if makes_room else 2 * size_bytes
    status = os.statvfs(folder)
    if (free := status.f_bavail * status.f_frsize) < needed:
        return f"has {size(free)} free, and the next two checkpoints need {size(needed)}"
    if needed and not _is_memory(folder) and (reason := _refuses(folder, needed)):
        return f"does not hold the next two checkpoints, which need {size(needed)}: {reason}"
    return None


def _is_memory(folder: Path) -> bool:
    """Whether the files lie in memory, which a reservation would take from the job."""
    device = os.stat(folder).st_dev
    number = f" {os.major(device)}:{os.minor(device)} "
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return any(number in line and " - tmpfs " in line for line in mounts)


def _refuses(folder: Path, size_bytes: int) -> str | None:
    """Why the file system does not reserve so much for this user; None if it does, or can't tell.

    Not os.posix_fallocate: where the file system can't reserve, that writes every block.
    """
    reserve = ctypes.CDLL(None, use_errno=True).fallocate
    reserve.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            failed = reserve(file.fileno(), _KEEP_SIZE, 0, size_bytes) != 0
            number = ctypes.get_errno() if failed else 0
    except OSError as error:  # no room for one more file
        number = error.errno or 0
    return os.strerror(number) if number in (errno.EDQUOT, errno.ENOSPC) else None


def clear(folder: Path) -> None:
    """Remove checkpoints that an interrupted run left half-written or half-removed."""
    complete_paths = {checkpoint.path for checkpoint in complete(folder)}
    for entry in list_folder(folder):
        incomplete = _NAME.fullmatch(entry.name.lstrip(".")) and Path(entry.path) not in complete_paths
        if incomplete and is_real_folder(entry):
            shutil.rmtree(entry.path)


def set_aside_after(folder: Path, *, step: int) -> None:
    """Rename all checkpoints newer than `step`, so that they do not count: all of them are damaged.

    `publish` removes them once it has written a checkpoint of their step or a later one.
    """
    for checkpoint in complete(folder):
        if checkpoint.step > step:
            aside = folder / f"{_DAMAGED}{checkpoint.step}"
            shutil.rmtree(aside, ignore_errors=True)
            checkpoint.path.rename(aside)


def checksum(path: Path) -> str:
    """The checksum of a file. Raises FileNotFoundError and DamagedError."""
    digest = Digest()
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Write a folder's entries to the disk. Until then, a new name in the folder is not durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
