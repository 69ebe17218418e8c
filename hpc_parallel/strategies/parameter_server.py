"""A synchronous parameter server: rank 0 holds the weights and the optimizer, workers compute gradients.

In each step every worker sends its gradients and receives the weights (Li et al. 2014, without its
asynchrony). The server's link carries 2 x weights for each worker; an all-reduce needs 2(n-1)/n x weights
on each link. Messages are flat buckets, sent point to point. The server adds gradients in rank order, so
runs are bitwise reproducible.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from hpc_parallel import torch_internals
from hpc_parallel.config.schema import StrategyConfig
from hpc_parallel.strategies.ranges import marked

SERVER = 0


class ParameterServer:
    """This rank's part of the exchange, over all ranks of the default process group."""

    def __init__(
        self,
        parameters: Iterable[Parameter],
        *,
        options: StrategyConfig,
        finds_unused: bool = False,
    ) -> None:
        """`finds_unused`: a weight that no worker's loss depends on gets no gradient, as on one device.

        Otherwise all weights get a gradient, and no rank waits for its device to learn which are unused.
        """
        self.serves = dist.get_rank() == SERVER
        self._server_trains = not options.dedicated_server
        self._workers = [rank for rank in range(dist.get_world_size()) if rank != SERVER]
        self._finds_unused = finds_unused
        self._buckets = buckets(parameters, max_bytes=int(options.bucket_mb * 2**20))

    def collect(self) -> None:
        """Put the mean of the gradients into the server's `.grad`, and free the workers' gradients."""
        for bucket in self._buckets:
            if self.serves:
                self._average(bucket)
            else:
                self._send(self._gradients(bucket), target=SERVER)
                for parameter in bucket:
                    parameter.grad = None

    def hand_out(self) -> None:
        """Copy the server's weights to every worker."""
        for bucket in self._buckets:
            weights = [parameter.detach() for parameter in bucket]
            if self.serves:
                message = flat(weights)
                for worker in self._workers:
                    self._send(message, target=worker)
            else:
                torch_internals.copy_into(pieces(self._receive(bucket, source=SERVER), like=bucket), weights)

    def share(self, values: Iterable[Tensor]) -> None:
        """Copy the server's `values` to those of every worker."""
        for value in values:
            if self.serves:
                for worker in self._workers:
                    self._send(value, target=worker)
            else:
                value.copy_(self._receive([value], source=SERVER).view_as(value))

    def _average(self, bucket: Sequence[Parameter]) -> None:
        first, *others = self._workers
        if self._server_trains:
            total, others = self._gradients(bucket), self._workers
        else:
            total = self._receive(bucket, source=first, more=self._flags(bucket))
        for worker in others:
            total += self._receive(bucket, source=worker, more=self._flags(bucket))
        count = len(total) - self._flags(bucket)
        used = total[count:].tolist() if self._finds_unused else [1.0] * len(bucket)
        total = total[:count]
        total /= len(self._workers) + self._server_trains
        for parameter, piece, uses in zip(bucket, pieces(total, like=bucket), used, strict=True):
            parameter.grad = piece if uses else None

    def _flags(self, bucket: Sequence[Parameter]) -> int:
        """How many flags follow a bucket's gradients: one for each weight, or none."""
        return len(bucket) if self._finds_unused else 0

    def _gradients(self, bucket: Sequence[Parameter]) -> Tensor:
        """This rank's gradients, flat, with their flags."""
        gradients = [gradient(parameter) for parameter in bucket]
        if self._finds_unused:
            used = [float(parameter.grad is not None) for parameter in bucket]
            gradients.append(torch.tensor(used, dtype=bucket[0].dtype, device=bucket[0].device))
        return flat(gradients)

    def _send(self, message: Tensor, *, target: int) -> None:
        with marked("send parameter server"):
            dist.send(message, dst=target)

    def _receive(self, like: Sequence[Tensor], *, source: int, more: int = 0) -> Tensor:
        """`more`: how many numbers follow those of `like`."""
        count = sum(parameter.numel() for parameter in like) + more
        message = torch.empty(count, dtype=like[0].dtype, device=like[0].device)
        with marked("recv parameter server"):
            dist.recv(message, src=source)
        return message


class Idle:
    """The schedule of a dedicated server: no forward and no backward pass."""

    copies: Sequence[Parameter] = ()

    def __init__(self, *, device: torch.device) -> None:
        self._device = device

    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return torch.zeros((), device=self._device)

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return torch.zeros((), device=self._device)


def buckets(parameters: Iterable[Parameter], *, max_bytes: int) -> list[list[Parameter]]:
    """Group trainable weights, in order, into messages of at most `max_bytes`; a larger weight is alone."""
    groups: list[list[Parameter]] = []
    free_bytes = 0
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if not groups or parameter.nbytes > free_bytes:
            groups.append([])
            free_bytes = max_bytes
        groups[-1].append(parameter)
        free_bytes -= parameter.nbytes
    return groups


def gradient(parameter: Parameter) -> Tensor:
    """The weight's gradient; zero if the loss does not depend on the weight."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def pieces(message: Tensor, *, like: Sequence[Parameter]) -> list[Tensor]:
    """Views of a flat message in the shapes of `like`."""
    parts = message.split([parameter.numel() for parameter in like])
    return [part.view_as(parameter) for part, parameter in zip(parts, like, strict=True)]
