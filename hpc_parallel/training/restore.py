"""Where a run goes on: its newest checkpoint that is sound, looked for by all ranks together."""

from __future__ import annotations

import sys
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist

from hpc_parallel.problems import ConfigError
from hpc_parallel.record import checkpoint_index
from hpc_parallel.record.checkpoint_index import Checkpoint
from hpc_parallel.strategies import exchange
from hpc_parallel.training.checkpoint import State, random_names, random_state, read, set_random_state


def newest_sound(folder: Path, *, group: dist.ProcessGroup | None) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint in `folder` whose checksums agree; each rank looks at a part of its files.

    Of each damaged one a warning that names it and what it costs, told on the first rank's stderr too.
    """
    rank = dist.get_rank()
    names = [(each.path.name, each.step) for each in checkpoint_index.complete(folder)] if rank == 0 else []
    found = [Checkpoint(folder / name, step) for name, step in exchange.broadcast(names, group=group)]
    warnings: list[str] = []
    if rank == 0 and (others := checkpoint_index.skipped(folder)):
        warnings.append(f"{', '.join(others)} in {folder}: links and files are no checkpoints")
        print(f"WARNING: {warnings[-1]}", file=sys.stderr, flush=True)
    for checkpoint, older in zip_longest(found, found[1:]):
        damage = checkpoint.damage(part=rank, parts=dist.get_world_size())
        words = next((each for each in exchange.all_gather(damage, group=group) if each), None)
        if words is None:
            return checkpoint, warnings
        before = older.step if older else 0
        warnings.append(
            f"the checkpoint of step {checkpoint.step} is damaged ({words}); going on from "
            f"{f'that of step {before}' if older else 'the start'}: steps {before + 1} to "
            f"{checkpoint.step} are lost"
        )
        if rank == 0:
            print(f"WARNING: {warnings[-1]}", file=sys.stderr, flush=True)
    return None, warnings


def restore(
    checkpoint: Checkpoint, state: State, *, digest: str, device: torch.device, group: dist.ProcessGroup
) -> None:
    """Fill `state`, and give the generators the state they had where as many ranks wrote it.

    Raises ConfigError where the checkpoint was trained on other data than that of `digest`.
    """
    if checkpoint.manifest["data"] != digest:
        raise ConfigError(
            [
                f"data: the checkpoint of step {checkpoint.step} was trained on other data than the "
                "configuration names now: the order of samples can't go on. Try the data that it began with."
            ]
        )
    known = set(random_names(checkpoint)) >= set(random_state(device))
    all_known = torch.tensor(int(known))
    dist.all_reduce(all_known, op=dist.ReduceOp.MIN, group=group)
    drawn = random_state(device) if all_known else {}
    read(checkpoint, state | drawn, group=group)
    if drawn:
        set_random_state(drawn, device=device)
