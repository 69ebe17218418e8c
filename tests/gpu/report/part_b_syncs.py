"""No step waits for the device: torch raises at each call that would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hpc_parallel.models.convnet import ConvNet
from hpc_parallel.problems import ConfigError
from hpc_parallel.strategies import batch_norm, channels_last
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
    findings.add(**{"images, BatchNorm over ranks": first_wait(image_step(), *images())})


def image_step() -> setting.Callable[[torch.Tensor, torch.Tensor], object]:
    """A step of a convnet whose BatchNorm sums over the ranks of a mesh of one, in channels_last on a GPU."""
    with torch.device("meta"):
        model = ConvNet(channels=[8, 16], classes=10)
    channels_last.apply(model, precision="bfloat16", device_type=setting.device().type)
    batch_norm.apply(model, axis=setting.mesh_of("replicate"))
    step = setting.step_of("data", model=model, chunked=False)
    for _ in range(2):
        step(*images())
    setting.wait()
    return step


def images() -> tuple[torch.Tensor, torch.Tensor]:
    pixels = torch.zeros(4, 1, 16, 16, dtype=torch.uint8, device=setting.device())
    return pixels, torch.zeros(4, dtype=torch.int64, device=setting.device())


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
