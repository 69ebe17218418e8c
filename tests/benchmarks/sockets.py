"""The sockets of each rank after it has trained and saved, of real ranks on this machine.

python tests/benchmarks/sockets.py [ranks ...] [-- overrides ...]
python tests/benchmarks/sockets.py --light 64

A light rank trains nothing: it makes the groups of a run, and sends what a step and a save send.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hpc_parallel.launch.run_files import write
from hpc_parallel.machine.world import World
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.start.join import join
from hpc_parallel.worker.session import TaskContext, read_config
from hpc_parallel.worker.train import train
from tests.composed import prepared

FORK = multiprocessing.get_context("fork")
SMALL = (
    "nodes=1", "launcher=local", "launcher.snapshot=false", "device=cpu", "training.steps=3",
    "training.checkpoint_every=1", "data.max_bytes=100000", "data.sequence_length=16", "model.layers=1",
    "model.dim=16", "model.heads=2", "model.kv_heads=2", "model.ffn_dim=32", "cluster.start_timeout_s=300",
)  # fmt: skip


def rank(folder: RunFolder, number: int, size: int, pipe: Any, done: Any) -> None:
    torch.set_num_threads(1)
    world = World(number, size, number, size, 0, 1, host="here", launcher="torchrun", attempt="start")
    config, values = read_config(folder.config)
    device = torch.device("cpu")
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        join(folder, config=config, world=world, device=device, reasons={})
        train(TaskContext(config, values, folder, device, environment={}))
    dist.barrier()
    pipe.send(sockets())
    done.wait()
    os._exit(0)


def light_rank(store_of: str, number: int, size: int, pipe: Any, done: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", int(store_of), size, number == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=number, world_size=size)
    saving, value = dist.new_group(backend="gloo"), torch.ones(2)
    rows = [torch.empty(2) for _ in range(size)]
    dist.all_reduce(value)
    dist.broadcast(value, src=0)
    dist.barrier()
    dist.all_gather(rows, value)
    dist.gather(value, rows if number == 0 else None, group=saving)  # plans of a checkpoint
    dist.broadcast(value, 0, group=saving)
    dist.all_gather(rows, value, group=saving)
    dist.barrier()
    pipe.send(sockets())
    done.wait()
    os._exit(0)


def sockets() -> int:
    """The sockets that this process has open, without those of `multiprocessing`."""
    return len(psutil.Process().net_connections("inet"))


def count(size: int, overrides: list[str]) -> list[int]:
    """The sockets of each of `size` ranks, by rank."""
    with tempfile.TemporaryDirectory() as path:
        batch = f"training.global_batch_size={size}"
        run = prepared(f"run_dir={path}/run", *SMALL, f"gpus_per_node={size}", batch, *overrides)
        write(run)
        return counts_of(rank, RunFolder(Path(path) / "run"), size=size)


def count_light(size: int) -> list[int]:
    """The same of light ranks."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return counts_of(light_rank, str(port), size=size)


def counts_of(target: Callable[..., None], argument: object, *, size: int) -> list[int]:
    pipes, done = [FORK.Pipe() for _ in range(size)], FORK.Event()
    for number in range(size):
        FORK.Process(
            target=target, args=(argument, number, size, pipes[number][1], done), daemon=True
        ).start()
    counts = [here.recv() for here, _ in pipes]
    done.set()
    return counts


def main(words: list[str]) -> None:
    at = words.index("--") if "--" in words else len(words)
    sizes = [int(word) for word in words[:at] if word != "--light"]
    print("ranks  rank 0  most of the others")
    for size in sizes or [2, 4, 8]:
        first, *others = count_light(size) if "--light" in words else count(size, words[at + 1 :])
        print(f"{size:5}  {first:6}  {max(others):18}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
