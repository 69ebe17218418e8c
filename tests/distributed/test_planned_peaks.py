"""Planned peaks against the memory that lives at the same time on a rank, counted on CPUs.

`tests/unit/test_plan_memory.py` has those of a GPU, without pipelines, experts and images.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpc_parallel.config.resolve import resolve
from hpc_parallel.layout.schedules import SCHEDULES
from hpc_parallel.planning.memory import COUNTED, plan
from hpc_parallel.strategies.pipeline import PipelineDriver, Stage
from hpc_parallel.training.optimizer import build_optimizer
from tests.composed import composed
from tests.marks import in_full
from tests.parity import opened
from tests.workers import Workers

FULL = "training.activation_checkpointing=full"
DECODER, PIPELINES, EXPERTS = "decoder", *COUNTED
CASES = [
    (f"strategy=pipeline nodes=2 strategy.schedule=zbv {FULL}", PIPELINES),
    ("strategy=expert nodes=2 model=moe_tiny", EXPERTS),
]
MORE = [
    ("strategy=single", DECODER),
    ("strategy=single model=moe_tiny", EXPERTS),
    *((f"strategy=pipeline nodes=2 strategy.schedule={name}", PIPELINES) for name in SCHEDULES),
    (f"strategy=pipeline nodes=4 {FULL} model.layers=8", PIPELINES),
    (f"strategy=pipeline nodes=2 strategy.schedule=looped_bfs {FULL} model.layers=8", PIPELINES),
    (f"strategy=pipeline nodes=4 strategy.schedule=interleaved_zero_bubble {FULL} model.layers=8", PIPELINES),
    ("strategy=pipeline nodes=4 strategy.schedule=dualpipev model.layers=8", PIPELINES),
    (f"strategy=expert nodes=2 model=moe_tiny {FULL}", EXPERTS),
]
ANNOUNCED = {DECODER: (-0.02, 0.02), **COUNTED}


class LiveBytes(TorchDispatchMode):
    """Follows the memory of each tensor that an operator returns while it is active.

    peak: the largest sum after any operator, with the memory of `tensors`, which exist already.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self._note(list(tensors))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then dispatches its local operators
        found = function(*args, **(kwargs or {}))
        self._note(tree_leaves(found))
        return found

    def _note(self, values: list[Any]) -> None:
        for tensor in values:
            if isinstance(tensor, Tensor):
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                storage = local.untyped_storage()
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        expired = [key for key, (reference, _) in self._storages.items() if reference.expired()]
        for key in expired:
            del self._storages[key]
        self.peak = max(self.peak, sum(size for _, size in self._storages.values()))


def received_by(stages: Iterable[Stage]) -> list[Tensor]:
    """What torch allocated in the first step for the messages of all steps."""
    tables = [table for stage in stages for table in (stage.args_recv_info, stage.grad_recv_info)]
    received = [info.buffer for table in tables for infos in table.values() for info in infos]
    return [buffer.detach() for buffer in received if buffer is not None]


def peak_bytes(*overrides: str) -> int:
    """Of the second step of a training on this rank, when the optimizer has its state."""
    session = opened(*overrides)
    assembled, weights = session.assembled, session.assembled.named_parameters()
    optimizer = build_optimizer(weights, session.config.optimizer)
    batches = session.batches(session.data.train, seed=0)
    assembled.forward_backward.train(*batches.at(0))
    optimizer.step()
    optimizer.zero_grad()
    inputs, targets = batches.at(1)
    held = [weight.detach() for weight in weights.values()]
    driver = assembled.forward_backward
    stages = driver._parts if isinstance(driver, PipelineDriver) else ()
    with LiveBytes([*held, *optimizer.state().values(), *received_by(stages)]) as live:
        assembled.forward_backward.train(inputs, targets)
    return live.peak


@pytest.mark.parametrize(("words", "kind"), [*CASES, *in_full(MORE)])
def test_a_planned_peak_is_as_far_off_as_it_says(workers: Workers, words: str, kind: str) -> None:
    run = (*words.split(), "training.global_batch_size=16", "device=cpu", "launcher=local")
    found = plan(resolve(composed(*run))[0])
    assert found is not None
    peaks = workers.run(len(found.devices), peak_bytes, *run)
    low, high = ANNOUNCED[kind]
    for held, peak in zip(found.devices, peaks, strict=True):
        assert low < held.total / peak - 1 < high
