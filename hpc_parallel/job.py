"""The module that a job starts: `python -m hpc_parallel.job PART RUN_FOLDER ...`.

A job may start days after it was submitted, with a newer version of hpc_parallel. Batch scripts, submitit's
payloads and the local launcher therefore name only this module, and its parts keep their names. The modules
that these parts import may move.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from pkgutil import resolve_name

PARTS = {
    "conclude": "hpc_parallel.failure.conclude_run:main",
    "pack": "hpc_parallel.failure.packed_job:main",
    "spare": "hpc_parallel.worker.spare_check:main",
    "signal": "hpc_parallel.failure.rank_process:signal_ranks",
    "notify": "hpc_parallel.failure.notify:main",
    "torchrun": "hpc_parallel.start.signed_store:run_torchrun",
}
"""The other parts: what takes the words after the name, and may return an exit code."""


def rank(run_folder: str, place: str = "job") -> None:
    """Run one rank to its end, in a job or for the `local` agent. submitit pickles this name."""
    from hpc_parallel.failure import rank_process

    rank_process.run(run_folder, is_local=place == "local")


def agent(arguments: Sequence[str]) -> None:
    """Run all ranks of a local run to their end."""
    from hpc_parallel.failure import local_agent

    local_agent.main(arguments, load_entry=worker_main)


def worker_main() -> Callable[[str], int]:
    """Import what every training needs, including torch, and return the function that a rank runs.

    The local agent calls this once, before it forks the ranks. No rank may inherit a CUDA context or a pool
    of OpenMP threads, so this function computes nothing. The garbage collector pauses, as in worker/main.py,
    and never looks at the imported modules again, so that the ranks share the modules' memory.
    """
    gc.disable()
    from hpc_parallel.worker.main import OF_TRAINING, main

    for name in OF_TRAINING:
        resolve_name(name)
    gc.freeze()
    gc.enable()
    return main


def main(arguments: Sequence[str]) -> None:
    part, *rest = arguments
    if part == "rank":
        rank(*rest)
    elif part == "agent":
        agent(rest)
    elif part not in PARTS:
        sys.exit(f"hpc_parallel.job has no part {part}: rank, agent, {', '.join(PARTS)}")
    elif code := resolve_name(PARTS[part])(rest):
        sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
