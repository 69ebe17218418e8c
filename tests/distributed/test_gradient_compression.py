"""Gradients that are averaged in bfloat16: half the bytes, nearly the same curve."""

from __future__ import annotations

import torch.distributed as dist

from tests.parity import COMMON, EXACTNESS, STEPS, largest_difference
from tests.workers import Train, Workers, train_here

DATA = ("strategy=data", "nodes=2", "model.layers=2", "strategy.bucket_mb=0.05")
COMPRESSED = (*DATA, "strategy.gradient_compression=bfloat16")


def test_the_curve_stays_near_and_is_not_equal(trained: Train) -> None:
    coarse = trained(*COMMON, *COMPRESSED, "training.microbatch_size=2")
    fine = trained(*COMMON, *EXACTNESS["float32"][0], "strategy=single", "model.layers=2")
    assert 1e-5 < largest_difference(coarse.losses, fine.losses) < 1e-2


def _averaged_bytes(run_folder: str) -> tuple[int, int]:
    """Bytes that went into asynchronous all-reduces, which are the hook's alone, and bytes of the weights."""
    counted, original = [], dist.all_reduce

    def counting(tensor, *arguments, **named):  # type: ignore[no-untyped-def]
        if named.get("async_op"):
            counted.append(tensor.nbytes)
        return original(tensor, *arguments, **named)

    dist.all_reduce = counting
    try:
        weights = train_here(run_folder, {})
    finally:
        dist.all_reduce = original
    return sum(counted), sum(weight.nbytes for weight in weights.values())


def test_half_the_bytes_are_averaged(workers: Workers) -> None:
    run = workers.prepare(*COMMON, *COMPRESSED, "training.measure_steps=0")
    for averaged, weights in workers.run(2, _averaged_bytes, str(run.folder.path)):
        assert averaged == STEPS * weights / 2
