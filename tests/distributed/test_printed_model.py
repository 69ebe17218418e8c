"""What a technique changes is visible when the model is printed: no hook and no method hides it."""

from __future__ import annotations

import pytest
import torch

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.worker.session import Session
from tests.composed import prepared
from tests.workers import Workers

TEXT = ("data.max_bytes=200000", "model.layers=2", "nodes=2")
IMAGES = ("model=convnet", "data=digits", "model.channels=[8,16]", "nodes=2")
CASES = {
    "tile": ((*IMAGES, "strategy=tile"), ["CroppedPixels", "TiledConv2d", "GlobalBatchNorm2d"]),
    "data": ((*IMAGES, "strategy=data"), ["GlobalBatchNorm2d"]),
    "context": ((*TEXT, "strategy=context"), ["SplitAttention"]),
    "expert": ((*TEXT, "model=moe_tiny", "strategy=expert"), ["SplitExperts"]),
    "checkpointing": (
        (*TEXT, "strategy=data", "training.activation_checkpointing=full"), ["CheckpointedBlock"],
    ),
    "bfloat16": ((*TEXT, "strategy=data", "training.precision=bfloat16"), ["Bfloat16Transformer"]),
    "compile": ((*TEXT, "strategy=data", "training.compile=true"), ["CompiledBlock"]),
}  # fmt: skip


@pytest.mark.parametrize("technique", CASES)
def test_a_technique_is_seen_in_the_printed_model(workers: Workers, technique: str) -> None:
    words, names = CASES[technique]
    for printed, hidden in workers.run(2, printed_and_hidden, prepared(*words).config):
        assert [name for name in names if f"{name}(" not in printed] == []
        assert hidden == []


def printed_and_hidden(config: RunConfig) -> tuple[str, list[str]]:
    """The first part of the assembled model, as printed; what of it printing does not show."""
    model = Session.open(config, device=torch.device("cpu")).assembled.parts[0]
    hidden = [
        f"{name}.{attribute}"
        for name, module in model.named_modules()
        for attribute in ("_forward_pre_hooks", "_forward_hooks", "forward", "loss")
        if vars(module).get(attribute)
    ]
    return str(model), hidden
