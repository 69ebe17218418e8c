"""The checkpoints of a run on disk: which are complete, which are sound, which may go.

Torch-free: the login node asks too. A checkpoint is written as `.step-<n>`, renamed to `step-<n>`, and
counts once its marker exists; the marker holds the checksum of `manifest.json`, which holds those of all
other files, the step, and the configuration of the run. Checksums are there for torn, cut and flipped
bytes, not against forgers (who may write there is asked by `launch.trust`), so the fastest will do: to
SHA-256 a disk of today waits.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_128 as Digest

from hpc_parallel.record.safe_read import (
    DamagedError,
    is_real_folder,
    list_folder,
    open_regular,
    parse_json,
    read_bytes,
    read_json,
)
from hpc_parallel.record.safe_write import write_text
from hpc_parallel.record.values import table, text, whole

MANIFEST, MARKER, CHECKSUM = "manifest.json", "complete", "xxh3_128"
_DAMAGED = "damaged-step-"
_NAME = re.compile(r"step-(0|[1-9][0-9]{0,17})")
_ASIDE = re.compile(rf"{_DAMAGED}([0-9]{{1,18}})")
_CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Checkpoint:
    """One that has its marker; whether its files are what was written, `damage` tells."""

    path: Path
    step: int

    @property
    def manifest(self) -> dict[str, Any]:
        """Raises DamagedError."""
        path = self.path / MANIFEST
        value = read_json(path)
        if value is None:
            raise DamagedError(path, "it is missing")
        return value

    def damage(self, *, part: int = 0, parts: int = 1) -> str | None:
        """What is wrong with it, None if nothing is: its list of files, and each `parts`-th of them."""
        try:
            listed = read_bytes(self.path / MANIFEST)
            marker = read_bytes(self.path / MARKER).decode(errors="replace")
            if Digest(listed).hexdigest() != marker.strip():
                return f"{MANIFEST} is not what was written"
            manifest = table(parse_json(listed.decode()))
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
        size_bytes = whole(listed.get("bytes"))
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            return f"{MANIFEST} names {name!r}, which is no file of a checkpoint"
        with open_regular(self.path / name) as file:
            found_bytes = os.fstat(file.fileno()).st_size
        if found_bytes != size_bytes:
            return f"{name} has {found_bytes} of {size_bytes} bytes"
        if checksum(self.path / name) != text(listed.get(CHECKSUM)):
            return f"{name} is not what was written (its checksum differs)"
        return None


def complete(folder: Path) -> list[Checkpoint]:
    """Those in `folder` that have their marker, newest first. A link or a file of such a name is none."""
    checkpoints = [
        Checkpoint(Path(entry.path), step=int(match[1]))
        for entry in list_folder(folder)
        if (match := _NAME.fullmatch(entry.name)) and is_real_folder(entry) and _is_marked(Path(entry.path))
    ]
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.step, reverse=True)


def skipped(folder: Path) -> list[str]:
    """Names of links and files that are called like a checkpoint; nothing reads, replaces or removes them."""
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


def beside(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written."""
    return folder / f".step-{step}"


def publish(
    folder: Path,
    *,
    step: int,
    files: Mapping[str, Mapping[str, Any]],
    about: Mapping[str, Any],
) -> None:
    """Make what was written `beside` a checkpoint: listed, renamed, marked, each on the disk before the next.

    files: name -> its `bytes` and its CHECKSUM.
    """
    written, path = beside(folder, step), folder / f"step-{step}"
    manifest = json.dumps({"step": step, **about, "files": files}, indent=1) + "\n"
    write_text(written / MANIFEST, manifest)
    sync_folder(written)
    if path.is_symlink() or path.is_file():  # no checkpoint (`skipped`), and now in the way of one
        path.rename(folder / f"not-a-checkpoint-{path.name}")
    elif path.exists():  # damaged, and trained anew since
        (path / MARKER).unlink(missing_ok=True)
        shutil.rmtree(path)
    written.rename(path)
    write_text(path / MARKER, Digest(manifest.encode()).hexdigest() + "\n")
    for each in (path, folder):
        sync_folder(each)
    for entry in list_folder(folder):
        aside = _ASIDE.fullmatch(entry.name)
        if aside and int(aside[1]) <= step and is_real_folder(entry):  # there is better now
            shutil.rmtree(entry.path)


def prune(folder: Path, *, keep_last: int, keep_every: int | None) -> None:
    """Remove complete checkpoints but the newest `keep_last` and those of every `keep_every`-th step."""
    for checkpoint in complete(folder)[keep_last:]:
        if keep_every is None or checkpoint.step % keep_every:
            (checkpoint.path / MARKER).unlink()  # first: half removed, it must not count
            shutil.rmtree(checkpoint.path)


def clear(folder: Path) -> None:
    """Remove what a run that died left half written or half removed."""
    sound = {checkpoint.path for checkpoint in complete(folder)}
    for entry in list_folder(folder):
        torn = _NAME.fullmatch(entry.name.lstrip(".")) and Path(entry.path) not in sound
        if torn and is_real_folder(entry):
            shutil.rmtree(entry.path)


def set_aside_after(folder: Path, *, step: int) -> None:
    """Take damaged checkpoints, all that are newer than the sound one of `step`, out of the count, until
    one of their step or a later one takes their place."""
    for checkpoint in complete(folder):
        if checkpoint.step > step:
            aside = folder / f"{_DAMAGED}{checkpoint.step}"
            shutil.rmtree(aside, ignore_errors=True)
            checkpoint.path.rename(aside)


def checksum(path: Path) -> str:
    digest = Digest()
    """Raises FileNotFoundError and DamagedError."""
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """A new name is on the disk only once its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
