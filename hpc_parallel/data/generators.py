"""The global random number generators on the host: those of torch, numpy and Python."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class GeneratorStates:
    """The states of all three generators. Two objects are equal if no number was drawn in between."""

    torch: bytes
    numpy: Any = field(compare=False)
    numpy_bytes: bytes
    python: tuple[Any, ...]

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.default_generator.set_state(torch.frombuffer(bytearray(self.torch), dtype=torch.uint8))
        np.random.set_state(self.numpy)
        random.setstate(self.python)


def generator_states() -> GeneratorStates:
    """Returns the states as they are now."""
    numpy_state = np.random.get_state()
    parts = numpy_state.items() if isinstance(numpy_state, dict) else numpy_state
    return GeneratorStates(
        torch=torch.default_generator.get_state().numpy().tobytes(),
        numpy=numpy_state,
        numpy_bytes=b" ".join(map(_bytes, parts)),
        python=random.getstate(),
    )


@contextmanager
def restored() -> Iterator[None]:
    """Restore the states of the generators after the block."""
    states = generator_states()
    try:
        yield
    finally:
        states.restore()


@contextmanager
def seeded(key: int) -> Iterator[None]:
    """Let the block draw from generators that start with `key`, and restore their states afterwards."""
    with restored():
        seed_all(key)
        yield


def seed_all(key: int) -> None:
    """Let all three generators start with `key`, a number of 64 bits at most."""
    torch.default_generator.manual_seed(key)
    np.random.seed(key % 2**32)
    random.seed(key)


def _bytes(part: Any) -> bytes:
    return part.tobytes() if isinstance(part, np.ndarray) else repr(part).encode()
