"""Who sends what to whom, as `layout/exchanges.py` derives it, against the collectives of real steps, and how
often weights are gathered and small gradients are added up.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import Parameter

from hpc_parallel.commands.grid import recorded_setup
from hpc_parallel.layout.exchanges import ALL_GATHER, COPY, Exchange, Often, exchanges
from hpc_parallel.strategies.gradients import local_gradients
from tests.marks import in_full
from tests.matrix import IMAGES, TEXTS, cases
from tests.parity import COMMON, TIED
from tests.watched_collectives import Seen
from tests.workers import Train, Trained, Workers

LOGITS = "strategy.loss_parallel=false strategy.sequence_parallel=false"  # gathered on the last stage only
HYBRID = f"strategy=hybrid nodes=2 gpus_per_node=2 strategy.microbatches=2 {LOGITS}"
WORDS = {
    **TEXTS,
    **IMAGES,
    "compressed": (*COMMON, "strategy=data", "nodes=2", "strategy.gradient_compression=bfloat16"),
    "whole logits of stages": (*COMMON, *HYBRID.split()),
    "whole logits of stages in a V": (*COMMON, *HYBRID.split(), "strategy.schedule=zbv"),
    "untied stages": (*COMMON, "strategy=pipeline", "nodes=2", "model.tied_head=false"),
}


def derived(run: Trained) -> list[Exchange]:
    """The exchanges of a run by its configuration, of which all is known of our models."""
    config = yaml.safe_load((run.folder / "config.yaml").read_text())
    setup = recorded_setup(config, devices=config["nodes"] * config["gpus_per_node"], device="cpu")
    assert setup is not None
    assert setup.uncovered is None
    found = exchanges(setup)
    assert all(exchange.only_if is None for exchange in found)
    return found


@pytest.mark.parametrize("layout", cases(WORDS))
def test_a_real_step_has_these_collectives_among_these_ranks(trained: Train, layout: str) -> None:
    run = trained(*WORDS[layout])
    found = derived(run)
    assert {exchange.how for exchange in found} == set(run.summary["traffic"])
    between_ranks = [exchange for exchange in found if exchange.how != COPY]
    assert set(run.collectives) == {
        (exchange.how, group) for exchange in between_ranks for group in exchange.groups
    }


REPEATED = [
    ("strategy=fsdp nodes=2", "training.microbatch_size={}"),
    ("strategy=pipeline nodes=2", "strategy.microbatches={}"),
    ("strategy=data nodes=2 gpus_per_node=2 strategy.tensor=2", "training.microbatch_size={}"),
    ("strategy=context nodes=2", "training.microbatch_size={}"),
]


@pytest.mark.parametrize(("layout", "key"), [*REPEATED[:1], *in_full(REPEATED[1:])])
def test_they_are_as_often_as_said(trained: Train, layout: str, key: str) -> None:
    """With twice the microbatches a collective is more frequent exactly if it is not once a step.

    With half the blocks, one of each block is less frequent.
    """
    words = (*COMMON, *TIED, *layout.split())
    run = trained(*words, key.format(4))
    few = run.collectives
    many = trained(*words, key.format(2 if "size" in key else 8)).collectives
    short = trained(*words, key.format(4), "model.layers=2").collectives
    for (how, group), often in assert_grows_with_microbatches(run, many).items():
        assert Often.BLOCK not in often or short[how, group] < few[how, group], (how, group)


def assert_grows_with_microbatches(few: Trained, many: Counter[Seen]) -> dict[Seen, set[Often]]:
    """Returns how often each collective of the run is derived to be."""
    found = derived(few)
    derivation = {
        (how, group): {e.often for e in found if e.how == how and group in e.groups}
        for how, group in few.collectives
    }
    for seen, often in derivation.items():
        assert (many[seen] > few.collectives[seen]) == (often != {Often.STEP}), seen
    return derivation


def summed_norms() -> tuple[list[Tensor], int]:
    """Three gradients that are partial sums, added up; and the all-reduces that took."""
    axis = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    weights = []
    for index, size in enumerate((3, 4, 5)):
        weight = Parameter(DTensor.from_local(torch.zeros(size), axis, [Replicate()], run_check=False))
        gradient = torch.full((size,), float(10**index * (dist.get_rank() + 1)))
        weight.grad = DTensor.from_local(gradient, axis, [Partial()], run_check=False)
        weights.append(weight)
    calls, original = Counter[str](), dist.all_reduce

    def counted(*arguments: object, **options: object) -> object:
        calls["all_reduce"] += 1
        return original(*arguments, **options)  # type: ignore[arg-type]

    dist.all_reduce = counted  # type: ignore[assignment]
    try:
        return local_gradients(weights), calls["all_reduce"]
    finally:
        dist.all_reduce = original


def test_partial_gradients_of_whole_weights_are_added_up_at_once(workers: Workers) -> None:
    for gradients, calls in workers.run(2, summed_norms):
        assert [gradient.tolist() for gradient in gradients] == [[3.0] * 3, [30.0] * 4, [300.0] * 5]
        assert calls == 1


def test_a_stage_gathers_its_weights_once_a_step(trained: Train) -> None:
    """With 8 microbatches as with 2, on the first stage; what stages send each other is more frequent."""
    words, shard = TEXTS["pipeline 2 x shard 2"], (0, 1)
    few, many = (trained(*words, *more) for more in (("strategy.microbatches=2",), ()))
    assert {Often.STEP} in assert_grows_with_microbatches(few, many.collectives).values()
    assert few.collectives[ALL_GATHER, shard] == many.collectives[ALL_GATHER, shard] > 0
