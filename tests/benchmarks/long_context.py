"""Attention of a sequence over 2 devices against one device's attention of the same FLOPs, with 8,192 tokens
for each device: forward and backward, one process for each core.

python tests/benchmarks/long_context.py [dtype] [tokens of a device] [rounds] [ways]

Causal attention of 16,384 tokens over 2 devices takes each of them half of the products. One device's
attention over the same 16,384 tokens with half of the heads takes as many. Both ranks do both, in turns, so
what else the machine does slows both. Ratios are medians over all pairs, with their 95 % interval: of the
time by the clock, and of the processes' own time on a core, which a busy machine changes less.
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

DEGREE, HEADS, KV_HEADS, WIDTH = 2, 2, 2, 64
WAYS = ("ring", "gather", "all_to_all")


def pair_s(way: str, dtype_name: str, tokens: int, split_first: bool) -> tuple[list[float], list[float]]:
    """Seconds by the clock and on a core, split and alone; `way`: strategy.context_attention."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from hpc_parallel.models.attention import Attention, CausalAttention
    from hpc_parallel.strategies.context.split_sequence import split_attention

    dtype = getattr(torch, dtype_name)
    mesh = init_device_mesh("cpu", (DEGREE,), mesh_dim_names=("context",))

    def seconds(attention: Attention, share: int, length: int) -> list[float]:
        heads = (HEADS // share, KV_HEADS // share, KV_HEADS // share)
        taken = [torch.randn(1, count, length, WIDTH, dtype=dtype, requires_grad=True) for count in heads]
        dist.barrier()
        started = [time.perf_counter(), time.process_time()]
        attention(*taken).sum().backward()
        on_core_s = time.process_time() - started[1]
        dist.barrier()
        return [time.perf_counter() - started[0], on_core_s]

    cases = {
        "split": (split_attention(CausalAttention(), axis=mesh, kind=way), 1, tokens),
        "alone": (CausalAttention(), DEGREE, DEGREE * tokens),
    }
    for attention, share, _ in cases.values():  # connections and threads
        seconds(attention, share, 64)
    order = sorted(cases, reverse=split_first)
    taken_s = {name: seconds(*cases[name]) for name in order}
    return taken_s["split"], taken_s["alone"]


def main() -> None:
    given = [*sys.argv[1:], *("float32", "8192", "10", ",".join(WAYS))[len(sys.argv) - 1 :]]
    dtype, tokens, rounds, ways = given[0], int(given[1]), int(given[2]), given[3].split(",")
    pairs: dict[str, list[tuple[list[float], list[float]]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder, closing(Workers(Path(folder))) as workers:
        for turn in range(rounds):
            for way in ways:
                pairs[way].append(workers.run(DEGREE, pair_s, way, dtype, tokens, turn % 2 == 0)[0])
    for way, times in pairs.items():
        for index, kind in enumerate(("by the clock", "on a core")):
            split_s, alone_s = zip(*((split[index], alone[index]) for split, alone in times), strict=True)
            ratio = ratio_of(alone_s, split_s)
            print(
                f"{way:10} {kind:12} {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f}) "
                f"of {median(alone_s):.2f} s"
            )


if __name__ == "__main__":
    main()
