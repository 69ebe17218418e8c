"""Every process group has `cluster.collective_timeout_s`, and the group of saves has its own time-out."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hpc_parallel.layout.layout import layout_of
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.strategies.groups import make_groups
from hpc_parallel.torch_internals import set_default_timeout
from hpc_parallel.worker.session import read_config
from tests.workers import Workers

TIMES = ("cluster.collective_timeout_s=77", "cluster.checkpoint_timeout_s=99", "cluster.hang_timeout_s=40")
FOUR = ("nodes=2", "gpus_per_node=2", *TIMES)
# A layout, and how many groups a rank of it has beside the default one and that of saves, at most.
LAYOUTS = {
    ("strategy=data",): 0,
    ("strategy=hsdp",): 2,
    ("strategy=hybrid",): 2,
    ("strategy=data", "strategy.context=2"): 2,
    ("strategy=expert", "strategy.expert=2", "strategy.replicate=2", "model=moe_tiny"): 2,
    ("strategy=model", "model.layers=4"): 1,  # the ends of the pipeline
    (
        "strategy=pipeline",
        "strategy.pipeline=2",
        "strategy.replicate=2",
        "strategy.schedule=interleaved",
    ): 3,  # one more for gradients between stages
    ("strategy=parameter_server", "training.global_batch_size=6"): 1,  # the workers
    ("strategy=fsdp", "strategy.context=2"): 2,  # both axes made one are all ranks
}


def timeouts_s(folders: list[str]) -> list[dict[str, list[float]]]:
    """Of the groups of this rank in each layout, as they are set: the default one, of saves, all others."""
    module = dist.distributed_c10d
    earlier = module.default_pg_timeout, module.default_pg_nccl_timeout
    found = []
    for folder in folders:
        config, _ = read_config(RunFolder(Path(folder)).config)
        before = set(module._world.pg_map)
        try:
            set_default_timeout(timedelta(seconds=config.cluster.collective_timeout_s))
            groups = make_groups(
                config, layout_of(config.strategy, devices=config.devices), device_type="cpu"
            )
        finally:
            module.default_pg_timeout, module.default_pg_nccl_timeout = earlier
        kinds: dict[str, list[float]] = {"default": [], "saving": [], "others": []}
        for group in module._world.pg_map:
            named = {id(dist.group.WORLD): "default", id(groups.saving): "saving"}
            kind = named.get(id(group), "others")
            if group not in before or kind == "default":
                options = group._get_backend(torch.device("cpu")).options
                kinds[kind].append(options._timeout.total_seconds())
        found.append(kinds)
    return found


def test_every_group_of_every_layout(workers: Workers) -> None:
    folders = [str(workers.prepare(*FOUR, *layout).folder.path) for layout in LAYOUTS]
    of_ranks = workers.run(4, timeouts_s, folders)
    for layout, *kinds in zip(LAYOUTS, *of_ranks, strict=True):
        for found in kinds:
            assert found["default"] == [77.0], layout
            assert found["saving"] == [99.0], layout
            assert set(found["others"]) <= {77.0}, layout
        assert max(len(found["others"]) for found in kinds) == LAYOUTS[layout], layout
