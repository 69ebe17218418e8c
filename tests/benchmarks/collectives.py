"""What `task=collectives` says of an all-reduce, against a bare loop of torch in the same process group.

python tests/benchmarks/collectives.py

The two take turns with equally many rounds. A figure is the ratio of their fastest turns: 1.02 means that the
task shows a time that is 2 % above that of the bare loop.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.workers import Workers

TURNS = 101
ROUNDS = {8: 200, 2**16: 100, 2**20: 40, 2**24: 5}  # by size in bytes


def ratios() -> dict[int, tuple[float, float]]:
    """By size: the bare loop's time of one round in seconds, and the task's time divided by it."""
    import torch
    import torch.distributed as dist

    from hpc_parallel.profiling.collectives import OPERATIONS, Patterns, group_of
    from hpc_parallel.worker.collectives import Bench

    world = dist.group.WORLD
    assert world is not None
    bench = Bench(device=torch.device("cpu"), seconds=1.0)
    found = {}
    for size, rounds in ROUNDS.items():
        members = group_of(world)
        patterns = Patterns(members, dtype=torch.float32, device=torch.device("cpu"))
        case = OPERATIONS["all_reduce"].prepare(members, patterns, size // 4)
        array = torch.ones(size // 4)
        bare_s, task_s = [], []
        for turn in range(TURNS):
            array.fill_(1.0)  # before its sums become infinite
            dist.barrier()
            started = time.perf_counter()
            for _ in range(rounds):
                dist.all_reduce(array)
            bare_s.append((time.perf_counter() - started) / rounds)
            taken_s = bench.elapsed_s(case.run, rounds=rounds) / rounds
            if turn:  # the first connects the ranks
                task_s.append(taken_s)
        found[size] = (min(bare_s[1:]), min(task_s) / min(bare_s[1:]))
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        workers = Workers(Path(folder))
        measured = workers.run(2, ratios)[0]
        workers.close()
    for size, (bare_s, ratio) in measured.items():
        print(f"{size} bytes: bare loop {bare_s * 1e6:.1f} us, task=collectives {ratio:.3f} of it")


if __name__ == "__main__":
    main()
