"""The entry point of every rank under every launcher: join the other ranks, run the task, record failures.

python -m hpc_parallel.worker.main RUN_FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
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
from hpc_parallel.supervise import fabric, fabric_kind, failure, flight_recorder, nccl_log
from hpc_parallel.supervise.fabric_kind import FabricDevices
from hpc_parallel.supervise.topology import alike, nvml_module, topology
from hpc_parallel.supervise.world import World
from hpc_parallel.worker import preflight, stop, transport
from hpc_parallel.worker.collectives import measure_collectives
from hpc_parallel.worker.environment import describe
from hpc_parallel.worker.generation import generate
from hpc_parallel.worker.inference import infer
from hpc_parallel.worker.machine_check import check_machine
from hpc_parallel.worker.parity_record import prove
from hpc_parallel.worker.rank_logs import redirect
from hpc_parallel.worker.rendezvous import hosts, meet
from hpc_parallel.worker.session import read_config
from hpc_parallel.worker.signed_objects import require_signatures
from hpc_parallel.worker.train import train
from hpc_parallel.worker.watchdog import watch

# Keys are the names in conf/task/.
TASKS: dict[str, Callable[..., object]] = {
    "train": train, "infer": infer, "generate": generate, "proof": prove,
    "collectives": measure_collectives, "preflight": check_machine,
}  # fmt: skip


def main(run_folder: str) -> int:
    """Run the task of this rank and return the exit code. A failure is recorded in the run folder."""
    folder = RunFolder(Path(run_folder))
    world = World.discover(os.environ)
    redirect(folder, rank=world.rank)
    # submitit makes Slurm send SIGUSR2 before the time limit. By default it ends the process at once.
    signal.signal(signal.SIGUSR2, stop.remember)
    try:
        config, values = read_config(folder.config)
        require_devices(config, world)
        variables = fabric.site_variables(config.cluster.environment, os.environ)
        fabric.use_scratch(config.cluster.scratch, os.environ, host=world.host)
        flight_recorder.set_variables(folder, os.environ)
        device = prepare_device(config, world)
        join(folder, config=config, world=world, device=device, variables=variables)
        preflight.check(folder, config=config, world=world, device=device)
        task = TASKS[config.task.name]
        with watch(folder, world=world, timeout_s=config.cluster.hang_timeout_s) as progress:
            if task is train:  # the other tasks report no progress, so they are not watched
                task = partial(train, progress=progress)
            task(config, values=values, folder=folder, device=device, environment=os.environ)
        dist.destroy_process_group()
    except BaseException as error:
        failure.record_exception(folder, world=world, error=error, collectives=flight_recorder.entered())
        traceback.print_exc()
        return 1
    return 0


def require_devices(config: RunConfig, world: World) -> None:
    """Raise RuntimeError if the launcher started another number of ranks than the configuration needs."""
    per_node = processes_per_node(config.strategy, gpus_per_node=config.gpus_per_node)
    world_size = config.nodes * per_node
    if world.world_size != world_size:
        raise RuntimeError(
            f"{world.launcher} started {world.world_size} ranks, but nodes={config.nodes} x "
            f"gpus_per_node={config.gpus_per_node} needs {world_size}, {per_node} per node"
        )


def prepare_device(config: RunConfig, world: World) -> torch.device:
    """Make this rank's (first) device current and set the number of CPU threads; returns the device."""
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
        torch.backends.cudnn.allow_tf32 = False  # by default torch's convolutions use TF32: 11 of 24 bits
    torch.set_num_threads(fabric.cpu_threads(world, os.environ))
    return device


def sends(config: RunConfig) -> bool:
    """Whether ranks use send and receive besides collectives."""
    strategy = config.strategy
    layout = layout_of(strategy, devices=config.devices)
    ring = layout.context > 1 and strategy.context_attention == "ring"
    return layout.pipeline > 1 or ring  # a parameter server sends through the host


def join(
    folder: RunFolder, *, config: RunConfig, world: World, device: torch.device, variables: dict[str, str]
) -> None:
    """Join the other ranks in the default process group; rank 0 completes `environment.json`."""
    store = meet(folder, world=world, cluster=config.cluster, device=str(device))
    require_signatures(store.derived_secret("objects"))
    shared = fabric.shares_device(str(device), world=world, visible=torch.cuda.device_count())
    backend = fabric.backend(str(device), shared=shared)
    devices = fabric_kind.fabric_devices()
    reasons = prepare_network(
        folder, config=config, world=world, hosts=hosts(store), devices=devices, nccl="nccl" in backend
    )
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=world.rank,
        world_size=world.world_size,
        timeout=timedelta(seconds=config.cluster.collective_timeout_s),
        device_id=device if device.type == "cuda" and not shared else None,
    )
    rank_info = {"host": world.host, "address": fabric.own_address(os.environ), "device": str(device)}
    print(
        f"rank {world.rank} of {world.world_size} on {world.host} ({rank_info['address']}), {device}",
        flush=True,
    )
    own = topology(nvml=nvml_module() if device.type == "cuda" else None) if world.local_rank == 0 else None
    ranks = exchange.all_gather({**rank_info, "topology": own})
    shapes = {rank["host"]: shape for rank in ranks if (shape := rank.pop("topology")) is not None}
    if world.rank == 0:
        if (job := job_of(os.environ)) is not None:
            hold_by_job(folder, job)
        folder.begin_anew()
    found = transport.find_transport(
        folder, config=config, world=world, hosts=[rank["host"] for rank in ranks], devices=devices
    )
    problem = transport.problem_of(found, require=config.fabric.require)
    if world.rank == 0:
        submitted = _submitted(folder)
        variables = fabric.recorded(os.environ, also=variables)
        description = describe(ranks=ranks, variables=variables, environment=os.environ, device=device)
        network = {
            "fabric_reasons": reasons,
            "transport": found.as_record(problem),
            "topology": alike(shapes),
        }
        write_json(folder.environment, submitted | description | network)
    if problem is not None:
        transport.report(problem, require=config.fabric.require)


def prepare_network(
    folder: RunFolder,
    *,
    config: RunConfig,
    world: World,
    hosts: Sequence[str],
    devices: FabricDevices,
    nccl: bool,
) -> dict[str, str]:
    """Set the unset variables of the network; returns the reason for each that the fabric needs."""
    if nccl:
        nccl_log.keep_log(folder, rank=world.rank, environment=os.environ)
    reasons = fabric_kind.set_fabric(
        config.cluster.fabric, devices, os.environ, nccl=nccl, one_machine=world.one_machine
    )
    fabric.set_sockets(os.environ, world=world, hosts=hosts, suffix=config.cluster.master_suffix)
    return reasons


def _submitted(folder: RunFolder) -> dict[str, Any]:
    """What the submission wrote to `environment.json`. A damaged file must not prevent training."""
    try:
        return read_json(folder.environment) or {}
    except DamagedError as error:
        effect = "It is rewritten without the command line, so `rerun` and `resume=` will refuse the run."
        print(f"WARNING: {error}. {effect}", file=sys.stderr, flush=True)
        return {}


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # after a failure torch's clean-up may wait for ranks that have ended
