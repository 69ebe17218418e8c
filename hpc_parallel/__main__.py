"""`python -m hpc_parallel COMMAND ...` and the script `hpc-parallel`; `run` where no command is named."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Hand the arguments after the command's name to that command; returns its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    commands = ("run", "export", "parity", "rerun", "tokenize")
    command = words.pop(0) if words and words[0] in commands else "run"
    if command == "export":
        from hpc_parallel.worker.export import main as export

        return export(words)
    if command == "parity":
        from hpc_parallel.proof.command import main as parity

        return parity(words)
    if command == "rerun":
        from hpc_parallel.launch.rerun import main as rerun

        return rerun(words)
    if command == "tokenize":
        from hpc_parallel.data.tokenize import main as tokenize

        return tokenize(words)
    from hpc_parallel.run import main as run

    return run(words)


if __name__ == "__main__":
    sys.exit(main())
