"""The check of a spare host before it is needed: `python -m hpc_parallel.job spare RUN_FOLDER`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpc_parallel.config.script import is_script
from hpc_parallel.layout.layout import processes_per_node
from hpc_parallel.machine import fabric
from hpc_parallel.machine.world import World
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.start import start_checks
from hpc_parallel.worker.main import prepare_device
from hpc_parallel.worker.session import read_config


def main(arguments: Sequence[str]) -> None:
    """Do what ranks on this host would do before they connect. Raises SystemExit if the host is unfit."""
    folder = RunFolder(Path(arguments[0]))
    if is_script(folder.read_config()):
        return  # its ranks make no checks; this process shows that they can start
    config, _ = read_config(folder.config)
    world = World.discover(os.environ)
    fabric.site_variables(config.cluster.environment, os.environ)
    fabric.use_scratch(config.cluster.scratch, os.environ, host=world.host)
    count = processes_per_node(config.strategy, gpus_per_node=config.gpus_per_node)
    ranks = [replace(world, local_rank=rank, local_world_size=count) for rank in range(count)]
    devices = [prepare_device(config, rank) for rank in ranks]
    findings = start_checks.check_alone(folder, host=world.host, devices=devices)
    if harmful := [finding.what for finding in findings if finding.harmful]:
        sys.exit("; ".join(harmful))
