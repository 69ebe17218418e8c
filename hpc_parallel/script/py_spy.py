"""The Python stacks of a process by py-spy (github.com/benfred/py-spy), where it is installed.

py-spy reads the memory of the process, so it also works if a script has disabled faulthandler.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

_DUMP_S = 8.0  # py-spy reads the symbols of all libraries


def spied_stacks(process: int, *, native: bool) -> str | None:
    """The stacks of a process as faulthandler writes them: innermost frame first, main thread last.

    native: with the frames of C code, for which py-spy pauses the process; else the process is stopped, and
    py-spy can't stop it once more. Returns None without py-spy, for a process that is not Python, and if the
    system forbids the access (ptrace_scope).
    """
    if (program := find_py_spy()) is None:
        return None
    mode = "--native" if native else "--nonblocking"
    command = [program, "dump", "--pid", str(process), mode, "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DUMP_S)
        threads = json.loads(done.stdout)
        stacks = [_stack(thread) for thread in sorted(threads, key=_is_main)]
    except (OSError, subprocess.TimeoutExpired, ValueError, LookupError, TypeError):
        return None
    return "\n".join(stacks) or None


def find_py_spy() -> str | None:
    """The program, beside this Python or on the PATH."""
    folders = [os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]
    return shutil.which("py-spy", path=os.pathsep.join(folders))


def _stack(thread: Mapping[str, Any]) -> str:
    frames = [
        f'  Binary file "{frame["module"]}", at {frame["name"]}\n'  # as Python 3.14 writes frames of C code
        if frame.get("module") else f'  File "{frame["filename"]}", line {frame["line"]} in {frame["name"]}\n'
        for frame in thread["frames"]
    ]  # fmt: skip
    return f"Thread {thread['thread_name']} (most recent call first):\n{''.join(frames)}"


def _is_main(thread: Mapping[str, Any]) -> bool:
    return bool(thread["os_thread_id"] == thread["pid"])
