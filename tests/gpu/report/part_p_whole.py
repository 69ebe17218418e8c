"""`8b` whole on one card with weights and state in bfloat16, and four layers as wide as Qwen3 30B A3B."""

from __future__ import annotations

from tests.gpu.report import setting
from tests.gpu.report.findings import Findings
from tests.gpu.report.part_l_benchmark import COMPILED, measure

TITLE, LIMIT_S = "8b whole, and a mixture", 400.0
FEWER_BYTES = (
    "training.precision=bfloat16", "training.weights=bfloat16", "optimizer.state=bfloat16",
    "training.activation_checkpointing=full",
)  # fmt: skip


def run(findings: Findings) -> None:
    setting.join()
    setting.compile_quickly()
    large = setting.sized(["model=8b"], setting.model_words())
    size = setting.sized({"samples": 8, "seq": 4096}, {"samples": 4, "seq": 16})
    half = f"training.microbatch_size={size['samples'] // 2}"
    measure(findings, "8b, 2 x 4 x 4096 tokens, weights in bf16", *large, *FEWER_BYTES, half, **size)
    mixture = setting.sized(["model=qwen3_30b_a3b", "model.layers=4"], ["model=moe_tiny"])
    measure(findings, "qwen3_30b_a3b in 4 layers, 8 x 4096 tokens", *mixture, *COMPILED, **size)
