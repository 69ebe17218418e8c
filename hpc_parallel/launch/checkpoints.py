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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_128 as Digest

from hpc_parallel.record.safe_write import write_text

MANIFEST, MARKER, CHECKSUM = "manifest.json", "complete", "xxh3_128"
_DAMAGED = "damaged-step-"
_NAME = re.compile(r"step-(\d+)")
_CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Checkpoint:
    """One that has its marker; whether its files are what was written, `damage` tells."""

    path: Path
    step: int

    @property
    def manifest(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self.path / MANIFEST).read_text(encoding="utf-8"))
        return value

    def damage(self, *, part: int = 0, parts: int = 1) -> str | None:
        """What is wrong with it, None where nothing is: its list of files, and each `parts`-th of them."""
        try:
            listed = (self.path / MANIFEST).read_bytes()
            if Digest(listed).hexdigest() != (self.path / MARKER).read_text(encoding="utf-8").strip():
                return f"{MANIFEST} is not what was written"
            files = json.loads(listed)["files"]
            for name in sorted(files)[part::parts]:
                size = (self.path / name).stat().st_size
                if size != files[name]["bytes"]:
                    return f"{name} has {size} of {files[name]['bytes']} bytes"
                if checksum(self.path / name) != files[name][CHECKSUM]:
                    return f"{name} is not what was written (its checksum differs)"
        except (OSError, ValueError, KeyError) as error:
            return f"{type(error).__name__}: {error}"
        return None


def complete(folder: Path) -> list[Checkpoint]:
    """Those in `folder` that have their marker, newest first."""
    found = [
        Checkpoint(path, step=int(match[1]))
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := _NAME.fullmatch(path.name)) and (path / MARKER).is_file()
    ]
    return sorted(found, key=lambda checkpoint: checkpoint.step, reverse=True)


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
    if path.exists():  # damaged, and trained anew since
        (path / MARKER).unlink(missing_ok=True)
        shutil.rmtree(path)
    written.rename(path)
    write_text(path / MARKER, Digest(manifest.encode()).hexdigest() + "\n")
    for each in (path, folder):
        sync_folder(each)
    for damaged in folder.glob(f"{_DAMAGED}*"):
        if int(damaged.name.removeprefix(_DAMAGED)) <= step:  # there is better now
            shutil.rmtree(damaged)


def prune(folder: Path, *, keep_last: int, keep_every: int | None) -> None:
    """Remove complete checkpoints but the newest `keep_last` and those of every `keep_every`-th step."""
    for checkpoint in complete(folder)[keep_last:]:
        if keep_every is None or checkpoint.step % keep_every:
            (checkpoint.path / MARKER).unlink()  # first: half removed, it must not count
            shutil.rmtree(checkpoint.path)


def clear(folder: Path) -> None:
    """Remove what a run that died left half written or half removed."""
    whole = {checkpoint.path for checkpoint in complete(folder)}
    for path in folder.iterdir() if folder.is_dir() else ():
        if path not in whole and _NAME.fullmatch(path.name.lstrip(".")):
            shutil.rmtree(path)


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
    with path.open("rb") as file:
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
