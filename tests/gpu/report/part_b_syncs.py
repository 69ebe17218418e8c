"""No step waits for the device: torch raises at each call that would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hpc_parallel.problems import ConfigError
from tests.gpu.report import setting
from tests.gpu.report.findings import NOT_AVAILABLE, Findings

TITLE, LIMIT_S = "host waits inside a step", 35.0
KINDS = ("fsdp", "data")
KEEPS = ("none", "selective", "full")


def run(findings: Findings) -> None:
    setting.join()
    inputs, targets = setting.batch()
    for kind in KINDS:
        for keeps in KEEPS:
            name = f"{kind}, checkpointing {keeps}"
            try:
                step = setting.step_of(kind, keeps=keeps)
            except ConfigError as error:  # selective checkpointing needs a newer torch
                findings.add(**{name: f"{NOT_AVAILABLE}: {str(error).splitlines()[0]}"})
                continue
            for _ in range(2):  # buckets and caches of the first steps
                step(inputs, targets)
            setting.wait()
            findings.add(**{name: first_wait(step, inputs, targets)})


def first_wait(step: setting.Callable[..., object], inputs: torch.Tensor, targets: torch.Tensor) -> str:
    """The first call that waits for the device, or none."""
    try:
        with syncs_are_errors():
            step(inputs, targets)
    except RuntimeError as error:
        return f"waits: {str(error).splitlines()[0]}"
    return "no wait"


@contextmanager
def syncs_are_errors() -> Iterator[None]:
    if not setting.on_gpu():
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
