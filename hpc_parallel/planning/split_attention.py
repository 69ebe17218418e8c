"""What a block's attention sends if sequences are split (strategies/ring.py, all_to_all_attention.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hpc_parallel.planning.decoder import SCORES, SOFTMAX, VALUES, Share
from hpc_parallel.planning.group_times import GroupExchange, GroupShape
from hpc_parallel.planning.kernels import Term
from hpc_parallel.planning.operations import precise_bytes
from hpc_parallel.planning.pipeline_orders import BACKWARD, FORWARD, ActionKind


@dataclass(frozen=True)
class Message:
    """One kind of message of a block.

    kind: whether it is sent in the forward or the backward pass. count: the number of messages. beside: the
    share of the pass's attention that is computed while one message is sent.
    """

    exchange: GroupExchange
    kind: ActionKind
    count: int = 1
    beside: float = 0.0


@dataclass(frozen=True)
class PlannedSplitAttention:
    """The attention of one device's part of each sequence; the other parts are on the ranks of `group`."""

    share: Share
    group: GroupShape

    def messages(self, kind: ActionKind, attention: str) -> Iterator[Message]:
        """The messages of the pass `kind`. attention: strategy.context_attention."""
        every = {"ring": self._ring, "gather": self._gather, "all_to_all": self._all_to_all}[attention]()
        return (message for message in every if message.kind is kind)

    @property
    def _kv(self) -> float:
        """The numbers of this device's keys and values."""
        decoder = self.share.decoder
        return 2 * self.share.tokens * decoder.kv_heads * decoder.dim / decoder.heads / self.share.tensor

    @property
    def _bytes(self) -> int:
        return self.share.number_bytes

    @property
    def _precise(self) -> int:
        """Bytes of one number of the gradients of keys and values, which are summed over devices."""
        return precise_bytes(self._bytes)

    def _ring(self) -> Iterator[Message]:
        """Each hop overlaps the attention to the last keys and values, except the gradients' last hop."""
        hops, beside = self.group.ranks - 1, 1 / self.group.ranks
        yield Message(self._hop("keys and values", self._bytes), FORWARD, hops, beside)
        both = self._hop("keys, values and gradients", self._bytes + self._precise)
        yield Message(both, BACKWARD, hops, beside)
        yield Message(self._hop("last gradients of keys and values", self._precise), BACKWARD)

    def _hop(self, name: str, number_bytes: int) -> GroupExchange:
        return GroupExchange(f"context: {name}", "send_recv", number_bytes * self._kv, self.group)

    def _gather(self) -> Iterator[Message]:
        every = self._kv * self.group.ranks
        for kind, name in ((FORWARD, "keys and values"), (BACKWARD, "keys and values again")):
            yield self._at_once(kind, name, "all_gather", every * self._bytes)
        name = "gradients of keys and values"
        yield self._at_once(BACKWARD, name, "reduce_scatter", every * self._precise)

    def _all_to_all(self) -> Iterator[Message]:
        """A key-value head that serves several devices is sent to each."""
        decoder, tensor = self.share.decoder, self.share.tensor
        copies = max(1, self.group.ranks // (decoder.kv_heads // tensor))
        queries = self.share.tokens * decoder.dim / tensor
        for kind, of in ((FORWARD, ""), (BACKWARD, "gradients of ")):
            sent = (queries + copies * self._kv) * self._bytes
            yield self._at_once(kind, f"{of}queries, keys and values", "all_to_all", sent)
            yield self._at_once(kind, f"{of}outputs", "all_to_all", queries * self._bytes)

    def _at_once(self, kind: ActionKind, name: str, operation: str, size_bytes: float) -> Message:
        return Message(GroupExchange(f"context: {name}", operation, size_bytes, self.group), kind)


def attention_s(terms: Iterable[Term]) -> float:
    """The seconds of the scores, their softmax and the weighted values among the terms of a block."""
    names = (f": {SCORES}", f": {SOFTMAX}", f": {VALUES}")
    return sum(term.seconds for term in terms if any(name in term.name for name in names))
