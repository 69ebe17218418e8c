"""8B and 70B over 32 ranks that are not there: to materialise this rank's slices, and the host's step."""

from __future__ import annotations

import time
from typing import Any

import torch

from hpc_parallel.training.metrics import peak_memory_bytes
from tests.gpu.report import setting
from tests.gpu.report.findings import Findings

TITLE, LIMIT_S = "8B and 70B under a fake process group of 32 ranks", 60.0
RANKS, STEPS = 32, 4


def run(findings: Findings) -> None:
    for model in ("8b", "70b"):
        findings.add(**{model: large(model)})
        if setting.on_gpu():
            torch.cuda.empty_cache()


def large(model: str) -> dict[str, Any]:
    """The seconds and memory of this rank's part; the host's and the device's seconds of a step.

    What the fake ranks send is not a weight, so the losses mean nothing.
    """
    seq = setting.sized(512, 16)
    small = setting.sized((), tuple(setting.model_words()))
    built = setting.one_of_many(
        "strategy=fsdp", f"nodes={RANKS // 8}", "gpus_per_node=8", f"model={model}", *small,
        "training.precision=bfloat16", "training.activation_checkpointing=full",
        f"data.sequence_length={seq}", f"training.global_batch_size={RANKS}",
    )  # fmt: skip
    host_s, step_s = [], []
    for _ in range(STEPS):
        setting.wait()
        began = time.perf_counter()
        built.step()
        host_s.append(time.perf_counter() - began)
        setting.wait()
        step_s.append(time.perf_counter() - began)
    return {
        "materialise_s": built.materialise_s,
        "peak_bytes": peak_memory_bytes(setting.device()),
        "host_step_s": min(host_s),
        "step_s": min(step_s),
        "ranks": RANKS,
        "sequence": seq,
    }
