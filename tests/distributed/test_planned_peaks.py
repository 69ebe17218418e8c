"""Planned peaks against the memory that lives at the same time on a rank, counted on CPUs.

`tests/unit/test_plan_memory.py` has those of a GPU, without pipelines, experts and images.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
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

FULL, SELECTIVE = (f"training.activation_checkpointing={mode}" for mode in ("full", "selective"))
LAYERS, ZERO_BUBBLE = "model.layers=8", "strategy.schedule=interleaved_zero_bubble"
DECODER, PIPELINES, EXPERTS, CHOSEN = "decoder", *COUNTED
CASES = [
    (f"strategy=fsdp nodes=2 {FULL}", DECODER),
    ("strategy=data nodes=2 training.microbatch_size=2", DECODER),
    (f"strategy=pipeline nodes=2 strategy.schedule=zbv {FULL}", PIPELINES),
    ("strategy=expert nodes=2 model=moe_tiny", EXPERTS),
]
ALONE = ["strategy=single", "strategy=single training.microbatch_size=4"]
BESIDE = ["strategy=data nodes=2", "strategy=tensor nodes=2", f"strategy=fsdp nodes=2 {LAYERS}"]
HYBRID = "strategy=hybrid nodes=4 strategy.replicate=1 strategy.pipeline"
OTHERS = [
    "strategy=fsdp nodes=2 training.precision=bfloat16",
    "strategy=fsdp nodes=2 training.global_batch_size=2 model.dim=256 model.ffn_dim=1024",
    "strategy=context nodes=2", "strategy=tensor nodes=2 strategy.sequence_parallel=false",
    "strategy=single training.global_batch_size=1", "strategy=single model.tied_head=false",
    "strategy=single training.global_batch_size=1 model.tied_head=false model.vocab_size=8192",
    "strategy=data nodes=2 training.precision=bfloat16 training.microbatch_size=2",
    "strategy=hsdp nodes=4 strategy.shard=2 strategy.replicate=2",
    "strategy=tensor nodes=2 model.vocab_size=8192",
    f"{HYBRID}=1 strategy.shard=2 strategy.context=2", f"{HYBRID}=1 strategy.shard=2 strategy.tensor=2",
    f"{HYBRID}=1 strategy.tensor=2 strategy.replicate=2 training.microbatch_size=2",
]  # fmt: skip
OF_PIPELINES = [
    *(f"strategy=pipeline nodes=2 strategy.schedule={name} {LAYERS}" for name in SCHEDULES),
    f"strategy=pipeline nodes=4 {LAYERS}", f"strategy=pipeline nodes=4 {ZERO_BUBBLE} {LAYERS}",
    f"strategy=pipeline nodes=4 strategy.schedule=dualpipev {LAYERS}",
    "strategy=pipeline nodes=2 training.precision=bfloat16",
    *(f"{HYBRID}=2 strategy.{axis}=2 {LAYERS}" for axis in ("shard", "replicate", "tensor")),
]  # fmt: skip
OF_EXPERTS = [f"strategy={name} model=moe_tiny" for name in ("single", "fsdp nodes=2", "expert nodes=2")]
KINDS = ((DECODER, [*ALONE, *BESIDE, *OTHERS]), (PIPELINES, OF_PIPELINES), (EXPERTS, OF_EXPERTS))
MORE = [
    *((f"{words} {mode}".strip(), kind) for kind, rows in KINDS for words in rows for mode in ("", FULL)),
    *((f"{words} {SELECTIVE}", CHOSEN) for words in (*ALONE, *BESIDE)),
]
ANNOUNCED = {DECODER: (-0.04, 0.07), **COUNTED}


class LiveBytes(TorchDispatchMode):
    """Follows the memory of each tensor that an operator returns while it is active.

    peak: the largest sum after any operator, with the memory of `tensors`, which exist already.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._storages: dict[int, StorageWeakRef] = {}
        self.peak = 0
        self._note(list(tensors))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then dispatches its local operators
        found = function(*args, **(kwargs or {}))
        self._note(tree_leaves(found))
        return found

    def _note(self, values: list[Any]) -> None:
        for tensor in filter(torch.is_tensor, values):
            while is_traceable_wrapper_subclass(tensor):  # a DTensor, or the result of a collective
                (name, *_), _ = tensor.__tensor_flatten__()
                tensor = getattr(tensor, name)
            storage = tensor.untyped_storage()
            self._storages[storage._cdata] = StorageWeakRef(storage)
        sizes = {key: _living_bytes(reference) for key, reference in self._storages.items()}
        self._storages = {key: self._storages[key] for key, size in sizes.items() if size is not None}
        self.peak = max(self.peak, sum(size or 0 for size in sizes.values()))


def _living_bytes(reference: StorageWeakRef) -> int | None:
    """The bytes of a storage, of which fully_shard frees some without an end; None once it has gone."""
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return None if storage is None else storage.nbytes()


def received_by(stages: Iterable[Stage]) -> list[Tensor]:
    """What torch allocated in the first step for the messages of all steps."""
    tables = [table for stage in stages for table in (stage.args_recv_info, stage.grad_recv_info)]
    received = [info.buffer for table in tables for infos in table.values() for info in infos]
    return [buffer.detach() for buffer in received if buffer is not None]


def peak_bytes(*overrides: str) -> int:
    """Of a step of a training on this rank, when the optimizer has its state and torch has its buckets."""
    session = opened(*overrides)
    assembled, weights = session.assembled, session.assembled.named_parameters()
    optimizer = build_optimizer(weights, session.config.optimizer)
    batches = session.batches(session.data.train, seed=0)
    for _ in range(2):
        optimizer.zero_grad()
        assembled.forward_backward.train(*batches.at(0))
    optimizer.step()
    held = [numbers for weight in weights.values() for numbers in (weight.detach(), weight.grad)]
    optimizer.zero_grad()
    inputs, targets = batches.at(1)
    driver = assembled.forward_backward
    stages = driver._parts if isinstance(driver, PipelineDriver) else ()
    live = LiveBytes([*held, *optimizer.state().values(), *received_by(stages)])
    del held  # the gradients stay only in buckets
    with live:
        assembled.forward_backward.train(inputs, targets)
    return live.peak


@pytest.mark.parametrize(("words", "kind"), [*CASES, *in_full([case for case in MORE if case not in CASES])])
def test_a_planned_peak_is_as_far_off_as_it_says(workers: Workers, words: str, kind: str) -> None:
    run = ("training.global_batch_size=16", "device=cpu", "launcher=local", *words.split())
    found = plan(resolve(composed(*run))[0])
    assert found is not None
    peaks = workers.run(len(found.devices), peak_bytes, *run)
    low, high = ANNOUNCED[kind]
    for held, peak in zip(found.devices, peaks, strict=True):
        assert low < held.total / peak - 1 < high
