"""Targets that a loss leaves out are no terms of its mean on any layout. A loss that is no sum is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hpc_parallel.config.build import build
from hpc_parallel.data.dataset import DatasetData, as_data
from hpc_parallel.data.sampler import sample_order
from hpc_parallel.models.layered import LayeredModel, materialise
from hpc_parallel.models.transformer import Transformer
from hpc_parallel.worker.session import read_config
from tests.datasets import Masked
from tests.marks import in_full
from tests.parity import COMMON, largest_difference, tensor_difference
from tests.workers import Train, Trained, Workers, do_or_refuse

SAMPLES, SHARE, HELD_OUT = 100, 0.35, 35
DATA = DatasetData(dataset=Masked(SAMPLES), validation_share=SHARE)
BLANK = DATA.validation.indices(np.arange(16, 32))  # the second of three batches
WORDS = (
    *(word for word in COMMON if not word.startswith("data.")), "data=dataset", "data.vocab_size=256",
    "data.dataset._target_=tests.datasets.Masked", f"+data.dataset.samples={SAMPLES}",
    f"+data.dataset.blank={BLANK}", f"data.validation_share={SHARE}",
    f"training.validation_samples={HELD_OUT}", "training.precision=float64",
)  # fmt: skip
LAYOUTS = (
    "strategy=data nodes=2 training.microbatch_size=2",
    "strategy=tensor nodes=2",
    "strategy=pipeline nodes=2",
    "strategy=context nodes=2",
    "strategy=parameter_server nodes=3 strategy.dedicated_server=true",
    *in_full([
        ("strategy=dataparallel gpus_per_node=2",), ("strategy=fsdp nodes=2",),
        ("strategy=fsdp nodes=2 gpus_per_node=2 strategy.context=2",),
        ("strategy=pipeline nodes=2 gpus_per_node=2 strategy.pipeline=2 strategy.replicate=2",),
        ("strategy=pipeline nodes=2 strategy.schedule=interleaved",),
        ("strategy=data nodes=2 strategy.shares=[1,3]",),
    ]),
)  # fmt: skip


class Ignoring(Transformer):
    """A decoder that is told which targets do not count."""

    ignore_index = -100


class WithDim(Transformer):
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")[None]


class Mean(Transformer):
    """A decoder whose loss is a mean."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())


class Counting(Transformer):
    """A decoder that counts its terms by their values."""

    def loss_terms(self, target: Tensor) -> int:
        return int((target != -100).sum())


class Padding(Transformer):
    """A decoder whose loss counts the target that it says to ignore."""

    ignore_index = 0


@pytest.fixture
def reference(trained: Train) -> Trained:
    return trained(*WORDS, of("Ignoring"), "strategy=single")


def of(name: str) -> str:
    return f"model._target_=tests.distributed.test_ignored_targets.{name}"


def test_one_device_takes_the_mean_over_what_is_left(workers: Workers, reference: Trained) -> None:
    """Of the first batch, as torch takes it."""
    config, _ = read_config(reference.folder / "config.yaml")
    model: LayeredModel = build(config.model, key="model")
    materialise(model, seed=config.seed, device="cpu", dtype=torch.float64)
    inputs, targets = as_data(build(config.data, key="data")).train.batch(first_positions(config))
    assert 0.2 < float((targets == -100).float().mean()) < 0.8
    wanted = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=-100)
    assert largest_difference([reference.losses[0]], [wanted.item()]) < 1e-12


def test_a_validation_takes_the_mean_over_all_targets_that_count(reference: Trained) -> None:
    """Of all batches together, as torch takes it: the second has none, and the third has three samples."""
    config, _ = read_config(reference.folder / "config.yaml")
    model = build(config.model, key="model").double().eval()
    inputs, targets = as_data(build(config.data, key="data")).validation.batch(np.arange(HELD_OUT))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(reference.weights[name])
        wanted = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=-100)
    assert reference.lines[-1]["validation_loss"] == pytest.approx(wanted.item(), rel=1e-12)


def first_positions(config: Any) -> Any:
    samples = len(as_data(build(config.data, key="data")).train)
    return sample_order(np.arange(config.training.global_batch_size), seed=config.seed, population=samples)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_follows_one_device(workers: Workers, reference: Trained, layout: str) -> None:
    split = workers.train(*WORDS, of("Ignoring"), *layout.split())
    assert largest_difference(split.losses, reference.losses) < 1e-10
    assert tensor_difference(split.gradients, reference.gradients) < 1e-10
    validated = [[line.get("validation_loss") for line in run.lines] for run in (split, reference)]
    assert largest_difference(*([loss for loss in losses if loss] for losses in validated)) < 1e-10


@pytest.mark.parametrize(
    ("name", "words", "reason"),
    [
        ("Transformer", (), "the data has the target -100, which counts as a term of the loss"),
        (
            "Transformer",
            ("+data.dataset.ignored=300",),
            "the data has the target 300, but the model's classes are 0 to 255",
        ),
        ("Mean", (), "Mean.loss must return the SUM of its terms"),
        (
            "WithDim",
            (),
            "WithDim.loss must return one number (a tensor of shape []), the SUM of its terms, but returns",
        ),
        ("Counting", (), "Counting.loss_terms depends on the values of the targets"),
        (
            "Padding",
            ("+data.dataset.ignored=0",),
            "Padding.ignore_index is 0, but the loss of such targets alone is",
        ),
    ],
)
@pytest.mark.parametrize("layout", ["strategy=single", *in_full([("strategy=fsdp nodes=2",)])])
def test_what_has_no_mean_is_refused(
    workers: Workers, tmp_path: Path, name: str, words: tuple[str, ...], reason: str, layout: str
) -> None:
    target = () if name == "Transformer" else (of(name),)
    run = workers.prepare(*WORDS, *target, *words, *layout.split())
    told = workers.run(run.processes, do_or_refuse, str(run.folder.path), str(tmp_path))
    assert all(reason in text for text in told)
    assert not run.folder.metrics.exists()
