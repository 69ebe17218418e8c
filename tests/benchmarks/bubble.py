"""A pipeline's measured bubble beside its theory, on stages of equal weight.

    python tests/benchmarks/bubble.py

Two ranks of one thread, so it needs two idle cores: what else runs on them makes a rank late, and the other
one wait. That can only add to the bubble, so the least of the runs is compared, as timeit does; all are
printed. Each run is the whole command, and its figure the median of its timed steps.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

RANKS, RUNS, TIMED_STEPS, CLOSE = 2, 5, 2, 0.03
# Blocks that outweigh the embedding and the head by far: the stages are equal to 1 %.
MODEL = (
    "model.layers=4", "model.dim=512", "model.heads=4", "model.kv_heads=4", "model.ffn_dim=2048",
    "model.vocab_size=256", "data.sequence_length=128", "data.max_bytes=400000",
    "training.global_batch_size=16", "optimizer.warmup_steps=0", "training.validate_every=null",
)  # fmt: skip
SCHEDULES = [("gpipe", 8), ("1f1b", 8), ("gpipe", 4), ("naive", 4)]


def theory(schedule: str, microbatches: int) -> float:
    """(P-1) / (M+P-1), of GPipe and 1F1B alike (Huang et al. 2019; Narayanan et al. 2019); in turn M is 1."""
    together = 1 if schedule == "naive" else microbatches
    return (RANKS - 1) / (together + RANKS - 1)


def measured(folder: Path, *, schedule: str, microbatches: int) -> float:
    steps = f"training.steps={TIMED_STEPS + 3}", f"training.measure_steps={TIMED_STEPS}"
    cut = f"strategy.schedule={schedule}", f"strategy.microbatches={microbatches}"
    command = [sys.executable, "-m", "hpc_parallel.run", "strategy=pipeline", f"nodes={RANKS}", "device=cpu"]
    where = "launcher=local", "launcher.snapshot=false", f"run_dir={folder}"
    subprocess.run(
        [*command, *where, *cut, *steps, *MODEL],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    share: float = json.loads((folder / "summary.json").read_text())["bubble_share"]
    return share


def main() -> int:
    missed = 0
    with tempfile.TemporaryDirectory() as temporary:
        for schedule, microbatches in SCHEDULES:
            wanted = theory(schedule, microbatches)
            runs = [
                measured(
                    Path(temporary) / f"{schedule}-{microbatches}-{run}",
                    schedule=schedule,
                    microbatches=microbatches,
                )
                for run in range(RUNS)
            ]
            found = min(runs)
            missed += abs(found - wanted) > CLOSE
            name = f"{schedule}, {RANKS} stages, {microbatches} microbatches"
            every = ", ".join(f"{share:.1%}" for share in sorted(runs))
            print(f"{name}: bubble {found:.1%} (runs: {every}), theory {wanted:.1%}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
