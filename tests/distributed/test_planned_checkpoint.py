"""The planned bytes of a checkpoint are those of one that ranks have written."""

from __future__ import annotations

import math

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hpc_parallel.config.resolve import resolve
from hpc_parallel.planning.storage_times import checkpoint_bytes
from tests.composed import composed
from tests.marks import in_full
from tests.workers import Workers

SMALL = ("model.layers=2", "training.steps=1", "training.checkpoint_every=1", "training.validate_every=null")
SETUPS = {
    "fsdp": ("strategy=fsdp", "nodes=2"),
    "pipeline, tied": ("strategy=pipeline", "nodes=2", "model.tied_head=true"),
    "parameter server": ("strategy=parameter_server", "nodes=2"),
    "experts": ("strategy=expert", "nodes=2", "model=moe_tiny"),
}


FIRST, *OTHERS = SETUPS


@pytest.mark.parametrize("setup", [FIRST, *in_full((setup,) for setup in OTHERS)])
def test_a_checkpoint_has_the_planned_bytes(workers: Workers, setup: str) -> None:
    """Weights and state of the optimizer; the rank that writes most has its share, or a large tensor more."""
    words = (*SETUPS[setup], *SMALL)
    folder = workers.train(*words).folder / "checkpoints" / "step-1"
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    written = {
        name: math.prod(entry.size) * entry.properties.dtype.itemsize
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith(("weights/", "optimizer/"))
    }
    config, *_ = resolve(composed(*words, "device=cpu"))
    planned = checkpoint_bytes(config)
    assert planned is not None
    assert planned.total == sum(written.values())
    most = max(file.stat().st_size for file in folder.glob("__*"))
    assert planned.most <= 1.1 * most
    assert planned.most >= 0.6 * most  # names decide which of two ranks writes a tensor
