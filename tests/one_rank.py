"""Train a configuration on one rank in this process, for a debugger.

    python -m pdb -m tests.one_rank strategy=single training.steps=3

breakpoint() works anywhere below: no output is redirected, and no process is forked.
"""

from __future__ import annotations

import sys
import tempfile

import torch.distributed as dist

from hpc_parallel.config.schema import register
from hpc_parallel.launch.run_files import write
from tests.composed import prepared
from tests.workers import train_here

FIXED = ("launcher=local", "launcher.snapshot=false", "device=cpu", "strategy=single")


def main(*overrides: str) -> None:
    register()
    run = prepared(f"run_dir={tempfile.mkdtemp()}/run", *FIXED, *overrides)
    write(run)
    print("run folder", run.folder.path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    train_here(str(run.folder.path), {})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
