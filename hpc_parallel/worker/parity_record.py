"""The task of `python -m hpc_parallel parity`: train, and keep the first gradient and the last weights whole.

What a layout has scattered is put together under full names, so that any two layouts can be compared.
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

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import replacing
from hpc_parallel.strategies import exchange
from hpc_parallel.strategies.assemble import Assembled
from hpc_parallel.training.checkpoint import statistics
from hpc_parallel.worker.train import train


def prove(
    config: RunConfig,
    *,
    values: dict[str, Any],
    folder: RunFolder,
    device: torch.device,
    environment: Mapping[str, str],
) -> None:
    """Train as `session.train` does; every rank that has something of its own writes to `folder.proof`."""
    first: list[dict[str, NDArray[Any]]] = []

    def keep(assembled: Assembled) -> None:
        if not first:
            held = assembled.named_parameters()
            first.append(whole({name: p.grad for name, p in held.items() if p.grad is not None}))

    trained = train(
        config, values=values, folder=folder, device=device, environment=environment, on_gradients=keep
    )
    folder.proof.mkdir(mode=0o700, exist_ok=True)
    write_once(folder.proof, "gradients", first[0] if first else {})  # a server alone has the whole
    write_once(folder.proof, "weights", whole({**trained.named_parameters(), **statistics(trained)}))


def whole(tensors: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
    """Each tensor as a device alone would have it; all ranks that share slices must ask together."""
    full = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in full.items()}


def write_once(folder: Path, kind: str, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Write `<kind>-<rank>.npz` with what no rank before this one has too, to the last bit.

    Copies that should be alike and are not are thus all there, and the comparison finds the wrong one.
    """
    contents = {(name, hashlib.sha256(array.tobytes()).hexdigest()) for name, array in tensors.items()}
    everyone = exchange.all_gather(sorted(contents))
    before = {(name, digest) for rank in everyone[: dist.get_rank()] for name, digest in rank}
    own = {name: tensors[name] for name, _ in sorted(contents - before)}
    if own:
        with replacing(folder / f"{kind}-{dist.get_rank()}.npz") as file:
            np.savez(file, **own)  # type: ignore[arg-type]
