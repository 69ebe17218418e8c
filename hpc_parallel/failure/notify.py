"""Tell somebody what happened to a run: `launcher.notify`, a command or a webhook.

`tell` decides whether an event is new. A process of its own passes the run's line on, so a notifier that
fails or hangs delays no restart and ends no run. This module does not import torch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any
from urllib.request import HTTPRedirectHandler, Request, build_opener

from hpc_parallel.problems import printable
from hpc_parallel.record import attempts
from hpc_parallel.record.names import label
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import DamagedError, read_lines
from hpc_parallel.record.trust import UntrustedError, require_private

ENDED, LOST, STORAGE = "the end of a start", "a lost job", "storage"  # each is told once
# After which it is told again; STORAGE: the second.
_BEGINS = ({"launched", "submitted", "resumed"}, {"resumed"})
WEBHOOK = "https://"
LIMIT_S = 20.0  # Slurm kills a job 30 s after it asked it to end (KillWait)
_SLACK_S = 5.0  # for the start of Python
_MOST_CHARACTERS = 2000


def tell(folder: RunFolder, line: str, *, about: str, waits: bool = True) -> None:
    """Pass `line` on, once for each start; about STORAGE, once since a user started the run.

    waits: whether to return only after the notifier has ended. At the end of a job Slurm would kill it.
    """
    try:
        if not _target(folder) or _is_told(folder, about):
            return
        attempts.note(folder, "told", about=about)  # first: better not told than told twice
        part = [sys.executable, "-m", "hpc_parallel.job", "notify", str(folder.path)]
        # The batch script reads our output, so it would wait for a process that has it.
        process = subprocess.Popen(
            part, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True, text=True
        )
        assert process.stdin is not None
        with process.stdin as stream:
            stream.write(printable(f"{label(folder.path)}: {line}")[:_MOST_CHARACTERS])
        if waits:
            process.wait(LIMIT_S + _SLACK_S)
    except (OSError, DamagedError, UntrustedError, subprocess.TimeoutExpired) as error:
        _complain(str(error))


def _is_told(folder: RunFolder, about: str) -> bool:
    for event in reversed(read_lines(folder.attempts)):
        if event.get("about") == about:
            return True
        if not event.keys().isdisjoint(_BEGINS[about == STORAGE]):
            return False
    return False


def _was_lost(folder: RunFolder) -> bool:
    """Whether nothing has recorded how the start before the newest one ended."""
    events = read_lines(folder.attempts)
    launches = [index for index, event in enumerate(events) if "launched" in event][-2:]
    ends = {"ended", *_BEGINS[0]} - {"launched"}
    return len(launches) == 2 and all(event.keys().isdisjoint(ends) for event in events[slice(*launches)])


def main(arguments: Sequence[str]) -> None:
    """`python -m hpc_parallel.job notify RUN_FOLDER`, with the line on standard input.

    With `--requeued`, tell that Slurm has started the job again if nothing was left that could tell so.
    """
    folder = RunFolder(Path(arguments[0]))
    if "--requeued" in arguments:
        if _was_lost(folder):
            tell(
                folder,
                "restart: nothing of the job was left to say why; Slurm has started it again",
                about=LOST,
            )
        return
    target, line, outcome = _target(folder), sys.stdin.read(), []
    deliver = _post if target.startswith(WEBHOOK) else _run
    # A thread, because no time limit of a socket covers the search for its address.
    thread = threading.Thread(target=lambda: outcome.append(deliver(target, line)), daemon=True)
    thread.start()
    thread.join(LIMIT_S + 1)
    problem = outcome[0] if outcome else f"no answer within {LIMIT_S:g} s"
    if problem:
        _complain(problem)


def _target(folder: RunFolder) -> str:
    """What the user typed for this run, or nothing. Raises UntrustedError if others could have written it."""
    target = folder.read_config()["launcher"].get("notify")
    if target:
        for path in (folder.path, folder.config):
            require_private(path, parents=False)
    return target or ""


def _run(command: str, line: str) -> str | None:
    """Give the line to a shell command; returns why it failed."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            ["/bin/sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors,
            start_new_session=True, text=True,
        )  # fmt: skip
        try:
            process.communicate(f"{line}\n", timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"the command did not end within {LIMIT_S:g} s"
        if process.returncode == 0:
            return None
        return f"the command ended with {process.returncode}{_last_line(errors)}"


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - _MOST_CHARACTERS))
    lines = errors.read().decode(errors="replace").split("\n")
    return next((f": {line.strip()}" for line in reversed(lines) if line.strip()), "")


class _NoRedirect(HTTPRedirectHandler):
    """A redirect could lead to another host, or away from https."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _post(url: str, line: str) -> str | None:
    """Send the line as `{"text": ...}`; returns why that failed, without the address, which is a secret."""
    body = json.dumps({"text": line}).encode()
    request = Request(url, data=body, headers={"Content-Type": "application/json"})
    try:
        with build_opener(_NoRedirect).open(request, timeout=LIMIT_S):
            return None
    except (OSError, ValueError, HTTPException) as error:
        return f"the webhook failed: {type(error).__name__}: {getattr(error, 'reason', '')}"


def _complain(problem: str) -> None:
    print(f"launcher.notify: {printable(problem)}", file=sys.stderr, flush=True)
