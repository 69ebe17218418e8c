"""The real agent and login process around ranks that play a scenario instead of training.

stand_in_agent.py RUN --parent PID    the agent, as the launcher starts it
stand_in_agent.py --login RUN         the login process
stand_in_agent.py --serve             run folders on stdin; forks an agent for each, so that torch is
                                      imported once (a folder without a scenario is trained); answers
                                      with its process number, then its exit code
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from pathlib import Path

from hpc_parallel.failure import local_agent
from hpc_parallel.job import worker_main
from hpc_parallel.machine.world import World
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json, write_text
from hpc_parallel.worker import rank_files

VICTIM = 2


def play(run_folder: str) -> int:
    import torch
    import torch.distributed as dist

    from hpc_parallel.config.site_schema import ClusterConfig
    from hpc_parallel.start.rendezvous import meet

    folder = RunFolder(Path(run_folder))
    world = World.discover(os.environ)
    rank = world.rank
    rank_files.redirect(folder, rank=rank)
    scenario = (folder.path / "scenario").read_text()
    store = meet(folder, world=world, cluster=ClusterConfig(name="here", start_timeout_s=240))
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=world.world_size
    )
    # Together once, so that all know all others: gloo connects at the first collective.
    dist.all_reduce(torch.ones(1))
    write_text(folder.path / f"ready-{rank}", str(os.getpid()))
    if scenario == "complete":
        if rank == 0:
            folder.metrics.write_text('{"step": 5, "samples": 80, "loss": 2.5, "samples_per_s": 512.0}\n')
            write_json(folder.summary, {"outcome": "completed"})
        dist.destroy_process_group()
        threading.Thread(target=time.sleep, args=(240,)).start()
        return 0
    if scenario == "save":
        signal.signal(signal.SIGTERM, lambda *_: save(folder.path / f"saved-{rank}"))
        time.sleep(240)
    if scenario == "deaf" and rank != VICTIM:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    if rank == VICTIM:
        if scenario == "raise":
            raise ValueError("sample 7\nhas no label")
        if scenario in ("exit", "deaf"):
            os._exit(3)
        if scenario == "abort":
            faulthandler.disable()
            os.abort()
        time.sleep(60)  # to be killed, while the others wait for it
    dist.all_reduce(torch.ones(1))
    return 0


def save(file: Path) -> None:
    """Slowly, as a large checkpoint."""
    time.sleep(2)
    file.touch()
    os._exit(1)


def serve() -> None:
    import torch.distributed.elastic.multiprocessing  # noqa: F401

    import hpc_parallel.config.schema
    import hpc_parallel.start.rendezvous  # noqa: F401

    for line in sys.stdin:
        plays = (Path(line.strip()) / "scenario").exists()
        if not plays:
            worker_main()  # here, because each agent would import it again
        child = os.fork()
        if child == 0:
            os.setsid()
            os._exit(local_agent.run(line.strip(), load_entry=(lambda: play) if plays else worker_main))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve()
    elif sys.argv[1] == "--login":
        from hpc_parallel.launch.local_launcher import follow_agent, local_agent

        folder = RunFolder(Path(sys.argv[2]))
        sys.exit(follow_agent(folder, start=lambda: local_agent(folder, agent=(__file__,)), steps=5))
    else:
        local_agent.main(sys.argv[1:], load_entry=lambda: play)
