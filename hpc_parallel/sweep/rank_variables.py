"""The environment variables that ranks will set, as far as this machine can know them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import replace

from hpc_parallel import job_context
from hpc_parallel.failure import flight_recorder
from hpc_parallel.failure.local_agent import rank_environments, share_cores
from hpc_parallel.launch.prepare import PreparedRun
from hpc_parallel.machine import fabric, nccl_log
from hpc_parallel.machine.world import World
from hpc_parallel.script import script_rank

OTHER_HOSTS = "<the interface that reaches the other hosts>"
FIRST_HOST, RUN_ID = "<the first host>", "<this start>"
FREE_PORT, PORT_OF_JOB = "<a free port>", "<20000 and the last digits of the job>"


def rank_variables(
    run: PreparedRun, *, local: bool, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Name -> value of each variable that a rank sets because `environment` does not have it.

    local: whether all ranks run on this machine; else they run on `nodes` hosts of a cluster.
    """
    variables = dict(environment)
    fabric.site_variables(run.config.cluster.environment, variables)
    if local:
        share_cores(variables, ranks=run.config.devices if run.is_script else run.processes)
    flight_recorder.set_variables(run.folder, variables)
    if run.is_script:
        return _of_script(run, local=local, environment=environment, variables=variables)
    if local or run.config.nodes == 1:
        start = rank_environments(nodes=run.config.nodes, per_node=run.processes_per_node)
        fabric.set_sockets(variables, world=World.discover(start[0]), hosts=())
    else:
        variables.setdefault("GLOO_SOCKET_IFNAME", OTHER_HOSTS)
    if not local and run.config.cluster.gpus and run.config.device != "cpu":
        nccl_log.keep_log(run.folder, rank="<rank>", environment=variables)
    return {name: value for name, value in sorted(variables.items()) if name not in environment}


def _of_script(
    run: PreparedRun, *, local: bool, environment: Mapping[str, str], variables: dict[str, str]
) -> dict[str, str]:
    """The variables of rank 0 of a script. Values that only the job knows are in angle brackets."""
    start = {**variables, **rank_environments(nodes=run.config.nodes, per_node=run.processes_per_node)[0]}
    if local:
        start |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": FREE_PORT}
        script_rank.set_variables(run.folder, run.values, world=World.discover(start), environment=start)
    else:
        address = FIRST_HOST + run.config.cluster.master_suffix
        start |= {"MASTER_ADDR": address, "MASTER_PORT": str(run.config.cluster.port or PORT_OF_JOB)}
        if run.config.nodes > 1:
            start.setdefault("GLOO_SOCKET_IFNAME", OTHER_HOSTS)
        world = replace(World.discover(start), local_world_size=run.processes_per_node)
        start |= script_rank.torchrun_variables(run.folder, run.values, world=world, environment=start)
    start |= {"TORCHELASTIC_RUN_ID": RUN_ID, job_context.STOP: str(run.folder.rendezvous / f"{RUN_ID}.stop")}
    return {name: value for name, value in sorted(start.items()) if environment.get(name) != value}


def describe(run: PreparedRun) -> list[str]:
    """The variables as lines for people."""
    local = run.config.launcher.kind == "local"
    variables = rank_variables(run, local=local)
    lines = [f"  {name}={value}" for name, value in variables.items()]
    if not run.is_script:
        suffix = "" if local or run.config.nodes == 1 else run.config.cluster.master_suffix
        reached = f"rank 0 listens on the address of {FIRST_HOST}{suffix} (cluster.master_suffix)"
        return ["each rank sets:", *lines, *([reached] if suffix else [])]
    environment = {**os.environ, **variables}
    command, *_ = script_rank.command_of(run.folder, run.values, rank=0, variables=environment)
    return [f"rank 0 runs: {shlex.join(command)}", "with:", *lines]
