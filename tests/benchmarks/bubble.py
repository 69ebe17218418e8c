"""A pipeline's measured bubble beside its theory, on stages of equal weight.

    python tests/benchmarks/bubble.py

Two ranks of one thread, so it needs two idle cores: what else runs on them makes a rank late, and the other
one wait. Each run is the whole command, and its figure the median of its timed steps.

Theory speaks of chunks that all take the same time and messages that take none. A virtual machine's cores
don't give that: the same product of matrices varies by 10 % from one to the next, and a chunk loses 2 ms.
So long blocks that compute for a set time by the clock (`timed_blocks.py`) are held against theory, in every
run; transformer blocks stand beside them, unjudged.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

RANKS, RUNS, TIMED_STEPS, CLOSE = 2, 3, 2, 0.03
TIMED = "model=timed", "data.sequence_length=32", "strategy.balance=parameters"
# Blocks that outweigh the embedding and the head by far: the stages are equal to 1 %.
TRANSFORMER = (
    "model.layers=4", "model.dim=512", "model.heads=4", "model.kv_heads=4", "model.ffn_dim=2048",
    "model.vocab_size=256", "data.sequence_length=128",
)  # fmt: skip
RUN = (
    "data.max_bytes=400000", "training.global_batch_size=16", "optimizer.warmup_steps=0",
    "training.validate_every=null", "launcher=local", "launcher.snapshot=false", "device=cpu",
)  # fmt: skip
SCHEDULES = [("gpipe", 8), ("1f1b", 8), ("gpipe", 4), ("naive", 4)]


def theory(schedule: str, microbatches: int) -> float:
    """(P-1) / (M+P-1), of GPipe and 1F1B alike (Huang et al. 2019; Narayanan et al. 2019); in turn M is 1."""
    together = 1 if schedule == "naive" else microbatches
    return (RANKS - 1) / (together + RANKS - 1)


def measured(folder: Path, *, model: tuple[str, ...], schedule: str, microbatches: int) -> float:
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "timed.yaml").write_text(
        "_target_: timed_blocks.TimedModel\ndepth: 4\nseconds: 0.08\n", encoding="utf-8"
    )
    steps = f"training.steps={TIMED_STEPS + 3}", f"training.measure_steps={TIMED_STEPS}"
    cut = f"strategy.schedule={schedule}", f"strategy.microbatches={microbatches}"
    command = [sys.executable, "-m", "hpc_parallel.run", "--config-dir", str(folder)]
    where = "strategy=pipeline", f"nodes={RANKS}", f"run_dir={folder / 'run'}"
    subprocess.run(
        [*command, *where, *cut, *steps, *model, *RUN],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    share: float = json.loads((folder / "run" / "summary.json").read_text())["bubble_share"]
    return share


def main() -> int:
    missed = 0
    for schedule, microbatches in SCHEDULES:
        wanted = theory(schedule, microbatches)
        print(f"{schedule}, {RANKS} stages, {microbatches} microbatches: theory {wanted:.1%}", flush=True)
        for name, model in {"set time": TIMED, "transformer": TRANSFORMER}.items():
            runs = []
            for _ in range(RUNS):
                with tempfile.TemporaryDirectory() as folder:
                    runs.append(
                        measured(Path(folder), model=model, schedule=schedule, microbatches=microbatches)
                    )
            print(f"  blocks of {name}: {', '.join(f'{share:.1%}' for share in sorted(runs))}", flush=True)
            missed += model is TIMED and any(abs(share - wanted) > CLOSE for share in runs)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
