"""Finds the newest undamaged checkpoint of a run, with all ranks together, and restores it."""

from __future__ import annotations

from functools import partial
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist

from hpc_parallel.problems import ConfigError, as_override, print_warning
from hpc_parallel.record import checkpoint_index
from hpc_parallel.record.checkpoint_index import Checkpoint
from hpc_parallel.record.values import table
from hpc_parallel.strategies import exchange
from hpc_parallel.training.checkpoint import (
    CheckpointReader,
    StateDict,
    random_state,
    read,
    readable,
    set_random_state,
)
from hpc_parallel.training.written_parts import read_once


def newest_sound(folder: Path, *, in_memory: int | None = None) -> tuple[Checkpoint | None, list[str]]:
    """Returns the newest checkpoint in `folder` whose checksums agree, and warnings about damaged ones.

    in_memory: a step whose copy is in memory; only checkpoints of later steps are read and returned.

    Each rank verifies a part of the files. A warning names the checkpoint and the steps that are lost;
    rank 0 also prints it to stderr.
    """
    rank = dist.get_rank()
    complete = checkpoint_index.complete(folder) if rank == 0 else []
    complete = [checkpoint for checkpoint in complete if checkpoint.step > (in_memory or -1)]
    names = [(checkpoint.path.name, checkpoint.step) for checkpoint in complete]
    checkpoints = [Checkpoint(folder / name, step) for name, step in exchange.broadcast(names)]
    warnings: list[str] = []
    if rank == 0 and (others := checkpoint_index.skipped(folder)):
        warnings.append(f"{', '.join(others)} in {folder}: only folders count as checkpoints")
        print_warning(warnings[-1])
    for checkpoint, older in zip_longest(checkpoints, checkpoints[1:]):
        local_damage = checkpoint.damage(part=rank, parts=dist.get_world_size())
        damage = next(filter(None, exchange.all_gather(local_damage)), None)
        if damage is None:
            return checkpoint, warnings
        before = older.step if older else in_memory or 0
        source = f"continuing from that of step {before}" if before else "there is none before it"
        lost = f"steps {before + 1} to {checkpoint.step} are lost"
        warnings.append(f"the checkpoint of step {checkpoint.step} is damaged ({damage}); {source}: {lost}")
        if rank == 0:
            print_warning(warnings[-1])
    return None, warnings


def restore(
    checkpoint: Checkpoint, state: StateDict, *, reader: CheckpointReader, digest: str, device: torch.device
) -> None:
    """Fill `state`; restore the random generators too if the same number of ranks wrote the checkpoint.

    `reader`: reads the checkpoint. `digest`: the digest of the run's data. Raises ConfigError if the
    checkpoint was trained on other data.
    """
    if checkpoint.manifest["data"] != digest:
        rule = "was trained on other data than the configuration names now, so the order of samples can't"
        path = table(table(checkpoint.manifest.get("config")).get("data")).get("path")
        where = f"at {as_override('data.path', path)}, " if path else ""
        advice = f"That of the checkpoint was {where}or has changed since."
        raise ConfigError([f"data: the checkpoint of step {checkpoint.step} {rule} continue. {advice}"])
    has_state = reader.entries.keys() >= random_state(device).keys()
    all_have_state = torch.tensor(int(has_state))
    dist.all_reduce(all_have_state, op=dist.ReduceOp.MIN)
    generators = random_state(device) if all_have_state else {}
    if dist.get_rank() == 0:
        for line in conversions(state, reader=reader):
            print(line, flush=True)
    read_once(readable(reader, state) | generators, partial(read, reader))
    if generators:
        set_random_state(generators, device=device)


def conversions(state: StateDict, *, reader: CheckpointReader) -> list[str]:
    """A line for each kind of tensor (weights, optimizer) that this run keeps in another type."""
    types = {
        (name.partition("/")[0], str(reader.entries[name].properties.dtype), str(tensor.dtype))
        for name, tensor in state.items()
        if name in reader.entries and tensor.is_floating_point()
    }
    return [
        f"{kind}: converted from {wrote} of the checkpoint to {keeps}".replace("torch.", "")
        for kind, wrote, keeps in sorted(types)
        if wrote != keeps
    ]
