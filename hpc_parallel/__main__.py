"""`python -m hpc_parallel COMMAND ...` and the script `hpc-parallel`; the default command is `run`."""

# PYTHON_ARGCOMPLETE_OK (argcomplete's global completion finds `python -m hpc_parallel` by this line)
from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from hpc_parallel.exit_codes import DONE, WRONG
from hpc_parallel.problems import alternatives, nearest
from hpc_parallel.shell import complain, run_command


@dataclass(frozen=True)
class Command:
    """A module whose `main` takes the arguments after the command's name and returns the exit code."""

    module: str
    purpose: str


COMMANDS = {
    "run": Command(
        "hpc_parallel.commands.run_command", "check, then train here or submit (the default command)"
    ),
    "rerun": Command("hpc_parallel.commands.rerun", "start a run again, from the source that it kept"),
    "status": Command("hpc_parallel.commands.status", "list runs: state, step, loss, speed, time left"),
    "logs": Command("hpc_parallel.commands.logs", "show what the ranks of a run print"),
    "cancel": Command("hpc_parallel.commands.cancel", "end a run, or all of a sweep"),
    "show": Command("hpc_parallel.commands.show", "show one run in full: settings, layout, figures, failure"),
    "report": Command("hpc_parallel.commands.report", "compare runs on a page with tables and plots"),
    "parity": Command("hpc_parallel.commands.parity", "prove that strategies equal one device"),
    "export": Command("hpc_parallel.commands.export", "write a checkpoint's weights to one safetensors file"),
    "init-cluster": Command("hpc_parallel.commands.init_cluster", "write a first profile of this cluster"),
    "check": Command("hpc_parallel.commands.check", "check the site and a configuration without a job"),
    "plan": Command("hpc_parallel.commands.plan", "plan the time of training steps without a job"),
    "tokenize": Command("hpc_parallel.commands.tokenize", "convert texts to tokens for training"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named command with the arguments after its name; returns its exit code."""
    return run_command(lambda: _dispatch(list(sys.argv[1:] if arguments is None else arguments)))


def _dispatch(arguments: list[str]) -> int:
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        from hpc_parallel.commands.completion import complete

        complete(COMMANDS)
    if arguments[:1] in (["-h"], ["--help"]):
        print(usage())
        return DONE
    if arguments and _is_name(arguments[0]) and arguments[0] not in COMMANDS:
        near = nearest(arguments[0], COMMANDS, most=2)
        hint = f" Try {alternatives(near)}." if near else f"\n\n{usage()}"
        complain([f"There is no command {arguments[0]}.{hint}"])
        return WRONG
    command = COMMANDS[arguments.pop(0) if arguments and arguments[0] in COMMANDS else "run"]
    code: int = import_module(command.module).main(arguments)
    return code


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.purpose}" for name, command in COMMANDS.items()]
    return "\n".join([
        "usage: python -m hpc_parallel [COMMAND] ...",
        "",
        *lines,
        "",
        "See COMMAND --help. Without a command: python -m hpc_parallel strategy=pipeline nodes=2",
    ])  # fmt: skip


def _is_name(word: str) -> bool:
    """Whether `word` may be a command: no override (`nodes=2`, `~key`), no flag, no `--` before a script."""
    return not word.startswith("-") and word.replace("-", "_").isidentifier()


if __name__ == "__main__":
    sys.exit(main())
