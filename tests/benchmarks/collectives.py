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
from contextlib import closing
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks.peers.ratio import ratio_of
from tests.workers import Workers

TURNS = 301
ROUNDS = {8: 200, 2**16: 100, 2**20: 40, 2**24: 5}  # by size in bytes


def times_s() -> dict[int, tuple[list[float], list[float]]]:
    """By size: the seconds of one round of the bare loop, and of the task, turn by turn."""
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
        measured[size] = bare_s[1:], task_s[1:]  # without the first turn, which connects the ranks
    return measured


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, closing(Workers(Path(folder))) as workers:
        measured = workers.run(2, times_s)[0]
    for size, (bare_s, task_s) in measured.items():
        ratio = ratio_of(bare_s, task_s)
        print(
            f"{size} bytes: bare loop {median(bare_s) * 1e6:.1f} us, "
            f"task=collectives {ratio.median:.3f} of it ({ratio.low:.3f} to {ratio.high:.3f})"
        )


if __name__ == "__main__":
    main()
