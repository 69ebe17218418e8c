"""Gradients that are averaged in bfloat16: half the bytes, nearly the same curve."""

from __future__ import annotations

from tests.parity import COMMON, Alone, largest_difference
from tests.workers import Workers, train_here

DATA = ("strategy=data", "nodes=2", "model.layers=2", "strategy.bucket_mb=0.05")
COMPRESSED = (*DATA, "strategy.gradient_compression=bfloat16")


def test_the_curve_stays_near_and_is_not_equal(workers: Workers, alone: Alone) -> None:
    coarse = workers.train(*COMMON, *COMPRESSED, "training.microbatch_size=2")
    fine = alone("training.precision=float32", "model.tied_head=true", "model.layers=2")
    assert 1e-5 < largest_difference(coarse.losses, fine.losses) < 1e-2


def _averaged_bytes(run_folder: str) -> tuple[int, int]:
    """Bytes that went into asynchronous all-reduces, which are the hook's alone, and bytes of the weights."""
    import torch.distributed as dist

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
    steps = 3
    run = workers.prepare(*COMMON, *COMPRESSED, f"training.steps={steps}")
    for averaged, weights in workers.run(2, _averaged_bytes, str(run.folder.path)):
        assert averaged == steps * weights / 2
