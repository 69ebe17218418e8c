"""Training on packed documents: one device takes the documents one by one, and layouts follow it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hpc_parallel.config.build import build
from hpc_parallel.data.dataset import as_data
from hpc_parallel.data.sampler import sample_order
from hpc_parallel.models.layered import LayeredModel, materialise
from hpc_parallel.models.transformer import Transformer
from hpc_parallel.record.checkpoint_index import complete
from hpc_parallel.worker.session import read_config
from tests.marks import in_full
from tests.one_by_one import loss_of_documents
from tests.parity import COMMON, assert_follows, largest_difference, tensor_difference
from tests.workers import Train, Trained, Workers, do_or_refuse

WORDS = (
    *(word for word in COMMON if not word.startswith("data.")), "data=dataset", "data.packing=true",
    "data.dataset._target_=tests.datasets.Texts", "data.vocab_size=256", "data.sequence_length=32",
    "data.validation_share=0.2", "training.precision=float64", "model.layers=2",
)  # fmt: skip
KINDS = ("ring", "gather", "all_to_all")
RING, GATHER = (f"strategy.context_attention={kind}" for kind in KINDS[:2])
TWO_BY_TWO = "nodes=2 gpus_per_node=2"
MIXTURE = "model=moe_tiny model.ffn_dim=48 model.balance=0 model.balance_step=0.1 model.shared_experts=1"
LAYOUTS = (
    f"strategy=expert nodes=2 {MIXTURE}",
    "strategy=data nodes=2 training.microbatch_size=2",
    "strategy=single training.compile=true",
    "strategy=tensor nodes=2",
    "strategy=pipeline nodes=2 strategy.schedule=zbv model.layers=4",
    f"strategy=fsdp {TWO_BY_TWO} strategy.context=2 {GATHER}",
    f"strategy=context nodes=4 {RING}",
    *in_full([
        ("strategy=single training.activation_checkpointing=full",),
        ("strategy=single training.activation_checkpointing=selective training.compile=true",),
        ("strategy=single training.compile_whole=true training.compile=true",),
        ("strategy=fsdp nodes=2 training.compile=true",),
        (f"strategy=hsdp {TWO_BY_TWO}",),
        ("strategy=dataparallel gpus_per_node=2",),
        ("strategy=parameter_server nodes=3",),
        ("strategy=data nodes=2 strategy.shares=[1,3]",),
        ("strategy=tensor nodes=2 training.compile=true",),
        ("strategy=tensor nodes=2 strategy.sequence_parallel=false strategy.loss_parallel=false",),
        (f"strategy=tensor nodes=2 {MIXTURE}",),
        (f"strategy=context {TWO_BY_TWO} strategy.context=2 strategy.expert=2 {RING} {MIXTURE}",),
        (f"strategy=pipeline nodes=2 strategy.schedule=1f1b training.compile=true {MIXTURE}",),
        ("strategy=pipeline nodes=2 strategy.schedule=1f1b",),
        ("strategy=pipeline nodes=2 strategy.schedule=gpipe training.compile=true",),
        ("strategy=pipeline nodes=2 strategy.schedule=interleaved model.layers=4",),
        ("strategy=pipeline nodes=2 strategy.schedule=naive training.activation_checkpointing=full",),
        *((f"strategy=context nodes=2 strategy.context_attention={kind}",)
          for kind in KINDS),
        *((f"strategy=context nodes=2 strategy.context_attention={kind} training.compile=true",)
          for kind in KINDS),
        *((f"strategy=context nodes=2 {RING} training.activation_checkpointing={kept}",)
          for kept in ("full", "selective training.compile=true")),
        (f"strategy=pipeline nodes=2 gpus_per_node=2 strategy.pipeline=2 strategy.context=2 {RING}",),
        (f"strategy=hybrid nodes=2 gpus_per_node=4 strategy.tensor=2 strategy.context=2 {RING}",),
        ("strategy=pipeline nodes=2 gpus_per_node=2 strategy.pipeline=2 strategy.context=2 " + GATHER,),
        ("strategy=tensor nodes=2 gpus_per_node=2 strategy.tensor=2 strategy.context=2 " + GATHER,),
        ("strategy=hybrid nodes=2 gpus_per_node=4 strategy.tensor=2 strategy.context=2 " + GATHER,),
    ]),
)  # fmt: skip


@pytest.fixture
def reference(trained: Train) -> Trained:
    return trained(*WORDS, "strategy=single")


@pytest.mark.parametrize("words", ["", *in_full([(MIXTURE.replace("balance_step=0.1", "balance_step=0"),)])])
def test_one_device_takes_the_documents_one_by_one(trained: Train, words: str) -> None:
    """Loss and gradient of the first batch, and the loss of all held-out documents."""
    reference = trained(*WORDS, "strategy=single", *words.split())
    config, _ = read_config(reference.folder / "config.yaml")
    data = as_data(build(config.data, key="data"))
    model: LayeredModel = build(config.model, key="model")
    materialise(model, seed=config.seed, device="cpu", dtype=torch.float64)
    first = np.arange(config.training.global_batch_size)
    inputs, targets = data.train.batch(sample_order(first, seed=config.seed, population=len(data.train)))
    loss = loss_of_documents(model, inputs, targets) / (targets != -100).sum()
    loss.backward()
    assert largest_difference([reference.losses[0]], [loss.item()]) < 1e-12
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    assert tensor_difference(reference.gradients, gradients) < 1e-12
    held_out = data.validation.batch(np.arange(min(19, len(data.validation))))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(reference.weights[name])
        wanted = loss_of_documents(model, *held_out) / (held_out[1] != -100).sum()
    assert reference.lines[-1]["validation_loss"] == pytest.approx(wanted.item(), rel=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_follows_one_device(workers: Workers, trained: Train, layout: str) -> None:
    deeper = [word for word in layout.split() if word.startswith("model")]
    reference = trained(*WORDS, "strategy=single", *deeper)
    assert_follows(workers.train(*WORDS, *layout.split()), reference, losses=1e-10, weights=1e-10)


class Deaf(nn.Module):
    """A block that takes the argument and does not use it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        return self.block(x)  # type: ignore[no-any-return]


class Mixing(Transformer):
    """A model of a user that lets documents see each other."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        for name, block in list(self.blocks.items()):
            self.blocks[name] = Deaf(block)


class Keeping(Transformer):
    """A model of a user that keeps documents apart."""


def test_a_model_of_ones_own_is_tried_with_two_documents(
    workers: Workers, reference: Trained, tmp_path: Path
) -> None:
    own = "model._target_=tests.distributed.test_packed_training"
    run = workers.prepare(*WORDS, "strategy=single", f"{own}.Mixing")
    (message,) = workers.run(run.processes, do_or_refuse, str(run.folder.path), str(tmp_path))
    assert "Mixing lets a document see the one before it" in message
    kept = workers.train(*WORDS, "strategy=data", "nodes=2", f"{own}.Keeping")
    assert largest_difference(kept.losses, reference.losses) < 1e-10


class Drops(nn.Module):
    """A block, and dropout of what it adds."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.drop = block, nn.Dropout(0.3)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        return x + self.drop(self.block(x, documents) - x)


class Dropping(Transformer):
    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        for name, block in list(self.blocks.items()):
            self.blocks[name] = Drops(block)


@pytest.mark.parametrize(
    "after",
    [
        f"strategy=context nodes=2 {RING}",
        *in_full([("strategy=pipeline nodes=2",), (f"strategy=hsdp {TWO_BY_TWO}",)]),
    ],
)
def test_a_run_with_dropout_goes_on_in_another_layout(workers: Workers, trained: Train, after: str) -> None:
    words = (
        *WORDS, "model._target_=tests.distributed.test_packed_training.Dropping", "training.steps=4",
        "training.validate_every=4", "training.checkpoint_every=2", "strategy.verify=never",
    )  # fmt: skip
    whole, begun = trained(*words, "strategy=single"), trained(*words, "strategy=fsdp", "nodes=2")
    assert_follows(begun, whole, losses=1e-10, weights=1e-10)
    (half,) = (each for each in complete(begun.folder / "checkpoints") if each.step == 2)
    ended = workers.train(*words, *after.split(), resume_from=half.path)
    assert largest_difference(ended.losses, whole.losses[2:]) < 1e-10
    assert tensor_difference(ended.weights, whole.weights) < 1e-10
    plain = trained(*WORDS, "strategy=single")
    assert abs(whole.losses[0] - plain.losses[0]) > 1e-3  # something was dropped
