"""The keys of a script of the user's own; `schema.py` says how its comments are used."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hpc_parallel.config.script import STARTS, STOP_SIGNALS, STYLES
from hpc_parallel.rules import key, one_of


@dataclass
class ScriptConfig:
    """Your own script, which `task=script` starts ([Your own script](own-script.md)).

    What follows `--` on the command line becomes `file`, `module` or `command`, and `words`.
    """

    file: str | None = None  # A Python file to run.
    module: str | None = None  # A Python module to run, as `python -m` does.
    command: str | None = None  # A program to run: its path, or its name on the PATH.
    words: list[str] = field(default_factory=list)  # The first arguments, as they are.
    # More arguments by name, which a sweep may vary (`script.arguments.lr=1e-3,3e-4`).
    arguments: dict[str, Any] = field(default_factory=dict)
    # `ranks`: one process for each device; `torchrun`: torchrun starts them on each node; `node`: one process
    # for each node, which starts others itself.
    start: str = key("ranks", one_of(*STARTS))
    torchrun: list[str] = field(default_factory=list)  # Arguments of torchrun, one word each.
    style: str = key("--key value", one_of(*STYLES))  # How `script.arguments` are written.
    # A regular expression for lines that rank 0 prints; its named groups become metrics. It needs a group
    # `step`: `iter (?P<step>\d+): loss (?P<loss>[\d.]+)`.
    metrics: str | None = None
    # The signal that the script gets `launcher.grace_s` before the time limit and at a preemption; it then
    # saves and ends, and the job starts again.
    stop_signal: str = key("none", one_of(*STOP_SIGNALS))
    requeue_codes: list[int] = field(default_factory=list)  # Exit codes that ask for a new start.
    # Words that are added from the second start on, if the paths among them exist: `--resume {run}/last.pt`.
    resume_arguments: str | None = None
    # The folder in which the script runs, for example `{run}`; null: where the command was typed.
    working_directory: str | None = None
