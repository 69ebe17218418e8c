"""The environment variables that ranks will set, as far as this machine can know them."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hpc_parallel.config.node_devices import launcher_kind
from hpc_parallel.launch.prepare import PreparedRun
from hpc_parallel.supervise import fabric, flight_recorder, nccl_log
from hpc_parallel.supervise.local_agent import rank_environments, share_cores
from hpc_parallel.supervise.world import World

OTHER_HOSTS = "<the interface that reaches the other hosts>"


def rank_variables(
    run: PreparedRun, *, local: bool, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Name -> value of each variable that a rank sets because `environment` does not have it.

    local: whether all ranks run on this machine; else they run on `nodes` hosts of a cluster.
    """
    variables = dict(environment)
    fabric.site_variables(run.config.cluster.environment, variables)
    if local:
        share_cores(variables, ranks=run.processes)
    flight_recorder.set_variables(run.folder, variables)
    if local or run.config.nodes == 1:
        start = rank_environments(nodes=run.config.nodes, per_node=run.processes_per_node)
        fabric.set_sockets(variables, world=World.discover(start[0]), hosts=())
    else:
        variables.setdefault("GLOO_SOCKET_IFNAME", OTHER_HOSTS)
    if not local and run.config.cluster.gpus and run.config.device != "cpu":
        nccl_log.keep_log(run.folder, rank="<rank>", environment=variables)
    return {name: value for name, value in sorted(variables.items()) if name not in environment}


def describe(run: PreparedRun) -> list[str]:
    """The variables as lines for people."""
    local = launcher_kind(run.config.launcher.kind) == "local"
    lines = [f"  {name}={value}" for name, value in rank_variables(run, local=local).items()]
    return ["each rank sets:", *lines]
