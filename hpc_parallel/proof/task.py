"""The task of `python -m hpc_parallel parity`: train, and save the first gradients and the last weights.

Tensors that a layout has split are gathered under full names, so that any two layouts can be compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpc_parallel.config.build import build
from hpc_parallel.data.dataset import as_data
from hpc_parallel.data.sampler import to_device
from hpc_parallel.proof.compare import ROUNDED
from hpc_parallel.proof.small_results import PrecisionLoss
from hpc_parallel.record.safe_write import replacing, write_text
from hpc_parallel.strategies import exchange
from hpc_parallel.strategies.assemble import Assembled
from hpc_parallel.training.checkpoint import statistics
from hpc_parallel.worker.session import TaskContext
from hpc_parallel.worker.train import train


def prove(context: TaskContext) -> None:
    """Train as `worker.train.train` does, and write tensors to the folder `proof`."""
    first: list[dict[str, NDArray[Any]]] = []

    def keep(assembled: Assembled) -> None:
        if not first:
            parameters = assembled.named_parameters()
            first.append(full_arrays({name: p.grad for name, p in parameters.items() if p.grad is not None}))

    trained = train(context, on_gradients=keep)
    folder = context.folder.proof
    folder.mkdir(mode=0o700, exist_ok=True)
    gradients = first[0] if first else {}  # with a parameter server, only the server has them
    write_once(folder, "gradients", gradients)
    write_once(folder, "weights", full_arrays({**trained.named_parameters(), **statistics(trained)}))
    if context.config.devices == 1 and context.config.training.precision == "float64":
        data = as_data(build(context.config.data, key="data"))
        first_samples = data.train.batch(np.arange(2, dtype=np.int64) % len(data.train))
        with PrecisionLoss() as rounding:
            trained.build_schedule(1).train(*to_device(first_samples, context.device))
        if rounding.seen:
            write_text(folder / ROUNDED, "")


def full_arrays(tensors: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
    """Returns each tensor unsplit. All ranks that share slices must call it together."""
    full = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    held = {name: tensor.detach().cpu() for name, tensor in full.items()}
    # numpy has no bfloat16.
    exact = {name: t.float() if t.dtype == torch.bfloat16 else t for name, t in held.items()}
    return {name: tensor.numpy().copy() for name, tensor in exact.items()}


def write_once(folder: Path, kind: str, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Write `<kind>-<rank>.npz` with the tensors that no lower rank holds as an identical copy.

    If copies that should be equal differ, all of them are written, and the comparison finds the wrong copy.
    """
    contents = {(name, hashlib.sha256(array.tobytes()).hexdigest()) for name, array in tensors.items()}
    by_rank = exchange.all_gather(sorted(contents))
    written = {(name, digest) for lower in by_rank[: dist.get_rank()] for name, digest in lower}
    new = {name: tensors[name] for name, _ in sorted(contents - written)}
    if new:
        with replacing(folder / f"{kind}-{dist.get_rank()}.npz") as file:
            np.savez(file, **new)  # type: ignore[arg-type]
