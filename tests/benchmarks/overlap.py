"""What overlapping gradients with the backward pass is worth: DistributedDataParallel over 2 ranks with small
and large buckets, against summing all gradients after the backward pass, and against not summing them.

python tests/benchmarks/overlap.py

On two cores there is little to gain: gloo sums on the same cores that compute. The figures are ratios of one
run, the ways taking turns, the fastest of 20.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.workers import Workers

ROUNDS = 20
BUCKETS_MB = {"buckets of 1 MB": 1.0, "buckets of 25 MB": 25.0, "one bucket": 1000.0}
AFTER, NEVER = "summed after the backward pass", "not summed"


def step_times_s() -> dict[str, list[float]]:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from hpc_parallel.config.schema import StrategyConfig
    from hpc_parallel.models.layered import materialise
    from hpc_parallel.models.transformer import Transformer
    from hpc_parallel.strategies import replicate

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("replicate",))
    tokens = torch.arange(2 * 128).reshape(2, 128) % 256  # [batch, seq]
    ways = {}
    for name, bucket_mb in (*BUCKETS_MB.items(), (AFTER, 1000.0), (NEVER, 1000.0)):
        model = Transformer(layers=8, dim=384, heads=6, kv_heads=6, ffn_dim=1024, vocab_size=256)
        materialise(model, seed=0, device="cpu", dtype=torch.float32)
        options = StrategyConfig(name="data", bucket_mb=bucket_mb)
        ways[name] = model, replicate.apply(model, axis=mesh, options=options)

    def step_s(name: str, *, first: bool) -> float:
        model, runner = ways[name]
        dist.barrier()
        started = time.perf_counter()
        # In the first step DistributedDataParallel makes gradients views of its buckets.
        with nullcontext() if name in BUCKETS_MB or first else runner.no_sync():
            model.loss(runner(tokens), tokens).backward()
        if name == AFTER and not first:
            memory = [weight.grad.untyped_storage() for weight in model.parameters()]
            for bucket in {storage.data_ptr(): storage for storage in memory}.values():
                dist.all_reduce(torch.empty(0).set_(bucket))
        taken_s = time.perf_counter() - started
        runner.zero_grad(set_to_none=False)
        return taken_s

    times_s: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(ROUNDS + 2):
        for name in ways:
            taken_s = step_s(name, first=round_ == 0)
            if round_ >= 2:  # after its first step torch orders the buckets anew
                times_s[name].append(taken_s)
    return times_s


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        workers = Workers(Path(folder))
        times_s = workers.run(2, step_times_s)[0]
        workers.close()
    fastest_s = {name: min(taken_s) for name, taken_s in times_s.items()}
    for name, best_s in fastest_s.items():
        print(f"{name}: {best_s / fastest_s[AFTER]:.2f} of {fastest_s[AFTER] * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
