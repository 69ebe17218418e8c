"""Copies a state to the host's memory, so that training can go on while the copy is written.

torch's DefaultStager registers the memory of each tensor with CUDA, even of a tensor with 5 bytes. The states
of the random generators are new tensors at each save, so it registers them again each time. If CUDA refuses
to register one ("part or all of the requested memory range is already mapped"), the save fails. torch 2.11
and 2.12 also register all other memory again at each save. In this module a buffer lasts as long as the run,
only large buffers are pinned, and a refusal costs only speed.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from hpc_parallel import torch_internals
from hpc_parallel.models.drawn_weights import local_of
from hpc_parallel.problems import print_warning

PIN_FROM_BYTES = 2**20  # registering a smaller buffer takes longer than its faster copy saves
_PORTABLE = 1  # cudaHostRegisterPortable


@dataclass(frozen=True)
class Pinning:
    """Locks host memory for copies by the device. Both functions return CUDA's error code, 0 for success."""

    register: Callable[[int, int], int]  # address, bytes
    unregister: Callable[[int], int]  # address


def cuda_pinning(device: torch.device) -> Pinning:
    """CUDA's own functions. A refusal leaves no error behind that a later kernel would report."""
    runtime: Any = torch.cuda.cudart()

    def register(address: int, size: int) -> int:
        if code := int(runtime.cudaHostRegister(address, size, _PORTABLE)):
            with suppress(RuntimeError):  # the check after this kernel clears the error
                torch.ones(1, device=device)
        return code

    return Pinning(register, unregister=lambda address: int(runtime.cudaHostUnregister(address)))


class Stager(AsyncStager):
    """Copies each tensor of a state into the buffer of its name, which the next save uses again."""

    _synchronize_after_execute = False  # `stage` returns after the copies, so async_save need not wait

    def __init__(self, *, pinning: Pinning | None = None, wait: Callable[[], None] = lambda: None) -> None:
        """`pinning`: if None, all buffers stay pageable.

        `wait`: waits until the device has made all copies.
        """
        self._pinning = pinning
        self._refused = False
        self._wait = wait
        self._buffers: dict[str, Tensor] = {}
        self._pinned: dict[str, int] = {}  # address by name

    @torch.no_grad()
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns copies of the tensors of `state_dict`, valid until the next call."""
        copies: dict[str, Any] = {}
        for name, tensor in state_dict.items():
            local = local_of(tensor)
            buffer = self._buffer(name, like=local)
            buffer.copy_(local, non_blocking=True)
            copies[name] = (
                torch_internals.with_local(tensor, buffer) if isinstance(tensor, DTensor) else buffer
            )
        self._wait()
        return copies

    def synchronize_staging(self) -> None:
        """Return at once: `stage` has waited already."""
        return

    def close(self) -> None:
        for name in list(self._pinned):
            self._unpin(name)
        self._buffers.clear()

    def _buffer(self, name: str, *, like: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != like.shape or buffer.dtype != like.dtype:
            self._unpin(name)
            pins = self._pinning is not None and not self._refused and like.nbytes >= PIN_FROM_BYTES
            buffer = self._pinned_buffer(name, like) if pins else torch.empty(like.shape, dtype=like.dtype)
            self._buffers[name] = buffer
        return buffer

    def _pinned_buffer(self, name: str, like: Tensor) -> Tensor:
        """A buffer on pages that nothing else uses: CUDA refuses pages that are already registered."""
        assert self._pinning is not None
        pages = torch.frombuffer(mmap.mmap(-1, like.nbytes), dtype=torch.uint8)
        if code := self._pinning.register(pages.data_ptr(), like.nbytes):
            self._refused = True
            warn_of_pageable(like.nbytes, code=code)
        else:
            self._pinned[name] = pages.data_ptr()
        return pages.view(like.dtype).view(like.shape)

    def _unpin(self, name: str) -> None:
        if (address := self._pinned.pop(name, None)) is not None:
            assert self._pinning is not None
            self._pinning.unregister(address)


def warn_of_pageable(count: int, *, code: int) -> None:
    """count: the bytes that CUDA does not register; code: its error."""
    print_warning(
        f"{count / 1e6:.0f} MB for checkpoints can't be pinned (CUDA's error {code}), "
        "so copies to the host are slower. Try a higher limit of locked memory (ulimit -l)."
    )


def stager_for(device: torch.device) -> Stager:
    """A stager that pins memory if the state is on a GPU."""
    if device.type != "cuda":
        return Stager()
    return Stager(pinning=cuda_pinning(device), wait=lambda: torch.cuda.current_stream(device).synchronize())
