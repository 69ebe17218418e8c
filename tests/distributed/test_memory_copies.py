"""Restarts from the memory of hosts: the state is the one that was copied, whatever a copy went through."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpc_parallel.failure.local_agent import rank_environments
from hpc_parallel.record import attempts, host_memory
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.strategies.assemble import Assembled
from hpc_parallel.training.memory_copies import MemoryCopies
from tests.marks import in_full
from tests.parity import COMMON, largest_difference, weight_difference
from tests.workers import Train, Trained, Workers, agreed

CPU = torch.device("cpu")


def restored(folder: str, harm: str) -> tuple[int, list[float], bool] | None:
    """This rank's state from memory, and whether its generator goes on as after that step.

    After copies of steps 2, 4 and 6 on two hosts, and a harm of step 6.
    """
    rank, weight = dist.get_rank(), torch.zeros(3)
    host = f"n{rank}"
    path = Path(folder, host)
    path.mkdir(parents=True)

    def copies(start: str) -> MemoryCopies:
        return MemoryCopies(
            path, host=host, every=2, layout=1 + (start == "other layout" and rank == 1), device=CPU,
            group=dist.new_group(backend="gloo"), start=start, state=lambda: {"weights/a": weight},
        )  # fmt: skip

    memory = copies("first")
    drawn = {}
    for step in (2, 4, 6):
        weight.fill_(10 * step + rank)
        memory.keep(step)
        drawn[step] = torch.rand(1)
        weight.fill_(-1)  # the copy was taken
    memory.close()
    newest = {kind: path / f"{kind}-1-1" for kind in ("own", "copy")}  # rank 1's part of step 6
    for kind, file in newest.items():
        if file.exists() and kind in harm:
            if "torn" in harm:
                with file.open("r+b") as pages:
                    pages.truncate(100)
            elif "flipped" in harm:
                file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
            else:
                Path(f"{file}.json").unlink()
    if harm == "lost host" and rank == 1:
        shutil.rmtree(path)
        path.mkdir()
    dist.barrier()
    part = copies(harm).newest()
    if part is None:
        return None
    part.fill({"weights/a": weight}, device=CPU)
    return part.record.step, weight.tolist(), torch.equal(torch.rand(1), drawn[part.record.step])


@pytest.mark.parametrize(
    ("harm", "step"),
    [
        ("none", 6),
        ("lost host", 6),
        ("own unfinished", 6),
        ("own torn", 6),
        ("own flipped", 6),
        ("own and copy flipped", 4),
        ("own and copy torn", 4),
        ("own and copy unfinished", 4),
        ("other layout", None),
    ],
)
def test_the_newest_step_that_is_whole_is_restored(
    workers: Workers, tmp_path: Path, harm: str, step: int | None
) -> None:
    expected = [None if step is None else (step, [10.0 * step + rank] * 3, True) for rank in range(2)]
    assert workers.run(2, restored, str(tmp_path / "memory"), harm) == expected


def no_room(folder: str) -> tuple[bool, list[str]]:
    """Whether copies go on after a rank's memory was full, and the records that are left there."""
    rank = dist.get_rank()
    path = Path(folder, f"n{rank}")
    path.mkdir(parents=True)
    state = {"weights/a": torch.zeros(3)}
    memory = MemoryCopies(
        path, host=f"n{rank}", every=1, layout=1, device=CPU, group=dist.new_group(backend="gloo"), start="a",
        state=lambda: state,
    )  # fmt: skip
    memory.keep(1)
    memory.keep(2)
    if rank == 1:
        state["weights/b"] = torch.empty(2**50, dtype=torch.uint8, device="meta")
    memory.keep(3)
    left = [name for name in sorted(os.listdir(path)) if name.endswith(".json")]
    memory.close()
    return memory.due(4), left


def test_a_full_memory_ends_the_copies_and_not_the_training(workers: Workers, tmp_path: Path) -> None:
    first, second = workers.run(2, no_room, str(tmp_path / "memory"))
    assert first == (False, ["copy-1-0.json", "own-0-0.json"])
    assert second == (False, ["copy-0-0.json", "own-1-0.json"])


class DiedError(RuntimeError):
    pass


def train_until(run_folder: str, nodes: int, dies_at: int | None, lost: str | None) -> dict[str, Tensor]:
    """This rank's weights after the training; or it dies in a step, with the memory of a node."""
    from hpc_parallel.worker.session import TaskContext, read_config
    from hpc_parallel.worker.train import train

    folder = RunFolder(Path(run_folder))
    config, values = read_config(folder.config)
    rank, per_node = dist.get_rank(), dist.get_world_size() // nodes
    environment = rank_environments(nodes=nodes, per_node=per_node)[rank]
    memory, passed = host_memory.ROOT / host_memory.name_of(folder, environment), [0]
    last_save = config.training.checkpoint_every or 0

    def die(assembled: Assembled) -> None:
        passed[0] += 1
        if passed[0] != dies_at:
            return
        while len(list(memory.glob("*/*.json"))) != len(list(memory.glob("*/*-[01]"))):
            time.sleep(0.01)
        while not (folder.checkpoints / f"step-{last_save}" / "complete").exists():
            time.sleep(0.01)
        dist.barrier()
        if lost is not None and rank == 0:
            shutil.rmtree(memory / lost)
        raise DiedError

    context = TaskContext(config, values, folder, CPU, environment)
    with contextlib.suppress(DiedError):
        weights = train(context, on_gradients=die).named_parameters()
        return {
            name: (w.full_tensor() if isinstance(w, DTensor) else w).detach().clone()
            for name, w in weights.items()
        }
    return {}


DATA = ("strategy=data", "nodes=2")
LAYOUTS = {
    "data": DATA,
    "pipeline": ("strategy=pipeline", "nodes=2"),
    "hybrid": ("strategy=hybrid", "nodes=2", "gpus_per_node=2"),
    "fsdp": ("strategy=fsdp", "nodes=2"),
}


@pytest.mark.parametrize(
    ("layout", "every", "dies_at", "lost", "after"),
    [
        ("fsdp", 3, 8, "node-0", 6),
        *in_full([
            ("hybrid", 3, 8, "node-1", 6),
            ("data", 3, 8, None, 6),
            ("pipeline", 3, 8, "node-1", 6),
            ("data", 2, 6, None, 5),  # newer than the copy of step 4
        ]),
    ],
)  # fmt: skip
def test_a_restart_from_memory_follows_one_device(
    workers: Workers, trained: Train, layout: str, every: int, dies_at: int, lost: str | None, after: int,
) -> None:  # fmt: skip
    """The disk has step 5. `dies_at`: before its update."""
    words = (f"training.memory_checkpoint_every={every}", "training.checkpoint_every=5", *LAYOUTS[layout])
    steps = ("training.steps=10", "training.validate_every=null", "training.precision=float64")
    run = workers.prepare(*COMMON, *steps, *words)
    path = str(run.folder.path)
    workers.run(run.processes, train_until, path, 2, dies_at, lost)
    parts = workers.run(run.processes, train_until, path, 2, None, None)
    assert [start.after_step for start in attempts.starts(run.folder)] == [0, after]
    split = Trained(workers.lines(run), {}, agreed(parts), Counter(), run.folder.path)
    reference = trained(*COMMON, *steps, "strategy=single")
    assert largest_difference(split.losses, reference.losses) < 1e-10
    assert weight_difference(split, reference) < 1e-10
    assert not list(host_memory.ROOT.glob(f"{host_memory.name_of(run.folder, {})}*"))
