"""What the size of the world adds to our own code: rank 0 of 8, 512 and 16,384 ranks that are not there.

    python -m tests.benchmarks.peers.world_size RANKS

torch's fake process group answers for the others at once, so what grows with the world is work of this
process: building the mesh, setting up, the line of metrics, the agreement about a stop, the indices of a
batch, and each step of the trainer. The store of a start is a real one, in which all ranks have announced
themselves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

WORLDS = (8, 512, 16384)
STEPS, REPEATS = 40, 200
PER_STEP = ("step", "agreement to stop", "indices of a batch")
MOST_GROWTH = 1.5  # of a cost per step from the smallest world to the largest: timing noise
WORDS = (
    "strategy=hsdp", "gpus_per_node=8", "model.layers=2", "model.dim=32", "model.ffn_dim=64",
    "data.sequence_length=16", "data.max_bytes=1000000", f"training.steps={STEPS}", "training.log_every=10",
    "training.validate_every=null", "training.checkpoint_every=null", "training.measure_steps=0",
    "launcher=local", "launcher.snapshot=false", "device=cpu",
)  # fmt: skip


def measure(peers: str, *, worlds: tuple[int, ...] = WORLDS) -> dict[str, Any]:
    """One row: the seconds of each cost by world. Met if none of `PER_STEP` grows."""
    by_world = {}
    for ranks in worlds:
        command = [sys.executable, "-m", "tests.benchmarks.peers.world_size", str(ranks)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{ranks} ranks: {done.stderr.strip().splitlines()[-1]}")
        by_world[ranks] = json.loads(done.stdout.splitlines()[-1])
    first, last = by_world[worlds[0]], by_world[worlds[-1]]
    growth = {name: last[name] / first[name] for name in first}
    names = "; ".join(
        f"{name} {', '.join(shown(by_world[ranks][name]) for ranks in worlds)}" for name in first
    )
    return {
        "worlds": list(worlds),
        "seconds": by_world,
        "growth": growth,
        "met": all(growth[name] <= MOST_GROWTH for name in PER_STEP),
        "text": f"on {', '.join(map(str, worlds))} ranks: {names}",
    }


def shown(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def costs_s(ranks: int, folder: Path) -> dict[str, float]:
    """The seconds of each cost for rank 0 of `ranks`."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    class LoneStore(FakeStore):
        def add(self, key: str, amount: int) -> int:
            return amount

    torch.set_num_threads(1)
    store = LoneStore()  # held here: torch's C++ code alone does not keep it
    dist.init_process_group("fake", store=store, rank=0, world_size=ranks)
    dist.new_group = partial(new_fake_group, dist.new_group)
    return {
        **trainer_s(ranks, folder),
        "agreement to stop": stop_s(),
        "line of metrics": line_s(ranks),
        "indices of a batch": indices_s(ranks),
        "mesh of 3 axes": mesh_s(ranks),
        "start, all announced": start_s(ranks, folder),
    }


def new_fake_group(new_group: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """A group of ranks that are not there, whatever backend was asked for."""
    return new_group(*arguments, **{**options, "backend": "fake"})


def trainer_s(ranks: int, folder: Path) -> dict[str, float]:
    """The set-up of a training until its first step, and the median of its steps."""
    import torch

    from hpc_parallel.launch.run_files import write
    from hpc_parallel.record.run_folder import RunFolder
    from hpc_parallel.training.observers import Progress
    from hpc_parallel.worker.session import TaskContext, read_config
    from hpc_parallel.worker.train import train
    from tests.composed import prepared

    @dataclass
    class Marks(Progress):
        times: list[float] = field(default_factory=list)

        def mark(self, phase: str, step: int) -> None:
            super().mark(phase, step)
            if phase == "data":
                self.times.append(time.perf_counter())

    nodes = f"nodes={ranks // 8}"
    run = prepared(f"run_dir={folder / 'run'}", nodes, f"training.global_batch_size={ranks}", *WORDS)
    write(run)
    config, values = read_config(RunFolder(run.folder.path).config)
    marks = Marks()
    began = time.perf_counter()
    train(TaskContext(config, values, run.folder, torch.device("cpu"), environment={}, progress=marks))
    steps_s = [after - before for before, after in zip(marks.times, marks.times[1:], strict=False)]
    return {"set-up": marks.times[0] - began, "step": median(steps_s[5:])}


def repeated_s(work: Callable[[], object], *, repeats: int = REPEATS) -> float:
    """The median seconds of `work`."""
    work()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return median(times)


def stop_s() -> float:
    """An exchange of the flags, which happens about every two seconds only."""
    from hpc_parallel.worker.stop import StopFlag

    return repeated_s(lambda: StopFlag(step=0).after(1))


def line_s(ranks: int) -> float:
    import torch

    from hpc_parallel.training.metrics import Metrics, Scale, StepResult

    scale = Scale(
        global_batch_size=ranks, tokens_per_sample=16, flops_per_sample=1e9, devices=ranks, replicas=ranks,
        peak_flops=None,
    )  # fmt: skip
    metrics = Metrics(scale, device=torch.device("cpu"))

    def line() -> None:
        metrics.note(StepResult(loss=torch.ones(()), gradient_norm=torch.ones(())))
        metrics.line(step=1, learning_rate=0.1)

    return repeated_s(line, repeats=10)


def indices_s(ranks: int) -> float:
    import numpy as np

    from hpc_parallel.data.sampler import Batches

    class Population:
        def __len__(self) -> int:
            return 10**9

        def batch(self, positions: Any) -> Any:
            raise NotImplementedError

    batches = Batches(
        samples=Population(), global_batch_size=8 * ranks, seed=0, replica=ranks // 2, replicas=ranks
    )
    steps = iter(np.arange(10 * REPEATS).tolist())
    return repeated_s(lambda: batches.positions(next(steps)))


def mesh_s(ranks: int) -> float:
    from hpc_parallel.layout.layout import Layout
    from hpc_parallel.strategies.mesh import build_mesh

    layout = Layout(pipeline=2, replicate=ranks // 8, tensor=4)
    began = time.perf_counter()
    build_mesh(layout, device_type="cpu")
    return time.perf_counter() - began


def start_s(ranks: int, folder: Path) -> float:
    """Rank 0 from opening the store to its verdict, when all ranks have announced themselves."""
    from hpc_parallel.config.site_schema import ClusterConfig
    from hpc_parallel.machine.world import World
    from hpc_parallel.record.run_folder import RunFolder
    from hpc_parallel.start import rendezvous

    environment = {
        "RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "bench",
        "TORCHELASTIC_RESTART_COUNT": "0", "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip
    world = World.discover(environment)
    start = rendezvous._Start(
        RunFolder(folder / "start"), world=world, cluster=ClusterConfig(name="bench"), device="cpu"
    )
    start.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    store = start._open()
    store.multi_set(start.arrivals, [json.dumps(start.announcement)] * ranks)
    began = time.perf_counter()
    start._await_all(store)
    return time.perf_counter() - began


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(costs_s(int(sys.argv[1]), Path(folder))), flush=True)
        os._exit(0)  # the fake group has nothing to take down


if __name__ == "__main__":
    main()
