"""What `task=collectives` says of an all-reduce, against a bare loop of torch in the same process group.

python tests/benchmarks/collectives.py

The two take turns with equally many rounds, and the slowest rank counts. A figure is the median ratio of
neighbouring turns, with its 95 % interval: 1.02 means that the task shows a time that is 2 % above that of
the bare loop.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.workers import Workers

TURNS = 301
ROUNDS = {8: 200, 2**16: 100, 2**20: 40, 2**24: 5}  # by size in bytes


def ratios() -> dict[int, tuple[float, list[float]]]:
    """By size: the bare loop's time of one round in seconds, and the task's divided by it, turn by turn."""
    import torch
    import torch.distributed as dist

    from hpc_parallel.measure.collective_cases import OPERATIONS, Patterns, group_of
    from hpc_parallel.measure.collectives import Bench

    world = dist.group.WORLD
    assert world is not None
    bench = Bench(device=torch.device("cpu"), seconds=1.0)
    measured = {}
    for size, rounds in ROUNDS.items():
        members = group_of(world)
        patterns = Patterns(members, dtype=torch.float32, device=torch.device("cpu"))
        case = OPERATIONS["all_reduce"].prepare(members, patterns, size // 4)
        array = torch.ones(size // 4)
        bare_s, task_s = [], []
        for _ in range(TURNS + 1):
            array.fill_(1.0)  # before its sums become infinite
            dist.barrier()
            started = time.perf_counter()
            for _ in range(rounds):
                dist.all_reduce(array)
            slowest = torch.tensor(time.perf_counter() - started)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            bare_s.append(slowest.item() / rounds)
            task_s.append(bench.elapsed_s(case.run, rounds=rounds) / rounds)
        ratio = [task / bare for task, bare in zip(task_s[1:], bare_s[1:], strict=True)]
        measured[size] = (median(bare_s), ratio)  # without the first turn, which connects the ranks
    return measured


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        workers = Workers(Path(folder))
        measured = workers.run(2, ratios)[0]
        workers.close()
    for size, (bare_s, by_turn) in measured.items():
        low, high = interval(by_turn)
        print(
            f"{size} bytes: bare loop {bare_s * 1e6:.1f} us, "
            f"task=collectives {median(by_turn):.3f} of it ({low:.3f} to {high:.3f})"
        )


def interval(values: list[float]) -> tuple[float, float]:
    """The 95 % interval of the median, by ranks (binomial)."""
    ordered, half = sorted(values), 0.98 * len(values) ** 0.5
    return ordered[int(len(values) / 2 - half)], ordered[int(len(values) / 2 + half)]


if __name__ == "__main__":
    main()
