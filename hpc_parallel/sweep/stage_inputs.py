"""Whether a stage that is done must run again: its configuration, and the files that it reads.

A file counts by size and time. Files that a stage writes are among the words of its line, too. A file that
has changed while the stage or one before it ran therefore counts as written by it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from hpc_parallel.config.script import absolute
from hpc_parallel.launch.prepare import PreparedRun
from hpc_parallel.record.recorded import RecordedRun
from hpc_parallel.record.values import flatten

Window = tuple[float, float]
_OWN_CLASS = "._target_"
_PACKAGES = ("hpc_parallel.", "torch.")
# Where and how long a run computes, and what is told of it: no input of its result.
_PLACES = (
    "run_dir", "name", "dry_run", "then", "plan.", "sweep.", "launcher.kind", "launcher.wait",
    "launcher.partition", "launcher.account", "launcher.qos", "launcher.constraint", "launcher.exclude",
    "launcher.wckey", "launcher.time_minutes", "launcher.notify", "launcher.grace_s", "launcher.snapshot",
)  # fmt: skip
_CLOCKS_S = 1.0  # a file server rounds times


def fingerprint(
    run: PreparedRun, words: Sequence[str], *, folders: Mapping[str, Path], before: Sequence[str]
) -> str:
    """A digest of what a stage does. before: the digests of the stages before it; folders: of all stages."""
    settings = {key: value for key, value in flatten(run.values).items() if not key.startswith(_PLACES)}
    text = json.dumps([list(words), settings, list(before)], sort_keys=True, default=str)
    for name, folder in folders.items():
        text = text.replace(str(folder), f"{{{name}}}")
    return hashlib.sha256(text.encode()).hexdigest()


def files_of(run: PreparedRun, words: Iterable[str], *, folders: Iterable[Path]) -> dict[str, Any]:
    """Each file or folder that the stage names, with its size and time; None if it is missing."""
    values = flatten(run.values)
    texts = [word.rpartition("=")[2] for word in words if not word.startswith("-") or "=" in word]
    texts += [str(values[key]) for key in ("data.path", "weights") if values.get(key)]
    paths = {absolute(text) for text in texts if text and len(text) < 4096 and "\0" not in text}
    paths |= set(_own_modules(values))
    return {str(path): _state(path) for path in sorted(paths) if not any(map(path.is_relative_to, folders))}


def _own_modules(values: Mapping[str, Any]) -> Iterator[Path]:
    """The files in this folder of the user's own classes."""
    for key, value in values.items():
        if f".{key}".endswith(_OWN_CLASS) and isinstance(value, str) and not value.startswith(_PACKAGES):
            path = absolute(value.rpartition(".")[0].replace(".", "/") + ".py")
            if path.is_file():
                yield path


def _state(path: Path) -> list[float] | None:
    """The number of files, their bytes, and the newest time in seconds; None without the file or folder."""
    if not path.exists():
        return None
    files = [path] if not path.is_dir() else [
        Path(folder, name) for folder, _, names in os.walk(path) for name in names
    ]  # fmt: skip
    found = [file.stat() for file in files if file.exists()]
    return [len(found), sum(one.st_size for one in found), max([one.st_mtime for one in found], default=0.0)]


def changed_file(
    before: Mapping[str, Any], now: Mapping[str, Any], *, words: Sequence[str], windows: Sequence[Window]
) -> str | None:
    """A file that has changed since the stage ended; None if there is none. windows: when stages ran."""
    outputs = {word for flag, word in pairwise(words) if flag == "--output"}
    for output in outputs:
        if not absolute(output).exists():
            return output
    for path in sorted({*before, *now}):
        state = now.get(path)
        if before.get(path) == state:
            continue
        if state is None or not any(first <= state[2] <= last for first, last in windows):
            return path
    return None


def window_of(run: RecordedRun) -> Window | None:
    """When the run began and ended, in seconds since 1970; None if it is not known."""
    try:
        times = (run.attempts.started, run.totals.ended)
        first, last = (datetime.fromisoformat(str(text)).timestamp() for text in times)
    except ValueError:
        return None
    return first - _CLOCKS_S, last + _CLOCKS_S
