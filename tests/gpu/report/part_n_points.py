"""Points of GPU readiness that one device shows: images in channels_last, the same bits twice, experts."""

from __future__ import annotations

import os
from collections.abc import Callable
from unittest.mock import patch

import torch

from hpc_parallel.machine.torch_variables import use_fixed_workspaces
from hpc_parallel.models.convnet import ConvNet
from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.models.unet import UNet
from hpc_parallel.record.metrics_file import MetricsReader
from hpc_parallel.strategies import channels_last
from hpc_parallel.worker.main import use_deterministic_kernels
from tests.gpu.report import setting
from tests.gpu.report.findings import Findings

TITLE, LIMIT_S = "images in channels_last, the same bits, experts", 40.0
DTYPES = ("bfloat16", "float32")


def run(findings: Findings) -> None:
    use_fixed_workspaces(os.environ)  # before CUDA starts
    setting.join()
    for name, build, pixelwise in (
        ("convnet", lambda: ConvNet(channels=setting.sized([64, 128, 256, 512], [4, 8]), classes=10), False),
        ("unet", lambda: UNet(channels=setting.sized([64, 128, 256, 512], [4, 8]), classes=2), True),
    ):
        for dtype in DTYPES:
            figures = {
                order: image_step(build, order, dtype, pixelwise) for order in ("plain", "channels_last")
            }
            ratio = figures["plain"]["step_s"] / figures["channels_last"]["step_s"]
            findings.add(**{f"{name}, {dtype}": {**figures, "plain by channels_last": ratio}})
    experts = losses("model=moe_tiny", "data.sequence_length=64", "training.precision=bfloat16")
    findings.add(experts_in_bfloat16=experts)
    findings.add(same_bits_without_the_switch=losses(*text()) == losses(*text()))
    use_deterministic_kernels()
    findings.add(same_bits=losses(*text()) == losses(*text()))


def image_step(
    build: Callable[[], LayeredModel], order: str, dtype: str, pixelwise: bool
) -> dict[str, float]:
    """Seconds and loss of a step with images of one channel."""
    samples, size = setting.sized(32, 2), setting.sized(256, 16)
    with torch.device("meta"):
        model = build()
    with patch.object(channels_last, "gains", lambda *_: order == "channels_last"):
        channels_last.apply(model, precision=dtype, device_type=setting.device().type)
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (samples, 1, size, size), dtype=torch.uint8, generator=generator)
    targets = images[:, 0].long() % 2 if pixelwise else images[:, 0, 0, 0].long() % 10
    images, targets = images.to(setting.device()), targets.to(setting.device())
    step = setting.step_of("plain", model=model, microbatches=1, chunked=False, dtype=dtype)
    loss = float(step(images, targets))
    return {"loss": loss, "step_s": setting.seconds(lambda: step(images, targets), repeats=10)}


def text() -> list[str]:
    return [*setting.model_words(), f"data.sequence_length={setting.sized(512, 16)}"]


def losses(*words: str) -> list[float]:
    """Of a short training."""
    fixed = (
        "strategy=single", "training.steps=4", "training.global_batch_size=4", "training.log_every=1",
        "training.validate_every=null", "training.checkpoint_every=null", "training.measure_steps=0",
        "data.max_bytes=400000",
    )  # fmt: skip
    return [line["loss"] for line in MetricsReader(setting.trained(*fixed, *words).metrics).read()]
