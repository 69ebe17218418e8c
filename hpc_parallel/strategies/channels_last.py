"""Convolutions with the channels of a position next to each other in memory (channels_last).

The tensor cores of a GPU read half-precision images in this order, and cuDNN otherwise reorders the input and
the output of each convolution. Weights keep their order in memory, so checkpoints, slices and messages do not
change. cuDNN reorders a weight when it is used; a weight is small compared with the images.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.strategies.precision import HALF
from hpc_parallel.strategies.replace_forward import Forward, replace_forward


def apply(model: LayeredModel, *, precision: str, device_type: str) -> LayeredModel:
    """Reorder the input of each 2d convolution of `model`. Its output and later operations keep the order.

    Every convolution reorders its input, because an input with one channel has no order and messages between
    ranks are contiguous. An input that already has the order is not copied.
    """
    if model.channels_last and gains(precision, device_type):
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
                replace_forward(module, reordered, technique="ChannelsLast")
    return model


def gains(precision: str, device_type: str) -> bool:
    """Whether convolutions are faster in this order: on GPUs, in half precision (NVIDIA's guide).

    On CPUs it depends: see docs/performance.md.
    """
    return device_type == "cuda" and precision in HALF


def reordered(original: Forward, convolution: nn.Module, x: Tensor) -> Tensor:
    return original(convolution, x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x)
