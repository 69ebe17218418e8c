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


def rank(run_folder: str, place: str = "job") -> None:
    """Run one rank to its end, in a job or for the `local` agent. submitit pickles this name."""
    from hpc_parallel.failure import rank_process

    rank_process.run(run_folder, is_local=place == "local")


def agent(arguments: Sequence[str]) -> None:
    """Run all ranks of a local run to their end."""
    from hpc_parallel.failure import local_agent

    local_agent.main(arguments, load_entry=worker_main)


def conclude(arguments: Sequence[str]) -> None:
    """Find and record the cause after a job has failed."""
    from hpc_parallel.failure import conclude_run

    conclude_run.main(arguments)


def pack(folder: str) -> None:
    """Start the runs of a packed job as places become free, until none is left."""
    from hpc_parallel.failure import packed_job

    sys.exit(packed_job.run(folder))


def spare(run_folder: str) -> None:
    """Check this host, which the run may need later."""
    resolve_name("hpc_parallel.worker.spare_check:main")(run_folder)


def send_signal(arguments: Sequence[str]) -> None:
    """Send a signal to the ranks of a run on this host."""
    from hpc_parallel.failure import signal_ranks

    signal_ranks.main(arguments)


def torchrun(run_folder: str, *arguments: str) -> None:
    """Start the ranks of one node by torchrun, with these arguments."""
    resolve_name("hpc_parallel.start.signed_store:run_torchrun")(run_folder, arguments)


def notify(arguments: Sequence[str]) -> None:
    """Pass a line about a run on, to `launcher.notify`."""
    from hpc_parallel.failure import notify

    notify.main(arguments)


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
    elif part == "conclude":
        conclude(rest)
    elif part == "pack":
        pack(*rest)
    elif part == "spare":
        spare(*rest)
    elif part == "signal":
        send_signal(rest)
    elif part == "notify":
        notify(rest)
    elif part == "torchrun":
        torchrun(*rest)
    else:
        parts = "rank, agent, conclude, pack, spare, signal, notify or torchrun"
        sys.exit(f"hpc_parallel.job has no part {part}: {parts}")


if __name__ == "__main__":
    main(sys.argv[1:])
