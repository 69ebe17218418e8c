"""`python -m hpc_parallel COMMAND ...` and the script `hpc-parallel`; `run` where no command is named."""

# PYTHON_ARGCOMPLETE_OK (by which argcomplete's global completion finds `python -m hpc_parallel`)
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
    """A module whose `main` takes the words after the command's name and returns the exit code."""

    module: str
    purpose: str


COMMANDS = {
    "run": Command("hpc_parallel.commands.run", "check, then train here or submit (the default command)"),
    "rerun": Command("hpc_parallel.commands.rerun", "a run once more, from the source that it kept"),
    "status": Command("hpc_parallel.commands.status", "how runs stand: state, step, loss, speed, time left"),
    "logs": Command("hpc_parallel.commands.logs", "what the ranks of a run print"),
    "cancel": Command("hpc_parallel.commands.cancel", "end a run, or all of a sweep"),
    "show": Command("hpc_parallel.commands.show", "one run in full: settings, layout, figures, failure"),
    "report": Command("hpc_parallel.commands.report", "what runs show, as a page with tables and plots"),
    "parity": Command("hpc_parallel.commands.parity", "prove that strategies follow one device"),
    "export": Command("hpc_parallel.commands.export", "a checkpoint's weights as one safetensors file"),
    "tokenize": Command("hpc_parallel.commands.tokenize", "texts to a row of tokens"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Hand the arguments after the command's name to that command; returns its exit code."""
    return run_command(lambda: _dispatch(list(sys.argv[1:] if arguments is None else arguments)))


def _dispatch(words: list[str]) -> int:
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what may come next
        from hpc_parallel.commands.completion import complete

        complete(COMMANDS)
    if words[:1] in (["-h"], ["--help"]):
        print(usage())
        return DONE
    if words and _is_name(words[0]) and words[0] not in COMMANDS:
        near = nearest(words[0], COMMANDS, most=2)
        hint = f" Try {alternatives(near)}." if near else f"\n\n{usage()}"
        complain([f"There is no command {words[0]}.{hint}"])
        return WRONG
    command = COMMANDS[words.pop(0) if words and words[0] in COMMANDS else "run"]
    code: int = import_module(command.module).main(words)
    return code


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.purpose}" for name, command in COMMANDS.items()]
    return "\n".join([
        "usage: python -m hpc_parallel [COMMAND] ...",
        "",
        *lines,
        "",
        "COMMAND --help tells more. Without a command: python -m hpc_parallel strategy=pipeline nodes=2",
    ])  # fmt: skip


def _is_name(word: str) -> bool:
    """Not an override (`nodes=2`, `~key`) or a flag of Hydra's."""
    return word.isidentifier()


if __name__ == "__main__":
    sys.exit(main())
