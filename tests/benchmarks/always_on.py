"""What timing the ranks now and then adds to a training: steps with and without it, in alternating blocks.

python tests/benchmarks/always_on.py

Two ranks average the gradients of a small transformer. Blocks of 50 steps take turns. The figures are the
ratio of their total times, and how much longer the timed steps take than the median step of the other blocks,
as a share of all steps. Other work on the machine blurs the first.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.workers import Workers

BLOCKS, STEPS = 16, 50


def block_times_s() -> tuple[list[float], list[float], list[int], list[float]]:
    """The seconds of each block with and without timed steps, the timed steps, and their seconds."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from hpc_parallel.models.layered import materialise
    from hpc_parallel.models.transformer import Transformer
    from hpc_parallel.profiling.measurement import timed_step
    from hpc_parallel.profiling.rank_times import RankTimes
    from hpc_parallel.profiling.slow_ranks import Accusations

    device = torch.device("cpu")
    model = Transformer(layers=4, dim=128, heads=4, kv_heads=4, ffn_dim=320, vocab_size=256)
    materialise(model, seed=0, device="cpu", dtype=torch.float32)
    runner = DistributedDataParallel(model)
    tokens = torch.arange(2 * 128).reshape(2, 128) % 256  # [batch, seq]

    def step() -> None:
        model.loss(runner(tokens), tokens).backward()
        runner.zero_grad(set_to_none=False)

    def measured_s() -> float:  # as training.measure_steps does before
        started = time.perf_counter()
        with timed_step(device, into=[]):
            step()
        return time.perf_counter() - started

    expected_s = [measured_s() for _ in range(2)][-1]
    records: list[dict[str, object]] = []
    timed_s: list[float] = []
    times = RankTimes(
        on=True, host="host", role=0, device=device, profiled=[], expected_s=lambda: expected_s,
        leave_out=timed_s.append, device_state=dict, accusations=Accusations([], steps_done=0),
        write=records.append,
    )  # fmt: skip
    on_s, off_s = [], []
    for block in range(BLOCKS):
        dist.barrier()
        started = time.perf_counter()
        for index in range(STEPS):
            number = block * STEPS + index + 1
            with times.loading(number):
                pass
            with times.watch(number):
                step()
        dist.barrier()
        on_s.append(time.perf_counter() - started)
        started = time.perf_counter()
        for _ in range(STEPS):
            step()
        dist.barrier()
        off_s.append(time.perf_counter() - started)
    samples = records[-1]["samples"] if records else []
    return on_s, off_s, [sample["step"] for sample in samples], timed_s  # type: ignore[attr-defined]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, closing(Workers(Path(folder))) as workers:
        on_s, off_s, timed, timed_s = workers.run(2, block_times_s)[0]
    step_s = median(off_s) / STEPS
    print(f"{BLOCKS * STEPS} steps of {step_s * 1e3:.1f} ms, timed: {timed}")
    extra_s = sum(took_s - step_s for took_s in timed_s)
    share = extra_s / (BLOCKS * STEPS * step_s)
    print(f"timed steps take {extra_s * 1e3:.0f} ms longer, {share:.2%} of all steps")
    print(f"with timed steps {sum(on_s) / sum(off_s):.4f} of the time without")
    print(f"single blocks: {sorted(round(on / off, 4) for on, off in zip(on_s, off_s, strict=True))}")


if __name__ == "__main__":
    main()
