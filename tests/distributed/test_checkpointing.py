"""Activation checkpointing changes no number on any layout, and keeps what it says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_parallel.models.convnet import ConvNet
from hpc_parallel.models.layered import LayeredModel, materialise
from hpc_parallel.models.transformer import Transformer
from hpc_parallel.problems import ConfigError
from hpc_parallel.strategies import checkpointing
from tests.marks import in_full
from tests.parity import follow_one_device
from tests.workers import Train

FULL, SELECTIVE = (f"training.activation_checkpointing={keeps}" for keeps in ("full", "selective"))
TWO = ("nodes=2", "model.layers=2")
PIPELINE = ("strategy=pipeline", *TWO, "strategy.microbatches=8")
LAYOUTS = {
    "single": ("strategy=single", "model.layers=2", FULL),
    "data over 2, accumulating 4": ("strategy=data", *TWO, "training.microbatch_size=2", FULL),
    "fsdp over 2": ("strategy=fsdp", *TWO, SELECTIVE),
    "tensor over 2": ("strategy=tensor", *TWO, SELECTIVE),
    "tensor over 2, again from the input": ("strategy=tensor", *TWO, FULL),
    "pipeline of 2, gpipe": (*PIPELINE, "strategy.schedule=gpipe", SELECTIVE),
    "pipeline of 2, 1f1b": (*PIPELINE, FULL),
    "pipeline of 2, interleaved": (*PIPELINE, "strategy.schedule=interleaved", "model.layers=4", FULL),
    "context over 2": ("strategy=context", *TWO, SELECTIVE),
}


IN_FULL = (
    "single", "data over 2, accumulating 4", "tensor over 2, again from the input", "pipeline of 2, gpipe",
    "pipeline of 2, interleaved",
)  # fmt: skip
CASES = [*(layout for layout in LAYOUTS if layout not in IN_FULL), *in_full((layout,) for layout in IN_FULL)]


@pytest.mark.parametrize("layout", CASES)
def test_layout_follows_one_device(trained: Train, layout: str) -> None:
    """The reference keeps all its activations."""
    follow_one_device(trained, LAYOUTS[layout])


class Alive(TorchDispatchMode):
    """The memory that operations return and something still holds, weights and what views them left out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._weights = {weight.data_ptr() for weight in model.parameters()}
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(found):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._weights:
                    self._storages[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        return found

    @property
    def bytes(self) -> int:
        return sum(count for reference, count in self._storages.values() if not reference.expired())


BATCH, SEQ, DIM, FFN_DIM, HEADS = 2, 16, 32, 96, 4


def _kept_bytes(keeps: str, *, layers: int) -> int:
    """Between the forward and the backward pass."""
    model = Transformer(layers=layers, dim=DIM, heads=HEADS, kv_heads=2, ffn_dim=FFN_DIM, vocab_size=64)
    materialise(model, seed=0, device="cpu", dtype=torch.float32)
    checkpointing.apply(model, keeps=keeps, compiled=False)
    tokens = torch.zeros(BATCH, SEQ, dtype=torch.int64)
    with Alive(model) as alive:
        output = model(tokens)
    assert output.requires_grad
    return alive.bytes


def test_a_block_keeps_the_results_of_its_policy() -> None:
    """From one depth to the next: nothing but the input, or what nine products gave besides."""
    growth = {
        keeps: _kept_bytes(keeps, layers=3) - _kept_bytes(keeps, layers=2)
        for keeps in ("none", "selective", "full")
    }
    tokens = BATCH * SEQ
    block_input = 4 * tokens * DIM
    query_key_value = 4 * tokens * (DIM + DIM // 2 + DIM // 2)
    attention = 4 * tokens * (DIM + HEADS)  # its outputs and the logarithm of each row's sum
    written = 2 * 4 * tokens * DIM  # by the two projections into the stream
    gate_and_up = 2 * 4 * tokens * FFN_DIM
    assert growth["full"] == block_input
    assert growth["selective"] == block_input + query_key_value + attention + written + gate_and_up
    assert growth["none"] > 1.5 * growth["selective"]


@pytest.mark.parametrize("keeps", ["full", "selective"])
def test_running_statistics_are_updated_once(keeps: str) -> None:
    """Plain BatchNorm too; after a second step, since recomputing with other statistics changes nothing."""
    images = torch.arange(4 * 16 * 16).reshape(4, 1, 16, 16) % 251
    buffers = []
    for way in ("none", keeps):
        model = ConvNet(channels=[4, 6], classes=3)
        materialise(model, seed=0, device="cpu", dtype=torch.float64)
        checkpointing.apply(model, keeps=way, compiled=False)
        for _ in range(2):
            model.loss(model(images), torch.tensor([0, 1, 2, 0])).backward()
        buffers.append(dict(model.named_buffers()))
    assert buffers[1]["blocks.0.norm.num_batches_tracked"] == 2
    assert buffers[0].keys() == buffers[1].keys()
    assert all(torch.equal(buffers[1][name], buffer) for name, buffer in buffers[0].items())


class Overwrites(nn.Module):
    """torch would keep the product and not see the rectifier write through the view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.linear(x)) * x


def _gradient(keeps: str) -> Tensor:
    torch.manual_seed(0)
    model = LayeredModel(stem=nn.Identity(), blocks=[Overwrites()], head=nn.Identity())
    checkpointing.apply(model, keeps=keeps, compiled=False)
    model(torch.arange(24.0).reshape(2, 3, 4)).sum().backward()
    gradient = model.blocks["0"].linear.weight.grad
    assert gradient is not None
    return gradient


class WritesNothing(nn.Module):
    """Its product and what it writes are empty, as the rows of a device whose experts no token chose."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        empty = self.linear(x[:0])
        return x * self.linear.weight.sum() + torch.relu_(torch.zeros(0, 4)).sum() + empty.sum()


def test_empty_results_are_not_taken_for_each_other() -> None:
    model = LayeredModel(stem=nn.Identity(), blocks=[WritesNothing()], head=nn.Identity())
    checkpointing.apply(model, keeps="selective", compiled=False)
    model(torch.ones(2, 4)).sum().backward()
    gradient = model.blocks["0"].linear.weight.grad
    assert gradient is not None
    assert torch.equal(gradient, torch.full((4, 4), 8.0))


def test_a_kept_result_that_is_overwritten_is_refused() -> None:
    assert torch.equal(_gradient("full"), _gradient("none"))
    with pytest.raises(ConfigError) as caught:
        _gradient("selective")
    (problem,) = map(str, caught.value.problems)
    assert "aten::relu_" in problem
    assert problem.endswith(
        "Try training.activation_checkpointing=full or training.activation_checkpointing=none."
    )
