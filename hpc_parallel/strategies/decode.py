"""The next token by all ranks of a replica: through the stages one after another, chosen on one rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_parallel.strategies import cache, exchange
from hpc_parallel.strategies.assemble import Assembled
from hpc_parallel.strategies.mesh import axis_of, joint


class Decoder:
    """Takes prompts, then one token a call, and keeps what they left in the layers' caches.

    Needs one stage a rank. Batches differ over replicas; the ranks of one replica are given the same.
    """

    def __init__(self, assembled: Assembled, *, length: int, device: torch.device) -> None:
        """length: positions there will be, those of a prompt and of all new tokens but the last."""
        (self._part,) = assembled.parts
        cache.apply(self._part, length=length)
        self._device = device
        self._stages = axis_of(assembled.mesh, "pipeline")
        self._replica = joint(assembled.mesh, "pipeline", "tensor")
        tensor = axis_of(assembled.mesh, "tensor")
        self._chooses = self._part.head is not None and (tensor is None or tensor.get_local_rank() == 0)
        # The ranks of a replica lie stage by stage: the first of the last stage chooses.
        across = 1 if tensor is None else tensor.size()
        self._chooser = 0 if self._replica is None else self._replica.size() - across
        self._taken: tuple[tuple[int, ...], torch.dtype] | None = (
            None  # what the stage before makes of a token
        )
        self._told = False  # the next stage, of the same

    @torch.no_grad()
    def __call__(self, tokens: Tensor, choose: Callable[[Tensor], Tensor]) -> Tensor:
        """The token [batch] that `choose` takes of the last position's logits [batch, vocab], on all ranks.

        tokens: [batch, seq], those that follow what was given before.
        """
        x = self._part(tokens if self._part.stem is not None else self._receive(tokens.shape))
        if self._part.head is None:
            self._send(x.contiguous())
        chosen = choose(x[:, -1]) if self._chooses else tokens.new_empty(len(tokens))
        if self._replica is not None:
            dist.broadcast(chosen, group=self._replica.get_group(), group_src=self._chooser)
        return chosen

    def _send(self, x: Tensor) -> None:
        """To the next stage; the first time with what it can't know of `x`."""
        group, to = self._neighbour(+1)
        if not self._told:
            made = list(x.shape[2:]), str(x.dtype).removeprefix("torch.")
            exchange.send(made, to=to, group=group, device=self._device)
            self._told = True
        dist.send(x, group=group, group_dst=to)

    def _receive(self, shape: torch.Size) -> Tensor:
        """What the stage before makes of tokens of `shape`: [batch, seq, ...]."""
        group, source = self._neighbour(-1)
        if self._taken is None:
            size, name = exchange.receive(source=source, group=group, device=self._device)
            self._taken = tuple(size), getattr(torch, name)
        size, dtype = self._taken
        x = torch.empty(*shape, *size, dtype=dtype, device=self._device)
        dist.recv(x, group=group, group_src=source)
        return x

    def _neighbour(self, step: int) -> tuple[dist.ProcessGroup, int]:
        assert self._stages is not None
        return self._stages.get_group(), self._stages.get_local_rank() + step
