"""The mean over held-out samples: each counts once, whatever the batch is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from hpc_parallel.data.sampler import Batches
from hpc_parallel.problems import ConfigError
from hpc_parallel.strategies.loss import WithMetrics
from hpc_parallel.training.validation import validate

COUNT = 11  # of batches of 4
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Classes:
    """Logits of 5 positions for 7 classes, and targets. Those of the samples in `blank` do not count."""

    def __init__(self, blank: range) -> None:
        generator = torch.Generator().manual_seed(5)
        self.logits = torch.randn(COUNT, 5, 7, generator=generator, dtype=torch.float64)
        self.targets = torch.randint(7, (COUNT, 5), generator=generator)
        self.targets[blank.start : blank.stop] = -100
        self.targets[1, 2:] = -100

    def __len__(self) -> int:
        return COUNT

    def batch(self, positions: Any) -> tuple[Tensor, Tensor]:
        return self.logits[positions], self.targets[positions]


def summed(output: Tensor, target: Tensor) -> Tensor:
    assert len(target)  # a batch without samples need not have a loss
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum")


def hits(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    return {"hits": (output.argmax(-1) == target).sum()}


def counted(target: Tensor) -> Tensor:
    return (target != -100).sum()


def validated(samples: Classes, *, microbatches: int = 1, batch: int = 4) -> dict[str, float | None]:
    evaluation = WithMetrics(summed, hits, terms=counted, model="Net")

    @torch.no_grad()
    def evaluate(inputs: Tensor, targets: Tensor) -> Tensor:
        pieces = zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True)
        return torch.stack([evaluation(*piece) for piece in pieces]).sum(0)

    batches = Batches(samples=samples, global_batch_size=batch, seed=None, microbatches=microbatches)
    return validate(evaluate, batches, count=COUNT, device=CPU, evaluation=evaluation)


@pytest.mark.parametrize(("batch", "microbatches"), [(4, 1), (4, 4), (16, 1), (16, 4), (1, 1)])
def test_any_batch_gives_the_mean_over_all_targets_that_count(batch: int, microbatches: int) -> None:
    """The second batch of 4 has none, and 16 are more than there are samples."""
    samples = Classes(blank=range(4, 8))
    logits, targets = samples.batch(np.arange(COUNT))
    wanted = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100).item()
    right = int((logits.argmax(-1) == targets).sum())
    means = validated(samples, batch=batch, microbatches=microbatches)
    assert means["validation_loss"] == pytest.approx(wanted, rel=1e-12)
    assert means["validation_hits"] == pytest.approx(right / int((targets != -100).sum()), rel=1e-12)
    assert right > 0


def test_held_out_samples_without_a_target_that_counts_are_refused() -> None:
    with pytest.raises(ConfigError, match="all targets of the 11 held-out samples are ignored"):
        validated(Classes(blank=range(COUNT)))


def of_two(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return ((output[0] - target).square().sum(-1) + output[1]).sum()


@torch.no_grad()
def test_the_first_samples_of_a_tuple_of_outputs_count_alone() -> None:
    evaluation: Any = WithMetrics(of_two, lambda *_: {}, terms=len, model="Net")
    output, target = (torch.full((4, 2), 3.0), torch.arange(4.0)), torch.ones(4, 2)
    evaluation.begin_batch([2])
    assert evaluation(output, target).tolist() == [2 * 8 + 0 + 1, 2]
    assert evaluation(output, target).tolist() == [4 * 8 + 6, 4]  # of a batch whose samples all count


@torch.no_grad()
@pytest.mark.parametrize("transposed", [True, False])
def test_an_output_that_begins_with_another_dim_is_not_cut(transposed: bool) -> None:
    """Sequence first: its first rows are positions of all samples."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return summed(output.transpose(0, 1) if transposed else output, target)

    generator = torch.Generator().manual_seed(5)
    logits, target = torch.randn(4, 8, 7, generator=generator), torch.randint(7, (4, 8), generator=generator)
    evaluation = WithMetrics(loss, lambda *_: {}, terms=counted, model="Net")
    evaluation.begin_batch([3])
    if not transposed:
        assert evaluation(logits, target)[0].item() == pytest.approx(summed(logits[:3], target[:3]).item())
        return
    with pytest.raises(ConfigError, match=r"Net.loss of 4 samples is not the sum for 3 and for the rest"):
        evaluation(logits.transpose(0, 1), target)
