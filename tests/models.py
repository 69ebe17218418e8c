"""Models that tests train or run besides the reference ones."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from hpc_parallel.models.attention import CausalAttention, FullAttention
from hpc_parallel.models.convnet import Segmenter
from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.models.moe import MoeTransformer
from hpc_parallel.models.transformer import Transformer


class Decided(Transformer):
    """A decoder with weights so large that each token depends on all before it, without any training."""

    def initialise(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        if tensor.dim() < 2:
            tensor.fill_(1.0)
        else:
            tensor.normal_(std=0.2, generator=generator)


class DecidedExperts(MoeTransformer):
    """The same with a mixture of experts in each block."""

    initialise = Decided.initialise


class LooksBack(Decided):
    """Each block also reads its input of 20 positions before: only a longer text shows it."""

    def __init__(self, **shape: Any) -> None:
        super().__init__(**shape)
        self.blocks = nn.ModuleDict({name: WithEarlier(block) for name, block in self.blocks.items()})


class WithEarlier(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Any:
        return self.block(x + F.pad(x, (0, 0, 20, 0))[:, : x.shape[1]])


class Encoder(Transformer):
    """The reference decoder's blocks with attention in both directions."""

    def __init__(self, **shape: Any) -> None:
        super().__init__(**shape)
        for name, module in list(self.named_modules()):
            if isinstance(module, CausalAttention):
                self.set_submodule(name, FullAttention())


class Bigram(LayeredModel):
    """Guesses a token from the last one alone."""

    def __init__(self, **shape: object) -> None:
        blocks = [nn.Linear(16, 16)]
        super().__init__(stem=nn.Embedding(256, 16), blocks=blocks, head=nn.Linear(16, 256))


class UnusedBesideExperts(MoeTransformer):
    """Each block has a layer that nothing uses."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for block in self.blocks.values():
            block.unused = nn.Linear(4, 4)


class UnusedInImages(Segmenter):
    """Each block has a layer that nothing uses."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for block in self.blocks.values():
            block.unused = nn.Conv2d(4, 4, 3)


class Slow(Transformer):
    """A decoder whose head takes `pause_s` seconds; four times as long while `crawl_while` exists.

    While `hold_while` exists, no rank gets its model.
    """

    def __init__(self, *, pause_s: float, crawl_while: str = "", hold_while: str = "", **shape: Any) -> None:
        super().__init__(**shape)
        while Path(hold_while).is_file():
            time.sleep(0.05)
        assert self.head is not None

        def pause(*_: Any) -> None:
            time.sleep(pause_s * (4 if Path(crawl_while).is_file() else 1))

        self.head.register_forward_hook(pause)


class SlowOnOneRank(Transformer):
    """A decoder whose head takes `pause_s` seconds on one rank, as on a throttled device."""

    def __init__(self, *, slow_rank: int, pause_s: float, **shape: Any) -> None:
        super().__init__(**shape)
        if self.head is not None and dist.is_initialized() and dist.get_rank() == slow_rank:
            self.head.register_forward_hook(lambda *_: time.sleep(pause_s))


class Harmed(Transformer):
    """A decoder to whose block 2 `harm` comes in its training forward pass number `at`, on rank `victim`."""

    def __init__(self, *, harm: str, at: int, victim: int, **shape: Any) -> None:
        super().__init__(**shape)
        self._passes = 0
        harms = {
            "memory": _no_memory,
            "backward": _no_memory_in_backward,
            "poison": _nan,
            "bug": _bug,
            "skip": _skip,
            "sleep": _sleep,
            "sleep in the backward pass": _sleep_in_backward,
            "hold the interpreter": lambda output: ctypes.PyDLL(None).sleep(120),
            "stop": lambda output: os.kill(os.getpid(), signal.SIGSTOP),
            "leave": lambda output: os._exit(0),
        }

        def count(block: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            self._passes += block.training and torch.is_grad_enabled()
            if self._passes == at and harm == "flip" and dist.get_rank() == victim:
                block.get_parameter("attention.query.weight").data[0, 0].mul_(1.001)
                return output
            hit = self._passes == at and block.training and dist.get_rank() == victim
            return harms[harm](output) if hit else output

        self.blocks["2"].register_forward_hook(count)


def _no_memory(output: Tensor) -> Tensor:
    return output + torch.empty(2**52, dtype=torch.uint8).sum()


def _no_memory_in_backward(output: Tensor) -> Tensor:
    output.register_hook(_no_memory)
    return output


def _nan(output: Tensor) -> Tensor:
    return output * torch.nan


def _bug(output: Tensor) -> Tensor:
    raise ValueError("a bad label")


def _skip(output: Tensor) -> Tensor:
    """The next sum over ranks is left out here, and here alone."""
    original = dist.all_reduce

    def leave_out(*words: Any, **options: Any) -> None:
        dist.all_reduce = original

    dist.all_reduce = leave_out
    return output


def _sleep_in_backward(output: Tensor) -> Tensor:
    output.register_hook(_sleep)
    return output


def _sleep(output: Tensor) -> Tensor:
    time.sleep(120)
    return output


class NeedsNumbers(Bigram):
    """Its constructor reads numbers, as that of stochastic depth in many models of images does."""

    def __init__(self, **options: Any) -> None:
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        super().__init__(**options)
