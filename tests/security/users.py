"""Other users of this machine, made for a test: an attacker and a victim with uids that nobody has."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ATTACKER, VICTIM = 64012, 64011  # in the range that Debian leaves to local use
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def run_as(user: int, code: str, *words: object, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """Run Python `code` (the standard library alone) as another user; `words` are its sys.argv[1:]."""
    return subprocess.run(
        [interpreter(user), "-c", code, *map(str, words)],
        user=user, group=user, extra_groups=[], cwd="/", env={"PATH": os.environ["PATH"], "HOME": "/"},
        capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip


def call_as(user: int, function: Callable[[], Any], *, timeout_s: float = 60) -> Any:
    """What `function` returns in a forked child that has become another user; raises what it raises.

    Python may lie where that user can't read it: import what `function` needs before.
    """
    fork = multiprocessing.get_context("fork")
    receive, send = fork.Pipe(duplex=False)

    def child() -> None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        try:
            send.send((function(), None))
        except BaseException as error:
            send.send((None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))

    process = fork.Process(target=child)
    process.start()
    try:
        if not receive.poll(timeout_s):
            raise TimeoutError(f"no answer within {timeout_s:g} s")
        value, error = receive.recv()
    finally:
        process.kill()
        process.join()
    if error is not None:
        raise AssertionError(error)
    return value


def interpreter(user: int) -> str:
    """A Python that this user may execute: this one's may lie in a closed home folder."""
    for python in (sys.executable, "/usr/bin/python3"):
        try:
            done = subprocess.run(
                [python, "-c", "import socket"], user=user, group=user, extra_groups=[], cwd="/", check=False
            )
        except OSError:
            continue
        if done.returncode == 0:
            return python
    pytest.skip("no Python here that another user may execute")


def open_folder() -> Iterator[Path]:
    """A new folder that every user can enter: pytest's own lies behind a closed one. For a fixture."""
    path = Path(tempfile.mkdtemp(prefix="hpc_parallel-")).resolve()
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def give(path: Path, user: int) -> None:
    """Make the tree at `path` another user's."""
    for place in (path, *path.rglob("*")):
        os.chown(place, user, user, follow_symlinks=False)
