"""From a process to a process group: the ranks of a start find each other and say what they run on."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.failure.left_out import left_out
from hpc_parallel.machine import fabric, fabric_kind, nccl_log
from hpc_parallel.machine.fabric_kind import FabricDevices
from hpc_parallel.machine.topology import alike, nvml_module, topology
from hpc_parallel.machine.world import World
from hpc_parallel.problems import print_warning
from hpc_parallel.record.owner import hold_by_job
from hpc_parallel.record.provenance import installed_packages
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import DamagedError, read_json
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.slurm.allocation import own_step
from hpc_parallel.slurm.jobs import job_of
from hpc_parallel.start import transport
from hpc_parallel.start.rendezvous import hosts, meet
from hpc_parallel.start.signed_store import SignedStore, require_signatures
from hpc_parallel.strategies import exchange
from hpc_parallel.torch_internals import set_default_timeout

SLURM_KEYS = (
    "SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_PARTITION", "SLURM_JOB_ACCOUNT", "SLURM_JOB_NODELIST",
    "SLURM_JOB_NUM_NODES", "SLURM_NTASKS", "SLURM_CPUS_PER_TASK", "SLURM_RESTART_COUNT", "SLURM_CLUSTER_NAME",
    "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID",
)  # fmt: skip


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
    open_group(backend, store=store, world=world, device=device, config=config)
    variables = fabric.recorded(os.environ, also=[*config.cluster.environment, *reasons])
    ranks, by_host = introduce(world, device=device, host_fabric={"variables": variables, "reasons": reasons})
    if world.rank == 0:
        if (job := job_of(os.environ)) is not None:
            step = own_step(config.launcher.kind, start=config.cluster.start, environment=os.environ)
            hold_by_job(folder, job, step=step)
        folder.begin_anew()
    carriers = transport.find_transport(
        folder, config=config, world=world, hosts=[rank["host"] for rank in ranks], devices=devices
    )
    problem = transport.problem_of(carriers, require=config.fabric.require)
    if world.rank == 0:
        network = {
            "fabric_reasons": reasons,
            "fabric_by_host": by_differing_host({host: facts["fabric"] for host, facts in by_host.items()}),
            "transport": carriers.as_record(problem),
            "topology": alike({host: facts["topology"] for host, facts in by_host.items()}),
        }
        facts = describe(ranks=ranks, variables=variables, environment=os.environ, device=device)
        write_json(folder.environment, _submitted(folder) | facts | network)
    if problem is not None:
        transport.report(problem, require=config.fabric.require)
    return store


def open_group(
    backend: str, *, store: SignedStore, world: World, device: torch.device, config: RunConfig
) -> None:
    """Open the default process group and all its connections."""
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


def introduce(
    world: World, *, device: torch.device, host_fabric: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Say on what this rank runs, and hear it of all ranks: what each rank has, and what each host has."""
    rank_info = {"host": world.host, "address": fabric.own_address(os.environ), "device": str(device)}
    print(
        f"rank {world.rank} of {world.world_size} on {world.host} ({rank_info['address']}), {device}",
        flush=True,
    )
    if world.rank == 0 and device.type == "cuda":
        in_tf32 = [name for name, used in tf32().items() if used]
        print(f"products in float32: TF32 {'in ' + ', '.join(in_tf32) if in_tf32 else 'off'}", flush=True)
    host_info = None
    if world.local_rank == 0:
        shape: dict[str, Any] = {"parts": [], "links": []}
        with left_out("the topology of this host is"):
            shape = topology(nvml=nvml_module() if device.type == "cuda" else None)
        host_info = {"topology": shape, "fabric": host_fabric}
    ranks = exchange.all_gather({**rank_info, "of_host": host_info})
    return ranks, {rank["host"]: facts for rank in ranks if (facts := rank.pop("of_host")) is not None}


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
        print_warning(f"{error}. {effect}")
        return {}


def describe(
    *,
    ranks: Sequence[Any],
    variables: Mapping[str, str],
    environment: Mapping[str, str],
    device: torch.device,
) -> dict[str, Any]:
    """Returns packages, versions, the host and device of each rank, the Slurm job, and fabric variables."""
    cuda = device.type == "cuda"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "tf32": tf32() if cuda else None,
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
        "ranks": list(ranks),
        "slurm": {key: environment[key] for key in SLURM_KEYS if key in environment},
        "fabric": dict(variables),
        "packages": installed_packages(),
    }


def tf32() -> dict[str, bool]:
    """Whether float32 products of matrices and of convolutions are rounded to TF32's 11 bits.

    A user's module may have set it by either of torch's names. `allow_tf32` then raises an error.
    """
    backends: Any = torch.backends
    users = {"matmul": backends.cuda.matmul, "convolution": backends.cudnn.conv}
    return {name: user.fp32_precision == "tf32" for name, user in users.items()}
