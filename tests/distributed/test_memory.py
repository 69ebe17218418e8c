"""What a strategy saves: bytes of weights, gradients and optimizer state that one rank holds."""

from __future__ import annotations

import functools

import pytest
from torch.distributed.tensor import DTensor

from hpc_parallel.training.optimizer import build_optimizer
from tests.marks import in_full
from tests.parity import opened
from tests.workers import Workers

# An uneven width and feed-forward: 4 devices can't have equal slices of every weight.
MODEL = ("model.dim=132", "model.heads=2", "model.kv_heads=2", "model.ffn_dim=346", "data.max_bytes=300000")


def _held_bytes(*overrides: str) -> int:
    """After a whole step but before gradients go: what of it lives on this rank."""
    session = opened(*overrides)
    assembled = session.assembled
    optimizer = build_optimizer(assembled.named_parameters(), session.config.optimizer)
    assembled.forward_backward.train(*session.batches(session.data.train, seed=0).at(0))
    optimizer.step()
    weights = list(assembled.named_parameters().values())
    held = [
        *weights,
        *(weight.grad for weight in weights),
        *optimizer.state().values(),
    ]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in held]
    storages = {s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in local)}
    return sum(storages.values())  # gradients of one group are views of one buffer


@pytest.fixture(scope="module")
def alone(workers: Workers):
    return functools.cache(lambda: workers.run(1, _held_bytes, "strategy=single", *MODEL)[0])


@pytest.mark.parametrize(
    ("layout", "ranks", "share"),
    [
        (("strategy=fsdp", "nodes=2"), 2, 1 / 2),
        (("strategy=tensor", "nodes=2"), 2, 1 / 2),
        (("strategy=dataparallel", "gpus_per_node=2"), 1, 1),
        *in_full(
            [
                (("strategy=fsdp", "nodes=4"), 4, 1 / 4),
                (("strategy=hsdp", "nodes=2", "gpus_per_node=2"), 4, 1 / 2),
                (("strategy=fsdp", "nodes=2", "gpus_per_node=2", "strategy.tensor=2"), 4, 1 / 4),
                (("strategy=context", "nodes=2"), 2, 1),
                (("strategy=fsdp", "nodes=4", "strategy.reshard=false"), 4, 1 / 4),
                (("strategy=fsdp", "nodes=2", "gpus_per_node=2", "strategy.context=2"), 4, 1 / 4),
            ]
        ),
    ],
)
def test_a_rank_holds_its_share(
    workers: Workers, alone, layout: tuple[str, ...], ranks: int, share: float
) -> None:
    held = workers.run(ranks, _held_bytes, *layout, *MODEL)
    assert [found / alone() for found in held] == pytest.approx([share] * ranks, rel=0.05)


BLOCK, EMBEDDING, NORM = 4 * 132 * 132 + 3 * 132 * 346 + 2 * 132, 256 * 132, 132
STAGES = {  # weights of each; the tied head is a copy of its own
    1: [EMBEDDING + 4 * BLOCK + NORM],
    2: [EMBEDDING + 2 * BLOCK, 2 * BLOCK + NORM + EMBEDDING],
    4: [EMBEDDING + BLOCK, BLOCK, BLOCK, BLOCK + NORM + EMBEDDING],
}
WEIGHT_BYTES = 4 * 4  # itself, its gradient and two moments


@pytest.mark.parametrize(
    ("strategy", "stages"),
    [("single", 1), ("pipeline", 2), *in_full([("model", 2), ("pipeline", 4)])],
)
def test_a_stage_holds_its_blocks(workers: Workers, strategy: str, stages: int) -> None:
    held = workers.run(stages, _held_bytes, f"strategy={strategy}", f"nodes={stages}", *MODEL)
    assert held == pytest.approx([WEIGHT_BYTES * weights for weights in STAGES[stages]], rel=1e-3)


@pytest.mark.full
def test_a_hybrid_holds_a_part_of_a_stage(workers: Workers) -> None:
    """Pipeline 2 x tensor 2: half of a stage's weights, all but its norms'."""
    held = workers.run(4, _held_bytes, "strategy=hybrid", "nodes=2", "gpus_per_node=2", *MODEL)
    first, last = (WEIGHT_BYTES * weights / 2 for weights in STAGES[2])
    assert held == pytest.approx([first, first, last, last], rel=0.01)


def test_data_parallelism_saves_nothing(workers: Workers, alone) -> None:
    """The measure can fail: replicas are whole."""
    held = workers.run(2, _held_bytes, "strategy=data", "nodes=2", *MODEL)
    assert min(held) >= alone()


def test_tiles_save_nothing_of_the_weights(workers: Workers) -> None:
    """What they split is the image."""
    net = ("model=segmenter", "data=cells", "data.samples=64", "model.channels=[8,12]")
    (whole,) = workers.run(1, _held_bytes, "strategy=single", *net)
    assert workers.run(2, _held_bytes, "strategy=tile", "nodes=2", *net) == [whole, whole]
