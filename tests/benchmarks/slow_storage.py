"""What a dataset costs that takes 20 ms for each batch, beside steps that take longer and steps that don't.

python tests/benchmarks/slow_storage.py [ROUNDS]

One process. Runs with and without the 20 ms take turns; each figure is the median over the lines of all
rounds, without the first line. All runs of one model must end with the same loss.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import closing
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.workers import Workers  # noqa: E402

BATCH, BATCH_S = 4, 0.020
COMMON = (
    "strategy=single", "data=dataset", "data.dataset._target_=tests.datasets.SlowStorage",
    "+data.dataset.count=400", "data.vocab_size=256", "data.sequence_length=64", "training.steps=60",
    "training.log_every=5", f"training.global_batch_size={BATCH}", "training.validate_every=null",
    "training.checkpoint_every=null", "training.measure_steps=0",
)  # fmt: skip
TIMED = "+model={{_target_: tests.benchmarks.timed_blocks.TimedModel, depth: 1, seconds: {}}}"
MODELS = {  # a forward pass of this time by the clock, and a backward pass of twice that
    "steps of 60 ms": ("~model", TIMED.format(0.02)),
    "steps of 6 ms": ("~model", TIMED.format(0.002)),
}


def main(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder, closing(Workers(Path(folder))) as workers:
        for name, model in MODELS.items():
            compare(workers, name, model, rounds=rounds)


def compare(workers: Workers, name: str, model: tuple[str, ...], *, rounds: int) -> None:
    lines: dict[float, list[dict[str, float]]] = {0.0: [], BATCH_S: []}
    losses = set()
    for _ in range(rounds):
        for batch_s, kept in lines.items():
            trained = workers.train(*COMMON, *model, f"+data.dataset.pause_s={batch_s / BATCH}")
            kept += trained.lines[1:]
            losses.add(trained.losses[-1])
    assert len(losses) == 1, losses
    for batch_s, kept in lines.items():
        step_ms, data_ms = (1000 * median(line[key] for line in kept) for key in ("step_time_s", "data_s"))
        print(f"{name}, {1000 * batch_s:.0f} ms a batch: step {step_ms:.1f} ms, data {data_ms:.2f} ms")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
