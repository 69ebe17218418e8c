"""Reads the batch of the next step in a thread while a step runs.

A checkpoint does not contain a batch that was read ahead, because the samples of a step depend only on the
number of the step. Only one thread reads at a time, because a user's dataset may not be safe for two.

The global generators of random numbers belong to the main thread. It reads the samples that draw from them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from hpc_parallel.data.generators import GeneratorStates, generator_states
from hpc_parallel.data.sampler import Batch, Batches, QuietSamples
from hpc_parallel.failure.hang_report import READER


@dataclass
class _Reading:
    """One batch on its way from the thread."""

    step: int
    before: GeneratorStates | None  # at the request; None if its samples draw no random numbers
    done: threading.Event = field(default_factory=threading.Event)
    batch: Batch | None = None
    error: BaseException | None = None


class ReadAhead:
    """The batches of training, in order, each read while the step before it runs.

    The thread ends with `close`, and with the process; neither waits for a read that hangs.
    """

    def __init__(
        self,
        batches: Batches,
        *,
        steps: int,
        device: torch.device,
        pin: Callable[[Batch, torch.device], Batch] = Batch.pinned,
    ) -> None:
        """steps: of the entire training; `pin` prepares a batch for the copy to `device`, in the thread."""
        self._batches, self._steps, self._device, self._pin = batches, steps, device, pin
        self._on = not batches.draws and batches.replica is not None
        self._is_random = batches.is_random
        self._requests: queue.SimpleQueue[_Reading | None] = queue.SimpleQueue()
        self._reading: _Reading | None = None
        self._thread: threading.Thread | None = None

    def next(self, step: int) -> Batch:
        """Returns the batch of the 0-based `step` on the device, and begins to read the one after it.

        Raises the exception of the samples, at the step whose batch failed.
        """
        reading, self._reading = self._reading, None
        batch = self._read(step) if reading is None or reading.step != step else self._take(reading)
        if self._on and step + 1 < self._steps:
            self._begin(step + 1)
        return self._copy(batch)

    def again(self, step: int) -> Batch:
        """Returns the batch of any 0-based `step` on the device, and reads none ahead."""
        self.settle()
        return self._copy(self._read(step))

    def _read(self, step: int) -> Batch:
        return self._pin(self._batches.read(step), self._device)

    def _copy(self, batch: Batch) -> Batch:
        """Copy a pinned batch to the device without blocking the host."""
        inputs, targets = (tensor.to(self._device, non_blocking=True) for tensor in batch[:2])
        return Batch(inputs, targets, batch.indices)

    def settle(self) -> None:
        """Wait until the thread reads nothing, before the main thread reads."""
        if self._reading is not None:
            self._reading.done.wait()

    def close(self) -> None:
        """Let the thread end after the batch that it reads."""
        self._requests.put(None)

    def _begin(self, step: int) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._read_requested, name=READER, daemon=True)
            self._thread.start()
        self._reading = _Reading(step, before=generator_states() if self._is_random else None)
        self._requests.put(self._reading)

    def _read_requested(self) -> None:
        while (reading := self._requests.get()) is not None:
            try:
                reading.batch = self._pin(self._batches.read(reading.step, seeded=False), self._device)
            except BaseException as error:  # raised again in the main thread, with its traceback
                reading.error = error
            reading.done.set()

    def _take(self, reading: _Reading) -> Batch:
        reading.done.wait()
        if reading.before is not None and generator_states() != reading.before:
            return self._read_again(reading.step, before=reading.before)
        if reading.error is not None:
            raise reading.error
        assert reading.batch is not None
        return reading.batch

    def _read_again(self, step: int, *, before: GeneratorStates) -> Batch:
        """Read a batch again if something has drawn random numbers since the request.

        A sample drew them, or the model in the main thread. If a sample did, its draws are undone first. From
        now on the main thread reads all batches.
        """
        self._on = False
        samples = self._batches.samples
        if isinstance(samples, QuietSamples) and samples.draws_at(self._batches.positions(step)):
            before.restore()
        return self._read(step)
