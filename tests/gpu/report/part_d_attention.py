"""The kernels of attention with grouped heads, and a ring's slice against fused attention at 8k tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from hpc_parallel.models import attention
from hpc_parallel.strategies.context import attention_kernels
from tests.gpu.report import setting
from tests.gpu.report.findings import Findings

TITLE, LIMIT_S = "attention", 30.0
HEADS, KV_HEADS = 32, 8


def run(findings: Findings) -> None:
    width = setting.sized(128, 16)
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = inputs(setting.sized(2048, 32), width, dtype)
        fused = lambda q=q, k=k, v=v: attend(q, k, v)  # noqa: E731
        findings.add(**{
            f"{dtype}": {"kernels": kernels(fused), "seconds": setting.seconds(fused),
                         "peak_bytes": setting.peak_bytes(fused)}
        })  # fmt: skip
    findings.add(ring_slice_8k=ring_slice(setting.sized(8192, 64), width))


def inputs(seq: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (
        torch.randn(1, heads, seq, width, device=setting.device(), dtype=dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention.attend(q, k, v, causal=True)


def kernels(work: Any) -> list[str]:
    """Names of the kernels, the longest first; on the CPU, of operators."""
    work()
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * setting.on_gpu()) as recorded:
        work()
        setting.wait()
    key = "self_device_time_total" if setting.on_gpu() else "self_cpu_time_total"
    events = [
        event for event in recorded.key_averages() if not setting.on_gpu() or event.device_type.name == "CUDA"
    ]
    return [event.key[:90] for event in sorted(events, key=lambda event: -getattr(event, key))[:4]]


def ring_slice(seq: int, width: int) -> dict[str, Any]:
    """What a ring computes for its own slice, both passes, and fused attention, in bfloat16."""
    query, key, value = inputs(seq, width, torch.bfloat16)
    kv, grad = torch.stack([key, value]), torch.randn_like(query)
    kernel = attention_kernels.kernel_for(query)

    def slice_of_ring() -> None:
        output, lse = attention_kernels.accumulated(kernel.forward(query, kv, causal=True))
        output = output.to(query.dtype)
        kernel.backward(attention_kernels.Attended(grad, query, output, lse), kv, causal=True)

    q, k, v = (x.detach().clone().requires_grad_() for x in (query, key, value))
    fused_s = setting.seconds(lambda: attend(q, k, v).backward(grad), repeats=5)
    slice_s = setting.seconds(slice_of_ring, repeats=5)
    names = ("CUDNN", "FLASH", "EFFICIENT", "CPU_FLASH", "STRIPS")
    (chosen,) = [name for name in names if getattr(attention_kernels, name) is kernel]
    return {"kernel": chosen, "fused_s": fused_s, "slice_s": slice_s, "ratio": slice_s / fused_s}
