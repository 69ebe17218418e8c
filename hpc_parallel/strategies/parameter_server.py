"""A synchronous parameter server: rank 0 holds the weights and the optimizer, workers have gradients.

Each step every worker sends its gradient and gets the weights back (Li et al. 2014, without its
asynchrony): 2 x weights a worker, all of it by the server's link, where an all-reduce would ask
2(n-1)/n x weights of each link. Messages are flat buckets, point to point; the server adds gradients up
in the order of the ranks, so a run repeats itself to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from hpc_parallel import torch_internals
from hpc_parallel.config.schema import StrategyConfig

SERVER = 0


class ParameterServer:
    """This rank's end of the exchange, over all ranks of the default process group."""

    def __init__(
        self, parameters: Iterable[Parameter], *, options: StrategyConfig, device: torch.device
    ) -> None:
        self.serves = dist.get_rank() == SERVER
        self._works_too = not options.dedicated_server
        self._workers = [rank for rank in range(dist.get_world_size()) if rank != SERVER]
        self._buckets = buckets(parameters, most_bytes=int(options.bucket_mb * 2**20))
        # gloo sends from the host's memory only, also where it is asked to serve GPUs
        over_host = f"{device.type}:gloo" in dist.get_backend_config().split(",")
        self._wire = torch.device("cpu") if over_host else device

    def collect(self) -> None:
        """The mean of the workers' gradients into the server's `.grad`; a worker's own is given away."""
        for bucket in self._buckets:
            if self.serves:
                self._add_up(bucket)
            else:
                self._send(flat([gradient(parameter) for parameter in bucket]), to=SERVER)
                for parameter in bucket:
                    parameter.grad = None

    def hand_out(self) -> None:
        """The server's weights into every worker's."""
        for bucket in self._buckets:
            weights = [parameter.detach() for parameter in bucket]
            if self.serves:
                message = flat(weights)
                for worker in self._workers:
                    self._send(message, to=worker)
            else:
                torch_internals.copy(pieces(self._receive(bucket, of=SERVER), like=bucket), weights)

    def _add_up(self, bucket: Sequence[Parameter]) -> None:
        first, *others = self._workers
        if self._works_too:
            total, others = flat([gradient(parameter) for parameter in bucket]), self._workers
        else:
            total = self._receive(bucket, of=first)
        for worker in others:
            total += self._receive(bucket, of=worker)
        total /= len(self._workers) + self._works_too
        for parameter, piece in zip(bucket, pieces(total, like=bucket), strict=True):
            parameter.grad = piece

    def _send(self, message: Tensor, *, to: int) -> None:
        dist.send(message.to(self._wire), dst=to)

    def _receive(self, like: Sequence[Parameter], *, of: int) -> Tensor:
        count = sum(parameter.numel() for parameter in like)
        message = torch.empty(count, dtype=like[0].dtype, device=self._wire)
        dist.recv(message, src=of)
        return message.to(like[0].device)


class Idle:
    """The forward and backward pass of a server that does nothing else."""

    copies: Sequence[Parameter] = ()

    def __init__(self, *, device: torch.device) -> None:
        self._device = device

    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return torch.zeros((), device=self._device)

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return torch.zeros((), device=self._device)


def buckets(parameters: Iterable[Parameter], *, most_bytes: int) -> list[list[Parameter]]:
    """Weights in their order, as many in one message as fit into it; a larger one has its own."""
    found: list[list[Parameter]] = []
    room = 0
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if not found or parameter.nbytes > room:
            found.append([])
            room = most_bytes
        found[-1].append(parameter)
        room -= parameter.nbytes
    return found


def gradient(parameter: Parameter) -> Tensor:
    """Zero where the loss did not reach the weight."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def pieces(message: Tensor, *, like: Sequence[Parameter]) -> list[Tensor]:
    """Views of a flat message in the shapes of `like`."""
    parts = message.split([parameter.numel() for parameter in like])
    return [part.view_as(parameter) for part, parameter in zip(parts, like, strict=True)]
