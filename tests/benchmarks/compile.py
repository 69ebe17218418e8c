"""Compiled blocks against blocks as they are written: the time of a step (the fastest of 10) as a ratio,
and of the first one.

python tests/benchmarks/compile.py
python tests/benchmarks/compile.py restart    # the first step of two processes that share a cache folder
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hpc_parallel.models.layered import LayeredModel, materialise
from hpc_parallel.models.transformer import Transformer
from hpc_parallel.strategies import compiling

ROUNDS = 10
TOKENS = torch.arange(4 * 128).reshape(4, 128) % 256  # [batch, seq]


def build() -> LayeredModel:
    model = Transformer(layers=4, dim=256, heads=4, kv_heads=2, ffn_dim=688, vocab_size=256)
    return materialise(model, seed=0, device="cpu", dtype=torch.float32)


def step_s(model: LayeredModel) -> float:
    started = time.perf_counter()
    model.loss(model(TOKENS), TOKENS).backward()
    model.zero_grad()
    return time.perf_counter() - started


def main() -> None:
    models = {"written": build(), "compiled": compiling.apply(build())}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        first_s = {name: step_s(model) for name, model in models.items()}
        times_s: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(ROUNDS):
            for name, model in models.items():  # in turns; what else runs here only makes a step slower
                times_s[name].append(step_s(model))
    fastest_s = {name: min(taken_s) for name, taken_s in times_s.items()}
    ratio = fastest_s["compiled"] / fastest_s["written"]
    print(
        f"a step with compiled blocks takes {ratio:.2f} of the {fastest_s['written'] * 1e3:.0f} ms as written"
    )
    print(f"the first, which compiles one block for four: {first_s['compiled']:.0f} s")


def restart() -> None:
    """What a run that starts again spends on compiling: seconds by the clock, seconds on a core."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("first start", "second start"):
            subprocess.run(
                [sys.executable, __file__, "first_step", name],
                env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder},
                check=True,
            )


def first_step(name: str) -> None:
    model = compiling.apply(build())
    model.loss = compiling.compile_loss(model.loss)
    on_core_s, clock_s = sum(os.times()[:4]), step_s(model)
    print(
        f"{name}: first step {clock_s:.1f} s, {sum(os.times()[:4]) - on_core_s:.1f} s on a core", flush=True
    )


if __name__ == "__main__":
    {"restart": restart, "first_step": lambda: first_step(sys.argv[2]), "": main}[[*sys.argv, ""][1]]()
