"""Other users of this machine for tests: an attacker and a victim, with unused uids."""

from __future__ import annotations

import multiprocessing
import os
import pkgutil
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from hpc_parallel import commands

ATTACKER, VICTIM = 64012, 64011  # in the range that Debian reserves for local use
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def call_as(user: int, function: Callable[[], Any], *, timeout_s: float = 120) -> Any:
    """Call `function` in a forked child that has become another user; returns its result.

    That user may not be able to read Python's files, so import what `function` needs before the call. The
    commands of this package are imported here.

    Raises AssertionError with the traceback if `function` raises.
    """
    for module in pkgutil.iter_modules(commands.__path__, f"{commands.__name__}."):
        import_module(module.name)
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
    """A Python that this user can execute; the current one may be in a private home folder."""
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
    """A new folder that every user can enter (pytest's is below a private one). For a fixture."""
    path = Path(tempfile.mkdtemp(prefix="hpc_parallel-")).resolve()
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def give(path: Path, user: int) -> None:
    """Change the owner of the tree at `path` to another user."""
    for entry in (path, *path.rglob("*")):
        os.chown(entry, user, user, follow_symlinks=False)
