"""What keeping a run costs: saves, their rate against the disk's, their plans and checks, resuming, stopping.

    python tests/benchmarks/saving.py [loop|disk|replicas|memory|plans|resume|stop ...]

Ways take turns within one run, since a machine and a disk that others use change by the minute. Takes 4 GiB
of memory and 5 GiB of the temporary folder (TMPDIR).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.workers import Workers

if TYPE_CHECKING:
    from hpc_parallel.training.saver import Saver

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 5
STATE_BYTES = 3 * 4 * 100 * 10**6  # 100 M weights in float32, with AdamW's two moments
TENSORS = 300
GIB = 2**30
STEP_S = 0.05


def new_saver(folder: Path, *, size: int, asynchronous: bool) -> Saver:
    """One whose state is `size` bytes on the CPU."""
    import torch
    import torch.distributed as dist

    from hpc_parallel.config.schema import TrainingConfig
    from hpc_parallel.training.saver import Saver, SavingGroup

    state = {f"weights/{index}": torch.rand(size // TENSORS // 4) for index in range(TENSORS)}
    training = TrainingConfig(checkpoint_async=asynchronous, keep_last=1)
    device = torch.device("cpu")
    make = partial(dist.new_group, backend="gloo")
    saving = SavingGroup(make(), make, timeout_s=1800.0)
    return Saver(folder, state=lambda: state, about={}, training=training, device=device, saving=saving)


def loop_costs(folder: str) -> list[str]:
    """Extra seconds of a training loop for a save beside it, against one that it waits for.

    A step waits for another device, as where a GPU computes; or it computes on one of this machine's cores.
    """
    import torch

    torch.set_num_threads(1)
    matrix = torch.rand(256, 256)

    def compute(products: int) -> None:
        for _ in range(products):
            torch.mm(matrix, matrix)

    def loop_s(step: Callable[[], object], steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            step()
        return time.perf_counter() - began

    began = time.perf_counter()
    compute(200)
    products = round(200 * STEP_S / (time.perf_counter() - began))
    ways = {"elsewhere": lambda: time.sleep(STEP_S), "on one core": lambda: compute(products)}
    blocking = new_saver(Path(folder, "blocking"), size=STATE_BYTES, asynchronous=False)
    beside = new_saver(Path(folder, "beside"), size=STATE_BYTES, asynchronous=True)
    beside.save(1, blocking=True)  # takes the memory for the copy
    lines, number = [], 1
    for name, step in ways.items():
        costs = []
        for _ in range(ROUNDS):
            number += 1
            began = time.perf_counter()
            blocking.save(number, blocking=True)
            blocking_s = time.perf_counter() - began
            steps = round((1.5 * blocking_s + 2) / STEP_S)  # so many that the save ends beside them
            alone_s = loop_s(step, steps)
            began = time.perf_counter()
            beside.save(number)
            copy_s = time.perf_counter() - began
            loop_s(step, steps)
            beside.save(number, blocking=True)
            extra_s = time.perf_counter() - began - alone_s
            costs.append(extra_s / blocking_s)
            lines.append(
                f"  blocking {blocking_s:.2f} s; beside {steps} steps {extra_s:.2f} s more, "
                f"of it {copy_s:.2f} s to copy"
            )
        lines.append(
            f"1.2 GB saved beside steps {name}: {min(costs):.1%} of a blocking save "
            f"(best of {ROUNDS}, median {statistics.median(costs):.1%})"
        )
    beside.close()
    return lines


def disk_rates(folder: str) -> list[str]:
    """1 GiB until it is on the disk: a blocking save against dd, in turns.

    Each writes new files and removes its last ones, so that both need memory and blocks not used before.
    """
    blocking = new_saver(Path(folder, "disk"), size=GIB, asynchronous=False)
    ours_s, theirs_s = [], []
    for number in range(ROUNDS + 2):
        zeros = Path(folder, f"zeros-{number % 2}")
        began = time.perf_counter()
        subprocess.run(
            ["dd", "if=/dev/zero", f"of={zeros}", "bs=4M", "count=256", "conv=fsync"],
            check=True,
            stderr=subprocess.DEVNULL,
        )
        Path(folder, f"zeros-{(number + 1) % 2}").unlink(missing_ok=True)
        between = time.perf_counter()
        blocking.save(number + 1, blocking=True)
        if number > 1:  # the first take memory that the machine did not have
            theirs_s.append(between - began)
            ours_s.append(time.perf_counter() - between)
    pairs = ", ".join(f"{ours:.2f}/{dd:.2f}" for ours, dd in zip(ours_s, theirs_s, strict=True))
    rate = statistics.median(theirs_s) / statistics.median(ours_s)
    return [f"1 GiB to the disk, a save against dd conv=fsync: {rate:.0%} of its rate (medians; {pairs} s)"]


def checksum_shares(folder: str) -> list[str]:
    """Comparing replicas' weights, a third of the state, against a blocking save of all of it, in turns."""
    import torch

    from hpc_parallel.training.replicas import ReplicaCheck

    weights = {f"blocks.{index}.w": torch.rand(STATE_BYTES // TENSORS // 4) for index in range(TENSORS // 3)}
    replicas = ReplicaCheck(weights, tensor_rank=0, device=torch.device("cpu"))
    saver = new_saver(Path(folder, "replicas"), size=STATE_BYTES, asynchronous=False)
    shares, lines = [], []
    for number in range(ROUNDS):
        began = time.perf_counter()
        replicas.check(number)
        between = time.perf_counter()
        saver.save(number + 1, blocking=True)
        check_s, save_s = between - began, time.perf_counter() - between
        shares.append(check_s / save_s)
        lines.append(f"  {1e3 * check_s:.1f} ms of {save_s:.2f} s")
    median = f"{statistics.median(shares):.2%}"
    return [*lines, f"comparing 0.4 GB of weights: {median} of saving 1.2 GB (median of {ROUNDS})"]


def memory_costs(folder: str) -> list[str]:
    """How long a training waits for a copy of 0.3 GB to two memories: against the whole copy, and a memcpy.

    Two ranks, each on a host of its own, wait for the whole copy before they begin the next one.
    """
    import torch
    import torch.distributed as dist

    from hpc_parallel.training.memory_copies import MemoryCopies

    rank = dist.get_rank()
    path = Path(folder, f"n{rank}")
    path.mkdir()
    state = {f"weights/{index}": torch.rand(STATE_BYTES // 16 // TENSORS) for index in range(TENSORS)}
    plain = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    memory = MemoryCopies(
        path, host=f"n{rank}", every=1, layout=1, device=torch.device("cpu"), start="a",
        group=dist.new_group(backend="gloo"), state=lambda: state,
    )  # fmt: skip
    lines, shares, factors = [], [], []
    for step in range(1, ROUNDS + 3):
        dist.barrier()
        began = time.perf_counter()
        for name, tensor in state.items():
            plain[name].copy_(tensor)
        plain_s = time.perf_counter() - began
        dist.barrier()
        began = time.perf_counter()
        memory.keep(step)
        kept_s = time.perf_counter() - began
        memory._finish(lambda: None)
        whole_s = time.perf_counter() - began
        if step > 2:  # the first of each slot take their memory
            shares.append(kept_s / whole_s)
            factors.append(kept_s / plain_s)
            lines.append(f"  waits {kept_s:.3f} s of {whole_s:.3f} s; a memcpy {plain_s:.3f} s")
    memory.close()
    size = f"{sum(tensor.nbytes for tensor in state.values()) / 1e9:.2f} GB"
    share, factor = f"{statistics.median(shares):.0%}", f"{statistics.median(factors):.1f}"
    waits = f"the training waits for {share} of it, {factor} times a memcpy (medians of {ROUNDS})"
    return [*lines, f"{size} a rank to two memories: {waits}"]


def plan_costs() -> None:
    """Planning a save of 512 ranks that hold the same 1,000 tensors, anew and again; in one process."""
    import pickle

    import torch
    from torch.distributed.checkpoint import SavePlan

    from hpc_parallel.torch_internals import forget_plans, planner_with_memory

    with torch.device("meta"):
        state = {f"weights/{index}": torch.empty(4096, 1024) for index in range(1000)}
    for name in ("anew", "again"):
        planner = planner_with_memory("benchmark")
        planner.set_up_planner(state, is_coordinator=True)
        local: SavePlan = planner.create_local_plan()
        began = time.perf_counter()
        to_all, _ = planner.create_global_plan([local] * 512)
        made_s = time.perf_counter() - began
        planner.finish_plan(to_all[0])
        sent = 512 * len(pickle.dumps(local)) + sum(len(pickle.dumps(plan)) for plan in to_all)
        print(f"a plan for 512 ranks, {name}: {made_s:.2f} s on rank 0, {sent / 1e6:.1f} MB sent", flush=True)
    forget_plans("benchmark")


def resume(folder: Path) -> None:
    """The tiny job, from the command to its next step's line, against what Python imports on the way."""
    command = [sys.executable, "-m", "hpc_parallel", "run"]
    words = ["launcher=local", "launcher.snapshot=false", "device=cpu", "strategy=single",
             "training.log_every=1", "training.validate_every=null", "training.measure_steps=0"]  # fmt: skip
    run = folder / "run"
    subprocess.run([*command, *words, f"run_dir={run}", "training.steps=2"], check=True, **QUIET)
    lines = run / "metrics.jsonl"
    imports_s, rest_s = [], []
    for round_ in range(ROUNDS):
        began = time.perf_counter()
        for module in ("hpc_parallel.run", "hpc_parallel.job", "hpc_parallel.worker.train"):
            subprocess.run([sys.executable, "-c", f"import {module}"], check=True, **QUIET)
        imports_s.append(time.perf_counter() - began)
        done = 2 + round_
        began = time.perf_counter()
        resumed = subprocess.Popen([*command, f"resume={run}", f"training.steps={done + 1}"], **QUIET)
        while f'"step": {done + 1},' not in lines.read_text():
            time.sleep(0.01)
        rest_s.append(time.perf_counter() - began - imports_s[-1])
        resumed.wait()
    pairs = ", ".join(f"{a:.2f} + {b:.2f}" for a, b in zip(imports_s, rest_s, strict=True))
    print(
        f"resume to the next step: imports + {statistics.median(rest_s):.2f} s (median of {pairs})",
        flush=True,
    )


def agreement_shares() -> list[float]:
    """Of steps of 50 ms that end together, as those of training do, the share spent on whether to stop.

    By round: where ranks are more than cores, a look also waits for whoever else computes.
    """
    import torch.distributed as dist

    from hpc_parallel.worker.stop import StopFlag

    shares = []
    for _ in range(ROUNDS):
        stop = StopFlag(step=0)
        asked_s = 0.0
        for step in range(1, 101):
            time.sleep(STEP_S)
            dist.barrier()
            before = time.perf_counter()
            stop.after(step)
            asked_s += time.perf_counter() - before
        shares.append(asked_s / (100 * STEP_S))
    return shares


QUIET = {"stdout": subprocess.DEVNULL, "cwd": ROOT, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}


def main() -> None:
    chosen = sys.argv[1:] or ["loop", "disk", "replicas", "memory", "plans", "resume", "stop"]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        workers = Workers(folder / "workers")
        for name, job in {"loop": loop_costs, "disk": disk_rates, "replicas": checksum_shares}.items():
            if name in chosen:
                print(*workers.run(1, job, made)[0], sep="\n", flush=True)
                workers.close()  # and its memory
        if "memory" in chosen:
            with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
                print(*workers.run(2, memory_costs, shared)[0], sep="\n", flush=True)
            workers.close()
        if "plans" in chosen:
            plan_costs()
        if "stop" in chosen:
            shares = [max(ranks) for ranks in zip(*workers.run(4, agreement_shares), strict=True)]
            rounds = ", ".join(f"{share:.3%}" for share in shares)
            print(
                f"agreeing to stop, 4 ranks: {min(shares):.3%} of a step of 50 ms (best of {rounds})",
                flush=True,
            )
            workers.close()
        if "resume" in chosen:
            resume(folder)


if __name__ == "__main__":
    main()
