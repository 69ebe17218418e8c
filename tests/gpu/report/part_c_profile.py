"""One profiled step, eager and compiled: kernels, rotary positions' share, copies of gradients, memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from hpc_parallel.models import transformer
from hpc_parallel.models.layered import materialise
from hpc_parallel.strategies import compiling, precision
from tests.gpu.report import setting
from tests.gpu.report.findings import Findings

TITLE, LIMIT_S = "one profiled step", 50.0
TOP = 10


def run(findings: Findings) -> None:
    setting.join()
    setting.compile_quickly()
    inputs, targets = setting.batch()
    transformer.rotation = ranged("rotary", transformer.rotation)  # type: ignore[assignment]
    transformer.rotate = ranged("rotary", transformer.rotate)  # type: ignore[assignment]
    eager = setting.step_of("data")
    findings.add(eager=profiled(lambda: eager(inputs, targets)))
    findings.add(peak_bytes=setting.peak_bytes(lambda: eager(inputs, targets)))
    findings.add(peak_bytes_without_loss=without_loss(inputs, compiled=False))
    compiled = setting.step_of("data", compiled=True)
    findings.add(compiled=profiled(lambda: compiled(inputs, targets)))
    findings.add(compiled_peak_bytes=setting.peak_bytes(lambda: compiled(inputs, targets)))
    findings.add(compiled_peak_bytes_without_loss=without_loss(inputs, compiled=True))


def ranged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` inside a range of the profiler, except when torch.compile reads it."""

    def call(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*arguments, **options)
        with record_function(name):
            return function(*arguments, **options)

    return call


def profiled(step: Callable[[], object]) -> dict[str, Any]:
    """What one step did after a few others."""
    for _ in range(setting.sized(5, 2)):
        step()
    setting.wait()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * setting.on_gpu()
    with profile(activities=activities) as recorded:
        step()
        setting.wait()
    averages = recorded.key_averages()
    key = "self_device_time_total" if setting.on_gpu() else "self_cpu_time_total"
    kernels = [event for event in averages if not setting.on_gpu() or is_kernel(event)]
    total_us = sum(getattr(event, key) for event in kernels) or 1.0
    top = sorted(kernels, key=lambda event: -getattr(event, key))[:TOP]
    rotary = [event for event in averages if event.key == "rotary" and event.device_type.name == "CPU"]
    of_rotary = "device_time_total" if setting.on_gpu() else "cpu_time_total"
    return {
        "kernel_s": total_us / 1e6,
        "top": {event.key[:90]: getattr(event, key) / total_us for event in top},
        "rotary_share_forward": sum(getattr(event, of_rotary) for event in rotary) / total_us,
        "backward_kernels": len(launched_in_backward(recorded)),
        "gradient_copies": copies(averages),
    }


def is_kernel(event: Any) -> bool:
    """Not a range of the user, which covers kernels and is listed beside them."""
    return event.device_type.name == "CUDA" and not event.is_user_annotation


def launched_in_backward(recorded: Any) -> list[str]:
    """Kernels whose operator runs below autograd's engine."""
    names = []
    for event in recorded.events():
        if event.name.startswith("autograd::engine"):
            names += [kernel.name for kernel in event.kernels] + below(event)
    return names


def below(event: Any) -> list[str]:
    names = []
    for child in event.cpu_children:
        names += [kernel.name for kernel in child.kernels] if setting.on_gpu() else [child.name]
        names += below(child)
    return names


def copies(averages: Any) -> dict[str, int]:
    """Calls that copy: DistributedDataParallel copies a gradient that is no view of its bucket."""
    counts: Counter[str] = Counter()
    for event in averages:
        if event.key in ("aten::copy_", "aten::_foreach_copy_", "Memcpy DtoD (Device -> Device)"):
            counts[event.key] += event.count
    return dict(counts)


def without_loss(inputs: Tensor, *, compiled: bool) -> int | None:
    """The peak of forward and backward of all but the head and the loss."""
    model = setting.build(tied_head=False)
    if compiled:
        compiling.apply(model)
    precision.apply(model, precision="bfloat16", device_type=setting.device().type)
    materialise(model, seed=0, device=setting.device(), dtype=torch.float32)
    model.head = None  # the output is that of the last block
    return setting.peak_bytes(lambda: model(inputs).float().mean().backward())
