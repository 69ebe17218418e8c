"""What every rank runs, whoever started it: find the others, do the task, leave a record.

python -m hpc_parallel.worker.main RUN_FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpc_parallel.config.layout import layout_of, processes_per_node
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.record.job_state import job_of
from hpc_parallel.record.owner import hold_by_job
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import DamagedError, read_json
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.strategies import exchange
from hpc_parallel.supervise import fabric, failure, flight_recorder
from hpc_parallel.supervise.world import World
from hpc_parallel.worker import stop
from hpc_parallel.worker.environment import describe
from hpc_parallel.worker.generation import generate
from hpc_parallel.worker.inference import infer
from hpc_parallel.worker.parity_record import prove
from hpc_parallel.worker.rank_logs import redirect
from hpc_parallel.worker.rendezvous import hosts, meet
from hpc_parallel.worker.session import read_config
from hpc_parallel.worker.signed_objects import require_signatures
from hpc_parallel.worker.train import train
from hpc_parallel.worker.watchdog import watch

# By the names of conf/task/.
TASKS: dict[str, Callable[..., object]] = {
    "train": train, "infer": infer, "generate": generate, "proof": prove
}  # fmt: skip


def main(run_folder: str) -> int:
    """Do the task as this rank of the run; returns the exit code. A failure is recorded in the run folder."""
    folder = RunFolder(Path(run_folder))
    world = World.discover(os.environ)
    redirect(folder, rank=world.rank)
    # submitit has Slurm send this before the time limit; its default would end the process at once.
    signal.signal(signal.SIGUSR2, stop.remember)
    try:
        config, values = read_config(folder.config)
        require_devices(config, world)
        variables = fabric.site_variables(config.cluster.environment, os.environ)
        flight_recorder.set_variables(folder, os.environ)
        device = prepare_device(config, world)
        join(folder, config=config, world=world, device=device, variables=variables)
        task = TASKS[config.task.name]
        with watch(folder, world=world, timeout_s=config.cluster.hang_timeout_s) as progress:
            if task is train:  # the other tasks mark no progress, and are not watched
                task = partial(train, progress=progress)
            task(config, values=values, folder=folder, device=device, environment=os.environ)
        dist.destroy_process_group()
    except BaseException as error:
        failure.record_exception(folder, world=world, error=error, collectives=flight_recorder.entered())
        traceback.print_exc()
        return 1
    return 0


def require_devices(config: RunConfig, world: World) -> None:
    """As many ranks as the strategy was checked for. Raises RuntimeError."""
    per_node = processes_per_node(config.strategy, gpus_per_node=config.gpus_per_node)
    wanted = config.nodes * per_node
    if world.world_size != wanted:
        raise RuntimeError(
            f"{world.launcher} started {world.world_size} ranks, but nodes={config.nodes} x "
            f"gpus_per_node={config.gpus_per_node} needs {wanted}, {per_node} a node"
        )


def prepare_device(config: RunConfig, world: World) -> torch.device:
    """This rank's device (of several the first), made current, and the threads that it may use on the CPU."""
    per_node = processes_per_node(config.strategy, gpus_per_node=config.gpus_per_node)
    name = fabric.choose_device(
        config.device,
        world=world,
        visible=torch.cuda.device_count(),
        available=torch.cuda.is_available(),
        devices=config.gpus_per_node // per_node,
    )
    device = torch.device(name)
    if fabric.shares_device(name, world=world, visible=torch.cuda.device_count()) and sends(config):
        raise fabric.DeviceError(
            f"strategy={config.strategy.name} sends from rank to rank, which gloo can't do for ranks that "
            "share a GPU. Try device=cpu, or as many GPUs as ranks."
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.allow_tf32 = False  # float32 means 24 bits; torch's convolutions keep 11
    torch.set_num_threads(fabric.cpu_threads(world, os.environ))
    return device


def sends(config: RunConfig) -> bool:
    """Whether ranks send to one another, besides taking part in collectives."""
    strategy = config.strategy
    layout = layout_of(strategy, devices=config.devices)
    ring = layout.context > 1 and strategy.context_attention == "ring"
    return layout.pipeline > 1 or ring  # a parameter server's messages go over the host


def join(
    folder: RunFolder, *, config: RunConfig, world: World, device: torch.device, variables: dict[str, str]
) -> None:
    """Meet the other ranks and open the default process group; rank 0 completes `environment.json`."""
    store = meet(folder, world=world, cluster=config.cluster, device=str(device))
    require_signatures(store.derived_secret("objects"))
    suffix = config.cluster.master_suffix
    fabric.set_sockets(os.environ, world=world, hosts=hosts(store), suffix=suffix)
    shared = fabric.shares_device(str(device), world=world, visible=torch.cuda.device_count())
    dist.init_process_group(
        fabric.backend(str(device), shared=shared),
        store=dist.PrefixStore("group", store),
        rank=world.rank,
        world_size=world.world_size,
        timeout=timedelta(seconds=config.cluster.collective_timeout_s),
        device_id=device if device.type == "cuda" and not shared else None,
    )
    place = {"host": world.host, "address": fabric.own_address(os.environ), "device": str(device)}
    print(
        f"rank {world.rank} of {world.world_size} on {world.host} ({place['address']}), {device}", flush=True
    )
    ranks = exchange.all_gather(place)
    if world.rank == 0:
        if world.launcher == "slurm" and (job := job_of(os.environ)) is not None:
            hold_by_job(folder, job)
        folder.begin_anew()
        known = _submitted(folder)
        variables = fabric.recorded(os.environ, also=variables)
        found = describe(ranks=ranks, variables=variables, environment=os.environ, device=device)
        write_json(folder.environment, known | found)


def _submitted(folder: RunFolder) -> dict[str, Any]:
    """What the submission wrote to `environment.json`; a damaged one is no reason not to train."""
    try:
        return read_json(folder.environment) or {}
    except DamagedError as error:
        lost = "It is written anew without the command line, so `rerun` and `resume=` will refuse the run."
        print(f"WARNING: {error}. {lost}", file=sys.stderr, flush=True)
        return {}


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # after a failure torch's own clean-up may wait for ranks that are gone
