"""A job that asked for GPUs and trains on the CPU, because its torch finds none, says so."""

from __future__ import annotations

import pytest
import torch

from hpc_parallel.config.resolve import resolve
from hpc_parallel.worker.main import unused_gpus
from tests.composed import composed


@pytest.mark.parametrize(
    ("words", "device", "said"),
    [
        (("launcher=slurm",), "cpu", "finds none on n7: this run uses the CPU, in bfloat16"),
        (("launcher=slurm", "training.precision=float32"), "cpu", "this run uses the CPU, in float32"),
        (("launcher=slurm",), "cuda:0", None),
        (("launcher=slurm", "device=cpu"), "cpu", None),
        (("launcher=slurm", "cluster=cpu"), "cpu", None),
        (("launcher=local",), "cpu", None),
    ],
)
def test_it_is_said_where_gpus_were_asked_for(words: tuple[str, ...], device: str, said: str | None) -> None:
    config, *_ = resolve(composed("strategy=single", *words))
    problem = unused_gpus(config, torch.device(device), host="n7")
    assert (problem is None) == (said is None)
    assert said is None or (problem is not None and said in problem)
