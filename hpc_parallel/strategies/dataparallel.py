"""torch's nn.DataParallel: one process with one thread and one replica for each device.

The first device scatters each microbatch and gathers the outputs for the loss. Weights are copied to the
other devices in every forward pass, and gradients come back in every backward pass. Without GPUs the
replicas are threads that share one model, so no weight is copied.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from hpc_parallel.models.layered import LayeredModel, as_tuple
from hpc_parallel.strategies import batch_norm
from hpc_parallel.strategies.replace_forward import Forward, replace_forward
from hpc_parallel.torch_internals import BatchNorm, require_dims

Runner = Callable[..., Tensor]


def apply(model: LayeredModel, *, degree: int, device: torch.device) -> Threads | Gpus:
    """Run `degree` parts of each batch of `model` at once and concatenate their outputs."""
    local = ReplicaLocal()
    model.sample_indices.of_replica = partial(local.rows, degree)
    for module in model.modules():
        if isinstance(module, BatchNorm):
            replace_forward(module, partial(normalise, local), technique="Global")
    kind = Gpus if device.type == "cuda" else Threads
    return kind(model, degree=degree, local=local)


class ReplicaLocal(threading.local):
    """The index of this thread's replica, and the barrier that it shares with other replicas (if any)."""

    barrier: ReplicaBarrier | None = None
    index: int = 0

    def rows(self, degree: int, batch: Tensor) -> Tensor:
        """The part of `batch` [samples, ...] that this thread's replica has, if there are several."""
        return batch if self.barrier is None else batch.chunk(degree)[self.index]


class ReplicaBarrier:
    """Sums values over the replicas of one forward pass."""

    def __init__(self, *, local: ReplicaLocal, devices: Sequence[DeviceTraffic], replicas: int) -> None:
        self._local = local
        self._devices = devices[:replicas]
        self._values: list[Tensor] = [torch.empty(0)] * replicas
        self._barrier = threading.Barrier(replicas, action=self._add)
        self._total = torch.empty(0)
        self.failure: BaseException | None = None  # of the replica that failed first

    def join(self, replica: Runner, index: int) -> Runner:
        """Returns `replica` with access to this barrier; the others don't wait for it if it fails."""

        def run(*inputs: Any, **named: Any) -> Tensor:
            self._local.barrier, self._local.index = self, index
            try:
                return replica(*inputs, **named)
            except BaseException as failure:
                self.failure = self.failure or failure
                self._barrier.abort()
                raise
            finally:
                self._local.barrier = None

        return run

    def total(self, value: Tensor) -> Tensor:
        """The sum of all replicas' values, in the order of their indices; differentiable.

        One wait is enough: the next sum starts when all replicas wait again, after they have read this sum.
        """
        self._values[self._local.index] = value
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise RuntimeError(f"another replica of this process failed: {self.failure!r}") from None
        return self._total.to(value.device)

    def _add(self) -> None:
        first, *others = self._values
        for value, device in zip(others, self._devices[1:], strict=True):
            first = first + value.to(first.device)
            for source, target in ((device, self._devices[0]), (self._devices[0], device)):
                move(2 * value.nbytes, source=source, target=target)  # the value and its gradient
        self._total = first


def normalise(local: ReplicaLocal, original: Forward, norm: BatchNorm, x: Tensor) -> Tensor:
    """BatchNorm of `x` [batch, channel, ...] by the moments of all replicas' parts of the microbatch.

    The sums over replicas are plain operations, so autograd sends gradients from replica to replica. Only
    the first replica updates running statistics, because its buffers are the model's (nn.DataParallel).
    """
    require_dims(norm, x)
    if local.barrier is None or (not norm.training and norm.running_mean is not None):
        return original(norm, x)
    out, _, mean, variance, count = batch_norm.normalise(
        x, norm.weight, norm.bias, norm.eps, local.barrier.total
    )
    if local.index == 0:
        batch_norm.track(norm, mean=mean, variance=variance, count=count)
    return out


class TransferCounter:
    """Counts the bytes between the first device and the others in training."""

    def __init__(self, *, degree: int) -> None:
        self.devices = [DeviceTraffic() for _ in range(degree)]

    def count(self, inputs: Sequence[Tensor], outputs: Sequence[Any], *, copied: Sequence[Tensor]) -> None:
        """Count one forward and backward pass. Every device gets a copy of the `copied` tensors."""
        if not torch.is_grad_enabled():
            return
        weights = sum(tensor.nbytes for tensor in copied)
        gradients = sum(tensor.nbytes for tensor in copied if tensor.requires_grad)
        first = self.devices[0]
        for device, x, output in zip(self.devices[1:], inputs[1:], outputs[1:], strict=False):
            returned = sum(tensor.nbytes for tensor in as_tuple(output))  # as large as its gradient
            move(x.nbytes + returned + weights, source=first, target=device)
            move(returned + gradients, source=device, target=first)


class Threads(Module):
    """nn.DataParallel on CPUs: the devices are threads that share the model, so no weight is copied."""

    def __init__(self, model: LayeredModel, *, degree: int, local: ReplicaLocal) -> None:
        super().__init__()
        self.module = model
        self.transfers = TransferCounter(degree=degree)
        self._degree = degree
        self._local = local
        self._cores = max(1, torch.get_num_threads() // degree)

    def forward(self, x: Tensor) -> Any:
        pieces = x.chunk(self._degree)
        if len(pieces) == 1:
            return self.module(x)
        barrier = ReplicaBarrier(local=self._local, devices=self.transfers.devices, replicas=len(pieces))
        outputs: dict[int, Any] = {}
        grad_enabled = torch.is_grad_enabled()

        def run(index: int) -> None:
            torch.set_num_threads(self._cores)  # a setting of each thread, as torch's grad mode is
            with suppress(BaseException), torch.set_grad_enabled(grad_enabled):  # barrier.failure has it
                outputs[index] = barrier.join(self.module, index)(pieces[index])

        threads = [threading.Thread(target=run, args=(index,)) for index in range(len(pieces))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if barrier.failure is not None:
            raise barrier.failure
        gathered = [outputs[index] for index in range(len(pieces))]
        self.transfers.count(pieces, gathered, copied=())
        joined = tuple(map(torch.cat, zip(*map(as_tuple, gathered), strict=True)))
        return joined if isinstance(gathered[0], tuple) else joined[0]


class Gpus(torch.nn.DataParallel[LayeredModel]):
    """nn.DataParallel on a node's GPUs."""

    def __init__(self, model: LayeredModel, *, degree: int, local: ReplicaLocal) -> None:
        super().__init__(model, device_ids=list(range(degree)))
        self.transfers = TransferCounter(degree=degree)
        self._local = local

    def parallel_apply(self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        barrier = ReplicaBarrier(local=self._local, devices=self.transfers.devices, replicas=len(replicas))
        joined = [barrier.join(replica, index) for index, replica in enumerate(replicas)]
        outputs: list[Any] = super().parallel_apply(joined, inputs, kwargs)  # type: ignore[arg-type]
        copied = [*chain(self.module.parameters(), self.module.buffers())]
        self.transfers.count([arguments[0] for arguments in inputs], outputs, copied=copied)
        return outputs


@dataclass
class DeviceTraffic:
    """Bytes that one device has sent to others and received in training so far, which no collective sends."""

    sent_bytes: int = 0
    received_bytes: int = 0


def move(count_bytes: int, *, source: DeviceTraffic, target: DeviceTraffic) -> None:
    """Count bytes that `source` sends to `target`."""
    source.sent_bytes += count_bytes
    target.received_bytes += count_bytes


def traffic_figures(devices: Sequence[DeviceTraffic], *, steps: int) -> dict[str, Any]:
    """Returns the bytes of one step for `summary.json`, from the counts of all devices over `steps` steps."""
    sent_bytes = sum(device.sent_bytes for device in devices) / steps
    return {
        "traffic_bytes": sent_bytes,
        "busiest_rank_traffic_bytes": max(d.sent_bytes + d.received_bytes for d in devices) / steps,
        "traffic": {"copy": sent_bytes},
    }


def ring_all_reduce(*, weights_bytes: int, replicas: int) -> dict[str, float]:
    """Returns the bytes that a ring all-reduce of the gradients over `replicas` devices would send instead.

    Each of n devices sends and receives 2(n-1)/n of the weights (Patarasuk and Yuan 2009).
    """
    sent_bytes = 2 * (replicas - 1) / replicas * weights_bytes
    return {"traffic_bytes": replicas * sent_bytes, "busiest_rank_traffic_bytes": 2 * sent_bytes}
