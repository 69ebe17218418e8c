"""The entry point of every rank under every launcher: join the other ranks, run the task, record failures.

python -m hpc_parallel.worker.main RUN_FOLDER
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

if __name__ == "__main__":
    gc.disable()  # collecting garbage would take a fifth of the start, and imports leave none

import torch
import torch.distributed as dist

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.failure import failure, flight_recorder
from hpc_parallel.layout.layout import processes_per_node
from hpc_parallel.machine import fabric, fabric_kind, nccl_log, torch_variables
from hpc_parallel.machine.fabric_kind import FabricDevices
from hpc_parallel.machine.topology import alike, nvml_module, topology
from hpc_parallel.machine.world import World
from hpc_parallel.machine.xids import XidEvents
from hpc_parallel.record.owner import hold_by_job
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import DamagedError, read_json
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.slurm.jobs import job_of
from hpc_parallel.start import start_checks, transport
from hpc_parallel.start.rendezvous import hosts, meet
from hpc_parallel.start.signed_store import SignedStore, require_signatures
from hpc_parallel.strategies import exchange
from hpc_parallel.torch_internals import set_default_timeout
from hpc_parallel.training.left_out import left_out
from hpc_parallel.training.observers import Progress
from hpc_parallel.worker import rank_files, stop
from hpc_parallel.worker.environment_facts import describe, tf32
from hpc_parallel.worker.rank_files import redirect
from hpc_parallel.worker.session import TaskContext, phases_of, read_config
from hpc_parallel.worker.watchdog import watch

TASKS = {
    "train": "worker.train:train",
    "infer": "worker.inference:infer",
    "generate": "worker.generation:generate",
    "proof": "proof.task:prove",
    "collectives": "measure.collectives:measure_collectives",
    "preflight": "measure.preflight_task:check_machine",
    "calibrate": "measure.calibrate:calibrate",
}
"""What runs for each name in conf/task/, below `hpc_parallel`: a rank imports its own task only."""
WATCHED = ("train", "infer", "generate")


def main(run_folder: str) -> int:
    """Run the task of this rank and return the exit code. A failure is recorded in the run folder."""
    folder = RunFolder(Path(run_folder))
    world = World.discover(os.environ)
    redirect(folder, rank=world.rank)
    # submitit makes Slurm send SIGUSR2 before the time limit. By default the signal ends the process at once.
    signal.signal(signal.SIGUSR2, stop.remember)
    xids = None
    try:
        config, values = read_config(folder.config)
        task: Callable[[TaskContext], object] = resolve_name(f"hpc_parallel.{TASKS[config.task.name]}")
        require_devices(config, world)
        reasons = fabric.site_variables(config.cluster.environment, os.environ)
        reasons |= fabric.use_scratch(config.cluster.scratch, os.environ, host=world.host)
        reasons |= flight_recorder.set_variables(folder, os.environ)
        warn_of_limits(world)
        if config.training.compile:
            reasons |= torch_variables.use_compiler_cache(folder, os.environ)
        if config.device != "cpu" and torch.cuda.is_available():
            reasons |= torch_variables.use_expandable_segments(os.environ)
        if config.training.deterministic:
            reasons |= torch_variables.use_fixed_workspaces(os.environ)
        device = prepare_device(config, world)
        reasons |= share_gpu(device, world=world)
        if world.rank == 0 and (problem := unused_gpus(config, device, host=world.host)) is not None:
            print(f"WARNING: {problem}", file=sys.stderr, flush=True)
        fabric.require_interfaces(os.environ, host=world.host, nccl=device.type == "cuda")
        xids = XidEvents(nvml_module(), start_checks.gpu_uuid(device))
        on_phase = phases_of(folder, rank=world.rank)
        on_phase(f"connecting {world.world_size} rank{'s' * (world.world_size > 1)}")
        store = join(folder, config=config, world=world, device=device, reasons=reasons)
        on_phase("checks of the hosts")
        start_checks.check(folder, config=config, world=world, device=device, xids=xids)
        watched = watch(
            folder, world=world, timeout_s=config.cluster.hang_timeout_s, store=store,
            compiles=config.training.compile,
        )  # fmt: skip
        with watched as progress:
            reports = config.task.name in WATCHED
            marks = progress if reports else Progress()
            task(TaskContext(config, values, folder, device, os.environ, marks))
        dist.destroy_process_group()
    except BaseException as error:
        failure.record_exception(
            folder, world=world, error=error, collectives=flight_recorder.entered(),
            xids=xids.new() if xids is not None else (),
        )  # fmt: skip
        report(error)
        return 1
    return 0


def warn_of_limits(world: World) -> None:
    """Let this rank open as many files as the system allows, and warn on each host if these are too few."""
    problem = rank_files.shortage(rank_files.raise_limit(), world)
    if problem is not None and world.local_rank == 0:
        print(f"WARNING: {problem}", file=sys.stderr, flush=True)


def report(error: BaseException) -> None:
    """Print the traceback, or only the message if no code is to blame."""
    kind, source = failure.kind_and_source(error)
    if kind in failure.WITHOUT_CODE:
        print(source, file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)


def require_devices(config: RunConfig, world: World) -> None:
    """Raise RuntimeError if the launcher did not start as many ranks as the configuration needs."""
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
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.allow_tf32 = False  # by default torch's convolutions use TF32: 11 of 24 bits
    if config.training.deterministic:
        use_deterministic_kernels()
    torch.set_num_threads(fabric.cpu_threads(world, os.environ))
    return device


def unused_gpus(config: RunConfig, device: torch.device, *, host: str) -> str | None:
    """A warning if the job asked for GPUs and torch finds none, so that it trains without them; else None."""
    asked = config.launcher.kind == "slurm" and config.cluster.gpus
    if not asked or config.device != "auto" or device.type != "cpu":
        return None
    return (
        f"the job asked for GPUs, but torch {torch.__version__} finds none on {host}: this run uses the CPU, "
        f"in {config.training.precision}. Try a torch built for these GPUs, or device=cpu if this is meant"
    )


def use_deterministic_kernels() -> None:
    torch.use_deterministic_algorithms(True)
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = False  # for debugging only, and one more kernel each time
    torch.backends.cudnn.benchmark = False


def share_gpu(device: torch.device, *, world: World) -> dict[str, str]:
    """Prepare NCCL if ranks of this machine share a GPU, and say so once; returns the reasons."""
    visible = torch.cuda.device_count()
    if not fabric.shares_device(str(device), world=world, visible=visible):
        return {}
    if world.rank == 0:
        gpus = f"{visible} GPU{'s' * (visible > 1)}"
        print(f"{world.world_size} ranks share {gpus}: results are right, speeds mean nothing", flush=True)
    return fabric.share_gpu(os.environ, rank=world.rank)


def join(
    folder: RunFolder, *, config: RunConfig, world: World, device: torch.device, reasons: dict[str, str]
) -> SignedStore:
    """Join the other ranks in the default process group; rank 0 completes `environment.json`.

    Returns the store that all ranks share.

    reasons: why this rank has set each variable so far.
    """
    store = meet(folder, world=world, cluster=config.cluster, device=str(device))
    require_signatures(store.derived_secret("objects"))
    backend = fabric.backend(str(device))
    devices = fabric_kind.fabric_devices()
    reasons = reasons | prepare_network(
        folder, config=config, world=world, hosts=hosts(store), devices=devices, nccl="nccl" in backend
    )
    timeout = timedelta(seconds=config.cluster.collective_timeout_s)
    set_default_timeout(timeout)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=world.rank,
        world_size=world.world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    dist.barrier()  # opens all connections now: rank 0 and its store may end first at the last barrier
    rank_info = {"host": world.host, "address": fabric.own_address(os.environ), "device": str(device)}
    print(
        f"rank {world.rank} of {world.world_size} on {world.host} ({rank_info['address']}), {device}",
        flush=True,
    )
    if world.rank == 0 and device.type == "cuda":
        in_tf32 = [name for name, used in tf32().items() if used]
        print(f"products in float32: TF32 {'in ' + ', '.join(in_tf32) if in_tf32 else 'off'}", flush=True)
    variables = fabric.recorded(os.environ, also=[*config.cluster.environment, *reasons])
    host_info = None
    if world.local_rank == 0:
        shape: dict[str, Any] = {"parts": [], "links": []}
        with left_out("the topology of this host is"):
            shape = topology(nvml=nvml_module() if device.type == "cuda" else None)
        host_info = {"topology": shape, "fabric": {"variables": variables, "reasons": reasons}}
    ranks = exchange.all_gather({**rank_info, "of_host": host_info})
    by_host = {rank["host"]: facts for rank in ranks if (facts := rank.pop("of_host")) is not None}
    if world.rank == 0:
        if (job := job_of(os.environ)) is not None:
            hold_by_job(folder, job)
        folder.begin_anew()
    carriers = transport.find_transport(
        folder, config=config, world=world, hosts=[rank["host"] for rank in ranks], devices=devices
    )
    problem = transport.problem_of(carriers, require=config.fabric.require)
    if world.rank == 0:
        submitted = _submitted(folder)
        description = describe(ranks=ranks, variables=variables, environment=os.environ, device=device)
        network = {
            "fabric_reasons": reasons,
            "fabric_by_host": by_differing_host({host: facts["fabric"] for host, facts in by_host.items()}),
            "transport": carriers.as_record(problem),
            "topology": alike({host: facts["topology"] for host, facts in by_host.items()}),
        }
        write_json(folder.environment, submitted | description | network)
    if problem is not None:
        transport.report(problem, require=config.fabric.require)
    return store


def prepare_network(
    folder: RunFolder,
    *,
    config: RunConfig,
    world: World,
    hosts: Sequence[str],
    devices: FabricDevices,
    nccl: bool,
) -> dict[str, str]:
    """Set the unset variables of the network; returns the reason for each that was set."""
    log = nccl_log.keep_log(folder, rank=world.rank, environment=os.environ) if nccl else {}
    devices_need = fabric_kind.set_fabric(
        config.cluster.fabric, devices, os.environ, nccl=nccl, one_machine=world.one_machine
    )
    suffix = config.cluster.master_suffix
    return log | devices_need | fabric.set_sockets(os.environ, world=world, hosts=hosts, suffix=suffix)


def by_differing_host(settings: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Each different set of variables and reasons once, with its `hosts`; empty if all hosts have the same.

    The file of NCCL's log does not count, because each rank has its own file.
    """
    shared = {
        host: {key: {name: text for name, text in table.items() if name != nccl_log.FILE}
               for key, table in tables.items()}
        for host, tables in settings.items()
    }  # fmt: skip
    sets = alike(shared)
    return sets if len(sets) > 1 else []


def _submitted(folder: RunFolder) -> dict[str, Any]:
    """What the submission wrote to `environment.json`. A damaged file must not prevent training."""
    try:
        return read_json(folder.environment) or {}
    except DamagedError as error:
        effect = "It is rewritten without the command line, so `rerun` and `resume=` will refuse the run."
        print(f"WARNING: {error}. {effect}", file=sys.stderr, flush=True)
        return {}


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    code = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # after a failure torch's clean-up may wait for ranks that have ended
