"""The times of the exchanges in one training step: inside a block, between stages, and of gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from hpc_parallel.planning.collective_times import GroupExchange, GroupShape, bus_bytes_per_s, send_s
from hpc_parallel.planning.decoder import SCORES, SOFTMAX, VALUES, Kernels, Share, Term, Terms
from hpc_parallel.planning.hardware import Hardware, Loads
from hpc_parallel.planning.operations import FLOAT32_BYTES, precise_bytes
from hpc_parallel.planning.pipeline_orders import BACKWARD, FORWARD, ActionKind
from hpc_parallel.planning.work import Work

COUNT_BYTES = 8  # of the number of an expert's tokens
COMPRESSED_BYTES = 2  # of a number in bfloat16
JOINED, ADDED, DIVIDED = 2, 3, 2  # reads and writes of a byte: copied, added to a sum, divided


class ExchangeTimes:
    """The times of a step's exchanges. Each is computed when it is first read, and added to `terms`.

    sent: the exchanges so far, by name. kernels: the kernel times on the hardware `loads.stage`.
    """

    def __init__(self, work: Work, share: Share, loads: Loads, kernels: Kernels, terms: Terms) -> None:
        self._work, self._share, self._loads = work, share, loads
        self._kernels, self._terms = kernels, terms
        self._hardware, self._ranks = loads.stage, work.ranks
        self._last = self._ranks.stages - 1
        self.sent: dict[str, GroupExchange] = {}

    @property
    def beside_compute(self) -> bool:
        """Whether a device communicates while it computes. On a CPU it waits."""
        return not self._hardware.device.is_cpu

    def _exchange_s(self, exchange: GroupExchange, hardware: Hardware | None = None) -> float:
        """hardware: given if other devices are busy than during an action."""
        hardware = hardware or self._hardware
        seconds = exchange.seconds(hardware)
        self.sent[exchange.name] = exchange
        return self._terms.add(exchange.name, seconds, exchange.formula(hardware)) if seconds else 0.0

    def _group(self, ranks: int, *, stride: int) -> GroupShape:
        return GroupShape(ranks, stride, self._hardware.node.devices)

    @cached_property
    def tensor_sum_s(self) -> float:
        """A sum over the tensor axis: an all-reduce. With `ring_factors`, its two halves are separate."""
        group, size = self._group(self._work.tensor, stride=1), self._share.activation_bytes
        if not self._hardware.ring_factors:
            return self._exchange_s(GroupExchange("sum over the tensor axis", "all_reduce", size, group))
        gather = GroupExchange("gather over the tensor axis", "all_gather", size, group)
        scatter = GroupExchange("parts of a sum over the tensor axis", "reduce_scatter", size, group)
        return self._exchange_s(gather) + self._exchange_s(scatter)

    @cached_property
    def context_s(self) -> dict[ActionKind, float]:
        """How long a block waits for the other parts of its sequences, forward and backward."""
        attention = PlannedSplitAttention(
            self._share, self._group(self._work.context, stride=self._work.tensor)
        )
        return {
            kind: sum(map(self._exposed_s, attention.messages(kind, self._work.attention)))
            for kind in (FORWARD, BACKWARD)
        }

    @cached_property
    def experts_s(self) -> float:
        """A block sends tokens to their experts, and the outputs back; the backward pass sends gradients.

        Assumes that the router uses all experts equally. The device does not compute meanwhile.
        """
        size = self._share.activation_bytes * self._share.decoder.per_token
        names = "tokens to experts", "outputs of experts"
        return self.counts_s + sum(self._expert_s(name, size) for name in names)

    @cached_property
    def counts_s(self) -> float:
        """The exchange of the numbers of tokens, before the tokens."""
        return self._expert_s("numbers of tokens", COUNT_BYTES * self._work.decoder.experts)

    def _expert_s(self, name: str, size: float) -> float:
        group = self._group(self._work.expert, stride=self._work.tensor * self._work.context)
        return self._exchange_s(GroupExchange(name, "all_to_all", size, group))

    @cached_property
    def scales_s(self) -> dict[ActionKind, float]:
        """A block's exchanges of the largest values of tensors that axes split, for scales in float8."""
        return {
            kind: sum(count * self._exchange_s(exchange) for count, exchange in self._scales(kind))
            for kind in (FORWARD, BACKWARD)
        }

    def scale_messages(self, kind: ActionKind) -> int:
        return sum(count for count, _ in self._scales(kind))

    def _scales(self, kind: ActionKind) -> Iterator[tuple[int, GroupExchange]]:
        tensor, context = self._work.tensor, self._work.context
        groups = {"tensor": self._group(tensor, stride=1), "context": self._group(context, stride=tensor)}
        for axis, group in groups.items():
            messages = self._share.scale_messages(axis, is_backward=kind is BACKWARD)
            for product, count, numbers in messages if group.ranks > 1 else ():
                size, name = FLOAT32_BYTES * numbers, f"scales of {product} over {axis}, {kind.name.lower()}"
                yield count, GroupExchange(name, "all_reduce", size, group)

    @property
    def waits_of_block_s(self) -> list[float]:
        """How long a block waits for other parts of its sequences and for experts in a microbatch."""
        forward_passes = 1 + self._work.recomputations
        waits_s = [*[self.scales_s[FORWARD]] * forward_passes, self.scales_s[BACKWARD]]
        if self._work.context > 1:
            waits_s += [*[self.context_s[FORWARD]] * forward_passes, self.context_s[BACKWARD]]
        if self._work.expert > 1:
            waits_s += [*[self.experts_s] * forward_passes, self.experts_s - self.counts_s]
        return waits_s

    def _exposed_s(self, message: Message) -> float:
        """The wait for messages that last longer than the attention that runs at the same time."""
        exchange, part = message.exchange, "block forward" if message.kind is FORWARD else "block backward"
        self.sent[exchange.name] = exchange
        terms = self._kernels.terms(part, self._share, precision=self._work.precision)
        names = (f": {SCORES}", f": {SOFTMAX}", f": {VALUES}")
        attention_s = sum(term.seconds for term in terms if any(name in term.name for name in names))
        hidden_s = message.beside * attention_s * self.beside_compute
        seconds = message.count * max(0.0, exchange.seconds(self._hardware) - hidden_s)
        text = f"{message.count} x {exchange.formula(self._hardware)}, less {hidden_s:.4g} s of attention"
        return self._terms.add(exchange.name, seconds, text)

    @property
    def gathers_blocks(self) -> bool:
        """Whether each block's weights are gathered for each microbatch."""
        return self._work.shard > 1 and self._work.pipeline == 1

    def _sliced_s(self, of: str, weights: float, *, gathers: bool, blocks: float) -> float:
        """The gather of weights, or the sum of their gradients, over the axis `shard`.

        blocks: of how many blocks the experts are sent too, if an expert axis splits them.
        """
        work, group = self._work, self._group(self._work.shard, stride=self._work.tensor)
        what, operation = f"gradients of {of}", "reduce_scatter"
        number_bytes = work.number_bytes if gathers else work.gradient_bytes
        if gathers:
            what, operation = f"weights of {of}", "all_gather"
        exchange = GroupExchange(what, operation, number_bytes * weights / work.tensor, group)
        seconds = self._exchange_s(exchange, self._loads.all)
        if work.expert == 1:
            return seconds
        size = number_bytes * blocks * work.held_experts / work.tensor
        group = self._group(work.expert_slices, stride=work.tensor * work.expert)
        experts = GroupExchange(f"{what}, experts", operation, size, group)
        return seconds + self._exchange_s(experts, self._loads.all)

    @cached_property
    def gather_s(self) -> float:
        return self._sliced_s("a block", self._work.sliced_weights, gathers=True, blocks=1)

    @cached_property
    def scatter_s(self) -> float:
        return self._sliced_s("a block", self._work.sliced_weights, gathers=False, blocks=1)

    @cached_property
    def stage_to_stage_s(self) -> dict[int, float]:
        """Seconds from each stage to the next one, and back.

        With `sequence_parallel`, each device sends its part of the sequence, and the next stage begins with
        this part. Without `sequence_parallel`, each device sends the whole sequence. Megatron sends parts and
        gathers them (Narayanan et al. 2021).
        """
        work, share, devices = self._work, self._share, self._hardware.node.devices
        stride = work.tensor * work.alike
        hidden_bytes = work.stream_bytes * share.tokens * share.decoder.dim
        size = hidden_bytes / share.tensor if work.blocking or work.sequence_parallel else hidden_bytes
        owner = {stage: rank for rank in range(work.pipeline) for stage in self._ranks.stages_of(rank)}
        seconds: dict[int, float] = {}
        for stage in range(self._last):
            source, target = owner[stage] * stride // devices, owner[stage + 1] * stride // devices
            if owner[stage] == owner[stage + 1]:
                continue
            senders = min(stride, devices)
            seconds[stage] = send_s(size, self._hardware, crosses=source != target, senders=senders)
            if work.blocking and share.tensor > 1:
                whole = self._group(share.tensor, stride=1)
                seconds[stage] += hidden_bytes / bus_bytes_per_s(whole, self._hardware)
            text = f"{size:.4g} B, {senders} senders a node"
            self._terms.add(f"send from stage {stage}", seconds[stage], text)
        return seconds

    def gradients_s(self, *, backward_s: float) -> float:
        """The wait for gradients: means over replicas, slices, and the weight that both ends share.

        backward_s: the time of the first stage's backward pass, which hides a part of the messages.
        """
        work = self._work
        averaged = max(map(work.averaged_weights, work.stages_of_ranks)) / work.tensor
        size = work.gradient_bytes * averaged / work.shard
        if work.workers:
            return self._served_s(size)
        mean, seconds = self._mean(averaged), self._sent_s(averaged)
        if work.expert > 1:
            seconds += self._mean_of_experts_s
        if work.bucket_bytes is not None and seconds > 0 and (work.bucket_bytes > 0 or self.beside_compute):
            copying_s = 0.0 if self.beside_compute else mean.copying_s(self._loads.all)  # by a CPU
            share = min(1.0, work.bucket_bytes / size)  # of all gradients, in one message
            sent = f"{seconds:.6g} s in messages of {100 * share:.3g} %"
            text = f"{sent}, beside {backward_s:.6g} s of computation"
            left_s = max(copying_s, left_after(backward_s, seconds, share=share))
            seconds = self._terms.add("exposed gradients", left_s, text)
        if work.decoder.tied and self._last not in self._ranks.stages_of(0):
            ends = self._group(2, stride=work.tensor * work.alike * (work.pipeline - 1))
            size = work.gradient_bytes * work.decoder.end_weights / work.tensor / work.shard
            both = GroupExchange("gradient of the shared weight", "all_reduce", size, ends)
            seconds += self._exchange_s(both, self._loads.all)
        if work.loads:
            size = COUNT_BYTES * self._most_blocks * work.decoder.experts
            every = self._group(work.alike, stride=work.tensor)
            seconds += self._exchange_s(GroupExchange("loads of experts", "all_reduce", size, every))
        return seconds

    def least_sent_s(self) -> float:
        """The least time of the messages with a device's gradients and gathered weights, hidden or not."""
        work = self._work
        whole = work.decoder.stage_weights(sum(work.blocks), first=True, last=True)
        return self._sent_s(whole / work.pipeline / work.tensor)

    def _sent_s(self, weights: float) -> float:
        """The time of the means over replicas and of the exchanged slices, for a device's `weights`."""
        seconds = self._exchange_s(self._mean(weights), self._loads.all)
        return seconds + self._slices_s(weights) if self._work.shard > 1 else seconds

    def _mean(self, weights: float) -> GroupExchange:
        work = self._work
        number_bytes = COMPRESSED_BYTES if work.compressed else work.gradient_bytes
        replicas = self._group(work.alike // work.shard, stride=work.tensor * work.shard)
        return GroupExchange("mean of gradients", "all_reduce", number_bytes * weights / work.shard, replicas)

    @property
    def _most_blocks(self) -> int:
        work = self._work
        return max(sum(work.blocks[stage] for stage in stages) for stages in work.stages_of_ranks)

    @property
    def _mean_of_experts_s(self) -> float:
        """The mean of the experts' gradients over the devices that hold the same experts."""
        work = self._work
        over = work.expert * work.expert_slices
        group = self._group(work.alike // over, stride=work.tensor * over)
        held = work.held_experts / work.tensor / work.expert_slices
        size = work.gradient_bytes * self._most_blocks * held
        mean = GroupExchange("mean of the experts' gradients", "all_reduce", size, group)
        return self._exchange_s(mean, self._loads.all)

    def _served_s(self, size: float) -> float:
        """The time to send gradients to a parameter server and, after its update, to send weights back.

        Every worker joins its gradients. The server receives them in turn, adds them, and divides. It joins
        the weights and sends them to each worker in turn. size: the bytes of all gradients.
        """
        work = self._work
        messages = math.ceil(size / work.bucket_bytes) if work.bucket_bytes else 1
        added = work.workers if work.workers < work.data else work.workers - 1  # the first starts the sum
        serving = Serving(work.workers, size, messages, self._loads.alone)
        terms = (
            serving.term("gradients to the server", JOINED + ADDED * added + DIVIDED),
            serving.term("weights from the server", 2 * JOINED),  # the last worker copies them
        )
        return sum(self._terms.add(term.name, term.seconds, term.formula) for term in terms)

    def _slices_s(self, weights: float) -> float:
        """Gathers and sums over `shard`: of a whole stage once a step, or of the ends for each microbatch."""
        ends = self._work.microbatches * self._work.decoder.stage_weights(0, first=True, last=True)
        weights = ends if self.gathers_blocks else weights * self._work.tensor
        blocks = 0 if self.gathers_blocks else self._most_blocks
        gather_s = self._sliced_s("a step", weights, gathers=True, blocks=blocks)
        return gather_s + self._sliced_s("a step", weights, gathers=False, blocks=blocks)


def left_after(computed_s: float, sent_s: float, *, share: float) -> float:
    """Seconds from the end of a computation to the end of its messages, which it makes at an even rate.

    A message starts when all of its bytes are computed and the message before it has arrived. share: the
    share of all bytes in each message but the last one; 0: each byte is sent immediately.
    """
    if share == 0:
        return max(0.0, sent_s - computed_s)
    full = math.ceil(1 / share) - 1
    if full == 0:
        return sent_s
    made_s, message_s = share * computed_s, share * sent_s
    end_s = max(made_s + full * message_s, full * made_s + message_s)
    return max(0.0, end_s - computed_s) + sent_s - full * message_s


@dataclass(frozen=True)
class Serving:
    """The exchange of a step between a parameter server, rank 0, and the `workers` ranks after it.

    strategies/parameter_server.py sends flat messages one after the other, so no two workers send at the same
    time, and no device computes meanwhile.
    bytes: the bytes of all gradients, which equal the bytes of all weights. They are sent in `messages`
    messages.
    """

    workers: int
    bytes: float
    messages: int
    hardware: Hardware

    def term(self, name: str, moved: int) -> Term:
        """moved: the reads and writes of each byte. Nothing is sent at the same time."""
        hardware = self.hardware
        inside = min(self.workers, hardware.node.devices - 1)
        size = self.bytes / self.messages
        counts = {False: inside, True: self.workers - inside}
        sent_s = self.messages * sum(
            count * send_s(size, hardware, crosses=crosses, senders=1) for crosses, count in counts.items()
        )
        copied_s = moved * self.bytes / (hardware.device.memory_bytes_per_s * hardware.traffic.share)
        text = (
            f"{self.messages} messages of {size:.4g} B in turn, {inside} workers on the server's node and "
            f"{counts[True]} on others: {sent_s:.4g} s + {moved} x {self.bytes:.4g} B / memory bandwidth"
        )
        return Term(name, sent_s + copied_s, text)


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
    """The attention of one device's part of each sequence; the other parts are on the ranks of `group`.

    As strategies/context/ring.py and all_to_all_attention.py send it.
    """

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
        return 2 * self.share.tokens * decoder.kv_dim / self.share.tensor

    def _ring(self) -> Iterator[Message]:
        """Each hop overlaps the attention to the last keys and values, except the gradients' last hop."""
        sent = self._kv * self.share.number_bytes
        summed = self._kv * precise_bytes(self.share.number_bytes)
        hops, beside = self.group.ranks - 1, 1 / self.group.ranks
        forward = self._at_once(FORWARD, "keys and values", "send_recv", sent)
        backward = self._at_once(BACKWARD, "keys, values and gradients", "send_recv", sent + summed)
        yield from (replace(message, count=hops, beside=beside) for message in (forward, backward))
        yield self._at_once(BACKWARD, "last gradients of keys and values", "send_recv", summed)

    def _gather(self) -> Iterator[Message]:
        """Under the mask of packed documents, autograd keeps all keys and values, and sums in their type."""
        every, number_bytes = self._kv * self.group.ranks, self.share.number_bytes
        masked = self.share.decoder.masked
        yield self._at_once(FORWARD, "keys and values", "all_gather", every * number_bytes)
        if not masked:
            yield self._at_once(BACKWARD, "keys and values again", "all_gather", every * number_bytes)
        summed = every * (number_bytes if masked else precise_bytes(number_bytes))
        yield self._at_once(BACKWARD, "gradients of keys and values", "reduce_scatter", summed)

    def _all_to_all(self) -> Iterator[Message]:
        """A key-value head that serves several devices is sent to each."""
        decoder, tensor = self.share.decoder, self.share.tensor
        copies = max(1, self.group.ranks // (decoder.kv_heads // tensor))
        queries = self.share.tokens * decoder.query_dim / tensor
        for kind, of in ((FORWARD, ""), (BACKWARD, "gradients of ")):
            sent = queries + copies * self._kv
            for what, numbers in (("queries, keys and values", sent), ("outputs", queries)):
                size = numbers * self.share.number_bytes
                yield self._at_once(kind, f"{of}{what}", "all_to_all", size)

    def _at_once(self, kind: ActionKind, name: str, operation: str, size_bytes: float) -> Message:
        return Message(GroupExchange(f"context: {name}", operation, size_bytes, self.group), kind)
