"""Generation of one token by all ranks of a replica. Stages run in order; one rank chooses the token."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_parallel.strategies import cache, exchange
from hpc_parallel.strategies.assemble import Assembled
from hpc_parallel.strategies.mesh import axis_of, joint, name_of
from hpc_parallel.strategies.ranges import marked


class Decoder:
    """Generates tokens with key-value caches: takes prompts first, then one token for each call.

    Each rank has one stage. The ranks of one replica get the same batch; replicas get different ones.
    """

    def __init__(
        self, assembled: Assembled, *, length: int, device: torch.device, compares: bool = False
    ) -> None:
        """`length`: the number of positions of the prompt and of all new tokens except the last.

        `compares`: whether `compare` will be called.
        """
        (self._part,) = assembled.parts
        cache.apply(self._part, length=length, keeps=compares)
        self.device = device
        self._stages = axis_of(assembled.mesh, "pipeline")
        self._replica = joint(assembled.mesh, "pipeline", "tensor")
        tensor = axis_of(assembled.mesh, "tensor")
        self._is_chooser = self._part.head is not None and (tensor is None or tensor.get_local_rank() == 0)
        # The ranks of a replica are ordered by stage: the first rank of the last stage chooses.
        tensor_degree = 1 if tensor is None else tensor.size()
        self._chooser = 0 if self._replica is None else self._replica.size() - tensor_degree
        self._input_kind: tuple[tuple[int, ...], torch.dtype] | None = None  # shape of a token, and dtype
        self._sent_kind = False  # whether the next stage has got the shape and the dtype

    @torch.no_grad()
    def __call__(self, tokens: Tensor, choose: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns the next token [batch] on all ranks: `choose` of the last position's logits [batch, vocab].

        `tokens` [batch, seq] follow the tokens of earlier calls.
        """
        x = self._forward(tokens)
        chosen = choose(x[:, -1]) if self._is_chooser else tokens.new_empty(len(tokens))
        if self._replica is not None:
            with marked(f"broadcast {name_of(self._replica)}"):
                dist.broadcast(chosen, group=self._replica.get_group(), group_src=self._chooser)
        return chosen

    @torch.no_grad()
    def compare(self, text: Tensor, *, row: int, passes: slice) -> Tensor | None:
        """Returns the logits that chose the new tokens of a text, twice: [2, new, vocab].

        The first are of the whole `text` [1, seq] (without its last token). The second are those that `row`
        of the batch had in earlier `passes`. Returns None on a rank that does not choose.
        """
        with cache.whole_text(self._part, row=row, passes=passes):
            logits = self._forward(text)
        return logits if self._is_chooser else None

    def _forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self._part(tokens if self._part.stem is not None else self._receive(tokens.shape))
        if self._part.head is None:
            self._send(x.contiguous())
        return x

    def _send(self, x: Tensor) -> None:
        """Send `x` to the next stage; the first time, send its shape and dtype before it."""
        group, target = self._neighbour(+1)
        if not self._sent_kind:
            kind = list(x.shape[2:]), str(x.dtype).removeprefix("torch.")
            exchange.send(kind, target=target, group=group, device=self.device)
            self._sent_kind = True
        with marked("send pipeline"):
            dist.send(x, group=group, group_dst=target)

    def _receive(self, shape: torch.Size) -> Tensor:
        """The previous stage's output [batch, seq, ...] for tokens of `shape` [batch, seq]."""
        group, source = self._neighbour(-1)
        if self._input_kind is None:
            size, name = exchange.receive(source=source, group=group, device=self.device)
            self._input_kind = tuple(size), getattr(torch, name)
        size, dtype = self._input_kind
        x = torch.empty(*shape, *size, dtype=dtype, device=self.device)
        with marked("recv pipeline"):
            dist.recv(x, group=group, group_src=source)
        return x

    def _neighbour(self, step: int) -> tuple[dist.ProcessGroup, int]:
        assert self._stages is not None
        return self._stages.get_group(), self._stages.get_local_rank() + step
