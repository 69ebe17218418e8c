"""The time of one training step of a decoder: compute, collectives, pipeline and update."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from hpc_parallel.config.schedules import SCHEDULES
from hpc_parallel.planning.decoder import Decoder, Share
from hpc_parallel.planning.float8_rounding import Rounding
from hpc_parallel.planning.group_times import Exchange, Group, bus_bytes_per_s, send_s
from hpc_parallel.planning.hardware import Hardware
from hpc_parallel.planning.kernels import Kernels, Term
from hpc_parallel.planning.operations import FLOAT32_BYTES, NUMBER_BYTES, precise_bytes
from hpc_parallel.planning.pipeline_orders import BACKWARD, FORWARD, WEIGHTS, Kind, Pipeline
from hpc_parallel.planning.pipeline_times import Span, Timeline, simulate
from hpc_parallel.planning.server_times import Serving
from hpc_parallel.planning.shared_cores import contended, pipelines_at_once
from hpc_parallel.planning.split_attention import Message, SplitAttention, attention_s

COUNT_BYTES = 8  # of the number of an expert's tokens
COMPRESSED_BYTES = 2  # of a number in bfloat16
CPU = "cpu"  # the kind of a device


@dataclass(frozen=True)
class Work:
    """One step.

    data: all parts of the batch. context: all parts of a sequence, which exchange keys and values by
    `attention`. `shard` of the devices in a row that hold the same weights slice them (ZeRO-3). recompute:
    blocks run forward again in the backward pass. blocking: a stage waits until what it sends has arrived.
    bucket_bytes: gradients are averaged in such messages beside the backward pass of the last microbatch;
    None: after it. blocks: the number in each stage. stream_bytes: of a number that one stage sends to the
    next. gradient_bytes: of a number of the gradients that devices exchange. compressed: but their means
    are of bfloat16. rounding: of the blocks' linear products in float8. workers: that send gradients to a
    parameter server, which is one more device, or the first of `data`; 0 without one. expert: the devices in
    a row that split the experts, and have a part of the batch each. compiled: by torch.compile, blocks and
    loss.
    """

    decoder: Decoder
    tensor: int
    data: int
    pipeline: int
    microbatch_size: int
    microbatches: int
    blocks: tuple[int, ...]
    precision: str = "float16"
    schedule: str = "1f1b"
    per_rank: int = 1
    recompute: bool = True
    blocking: bool = True
    shard: int = 1
    stream_bytes: int = 2
    gradient_bytes: int = 2
    bucket_bytes: float | None = None
    context: int = 1
    attention: str = "ring"
    compressed: bool = False
    rounding: Rounding | None = None
    sequence_parallel: bool = True
    workers: int = 0
    expert: int = 1
    compiled: bool = False

    @property
    def repeated_sums(self) -> float:
        """How many of a block's two sums over the tensor axis recomputation repeats.

        torch stops at the last number that it needs, before it sums the block's result: with
        `sequence_parallel` it has gathered the parts of the sequence by then. Megatron repeats all.
        """
        if not self.recompute:
            return 0.0
        return 2.0 if self.blocking else 1.5 if self.sequence_parallel else 1.0

    @property
    def alike(self) -> int:
        """The devices that hold the same weights, or slices of them."""
        return self.data * self.context

    @property
    def computing(self) -> int:
        """The devices with a part of the batch."""
        return self.tensor * self.alike * self.pipeline

    @property
    def devices(self) -> int:
        """Those and a server that only serves."""
        return self.computing + (self.workers == self.data)

    @property
    def number_bytes(self) -> int:
        """Of inputs of matrix products, and of weights that are gathered."""
        return NUMBER_BYTES[self.precision]

    @property
    def samples(self) -> int:
        """The samples of one step."""
        return self.data * self.microbatches * self.microbatch_size


@dataclass(frozen=True)
class StepTime:
    """The parts of a step's time. exposed_s: communication beside which a device does not compute."""

    timeline: Timeline
    gradients_s: float
    update_s: float
    exposed_s: float
    terms: tuple[Term, ...] = field(repr=False)

    @property
    def total_s(self) -> float:
        return self.timeline.total_s + self.gradients_s + self.update_s


def step_time(work: Work, hardware: Hardware) -> StepTime:
    """Raises KeyError if the data sheet has no peak for the precision."""
    return Step(work, hardware).result()


class Step:
    """The terms of a step, collected while they are computed.

    kernels: those of other steps on the same hardware, whose times need not be computed again.
    """

    def __init__(self, work: Work, hardware: Hardware, kernels: Kernels | None = None) -> None:
        self.work, self._alone = work, hardware
        self._all_busy = contended(hardware, devices=work.computing)
        # A stage of a pipeline computes beside as many others as the simulation shows.
        ranks = work.tensor * work.alike
        self.hardware = contended(hardware, devices=ranks) if work.pipeline > 1 else self._all_busy
        self._at_once = pipelines_at_once(hardware, devices=ranks)
        shared = self.hardware is not hardware
        self._kernels = Kernels(self.hardware) if shared or kernels is None else kernels
        traffic = hardware.traffic.of_compiled() if work.compiled else hardware.traffic
        self.share = Share(
            work.decoder, work.microbatch_size, work.tensor, traffic, work.number_bytes,
            work.context, work.rounding, work.expert,
        )  # fmt: skip
        self.sent: dict[str, Exchange] = {}  # so far, by name
        self._terms: list[Term] = []
        self._pipeline = Pipeline(work.schedule, work.pipeline, work.microbatches, work.per_rank)
        self._last = self._pipeline.stages - 1
        self._stages_s: dict[tuple[Kind, int], float] = {}
        self._alike_s: dict[tuple[Kind, int, bool, bool], float] = {}
        self._unhidden_s: dict[Kind, float] = {}  # gathers of a block that its computation does not hide

    def _simulated(self, spans: list[Span] | None = None) -> Timeline:
        transfers = {} if self.work.blocking else self._transfers
        return simulate(
            self._pipeline,
            action_s=self._action_s,
            transfer_s=lambda source, target: transfers.get(min(source, target), 0.0),
            at_once=self._at_once,
            spans=spans,
        )

    def spans(self) -> list[Span]:
        """Every action of the pipeline's ranks; of one rank without a pipeline."""
        spans: list[Span] = []
        self._simulated(spans)
        return [span for span in spans if span.end_s > span.start_s]

    def result(self) -> StepTime:
        work, timeline = self.work, self._simulated()
        self._add_stages()
        text = f"{work.schedule}, {work.pipeline} ranks, {work.microbatches} microbatches, simulated"
        self._add("all microbatches", timeline.total_s, text)
        gradients_s, update_s = self._gradients_s, self._update_s
        blocks = work.decoder.layers / work.pipeline * work.microbatches
        waits = (*self._unhidden_s.values(), *self._waits_for_context_s, *self._waits_for_experts_s)
        exposed_s = gradients_s + blocks * ((4 + work.repeated_sums) * self._tensor_sum_s + sum(waits))
        return StepTime(timeline, gradients_s, update_s, exposed_s, tuple(self._terms))

    def microbatch_s(self) -> float:
        """Of one microbatch in all stages, one after the other."""
        return sum(self._action_s(kind, stage) for kind in Kind for stage in range(self._last + 1))

    def block_s(self, kind: Kind) -> float:
        """The least time that a block adds to a stage."""
        device_s, host_s = self._block_s[kind]
        return self._together_s(device_s, host_s) * self._slowest

    def least_s(self) -> float:
        """A lower bound of the step's time, which needs no simulation.

        From the first forward pass of a stage on, its rank computes it and its later stages for all
        microbatches; the last gradient then goes back through the stages before it. Gradients of weights
        alone may be computed meanwhile.
        """
        stages, links_s = range(self._last + 1), {} if self.work.blocking else self._transfers
        forward_s = [self._action_s(FORWARD, at) for at in stages]
        backward_s = [self._action_s(BACKWARD, at) for at in stages]
        weights_s = [self._action_s(WEIGHTS, at) for at in stages]
        arrives_s = [0.0, *accumulate(forward_s[at] + links_s.get(at, 0.0) for at in stages)]
        returns_s = [0.0, *accumulate(backward_s[at] + links_s.get(at, 0.0) for at in stages)]
        count, whole_s = self.work.microbatches, 0.0
        for own in map(self._pipeline.stages_of, range(self.work.pipeline)):
            chain_s = all_s = 0.0
            for stage in reversed(own):
                chain_s += count * (forward_s[stage] + backward_s[stage])
                all_s += count * (forward_s[stage] + backward_s[stage] + weights_s[stage])
                whole_s = max(whole_s, arrives_s[stage] + max(all_s, chain_s + returns_s[stage]))
        return whole_s + self._gradients_s + self._update_s

    def _add(self, name: str, seconds: float, formula: str) -> float:
        self._terms.append(Term(name, seconds, formula))
        return seconds

    def _sum_s(self, part: str) -> float:
        terms = self._kernels.terms(part, self.share, precision=self.work.precision)
        self._terms += terms
        return sum(term.seconds for term in terms)

    @property
    def _on_cpu(self) -> bool:
        """A CPU has no queue of launches, and torch no streams there: what a device does comes in turn."""
        return self.hardware.device.kind == CPU

    def _together_s(self, device_s: float, host_s: float) -> float:
        """Computation and its launches, which a GPU overlaps unless the host reads the sizes of messages."""
        if self._on_cpu or self.work.expert > 1:
            return device_s + host_s
        return _overlapped(device_s, host_s, sharpness=self.hardware.host.sharpness)

    def _exchange_s(self, exchange: Exchange, hardware: Hardware | None = None) -> float:
        """hardware: where other devices are busy than in an action."""
        hardware = hardware or self.hardware
        seconds = exchange.seconds(hardware)
        self.sent[exchange.name] = exchange
        return self._add(exchange.name, seconds, exchange.formula(hardware)) if seconds else 0.0

    def _group(self, ranks: int, *, stride: int) -> Group:
        return Group(ranks, stride, self.hardware.node.devices)

    @cached_property
    def _tensor_sum_s(self) -> float:
        """The parts of a sum go to the devices that keep them, which gather them again: an all-reduce."""
        group, size = self._group(self.work.tensor, stride=1), self.share.activation_bytes
        if not self.hardware.ring_factors:
            return self._exchange_s(Exchange("sum over the tensor axis", "all_reduce", size, group))
        gather = Exchange("gather over the tensor axis", "all_gather", size, group)
        scatter = Exchange("parts of a sum over the tensor axis", "reduce_scatter", size, group)
        return self._exchange_s(gather) + self._exchange_s(scatter)

    @cached_property
    def _block_s(self) -> dict[Kind, tuple[float, float]]:
        """Seconds of the device and of the host for one block, forward and backward."""
        host, share = self.hardware.host, self.share
        sums_s = 2 * self._tensor_sum_s
        forward_s = self._sum_s("block forward") + sums_s
        backward_s = self._sum_s("block backward") + sums_s
        split, unfused_s = self.work.tensor > 1, share.unfused * host.unfused_s
        gathers = self._gathers  # forward; again, with a sum of gradients, backward
        host_forward_s = host.forward_s + (2 * split + gathers) * host.collective_s + unfused_s
        host_backward_s = host.backward_s + (4 * split + 2 * gathers) * host.collective_s + 2 * unfused_s
        if self.work.context > 1:
            forward_s += self._context_s[FORWARD]
            backward_s += self._context_s[BACKWARD]
        if self.work.expert > 1:
            forward_s += self._experts_s
            backward_s += self._experts_s - self._counts_s
        if self.work.recompute:
            backward_s += forward_s - (2 - self.work.repeated_sums) * self._tensor_sum_s
        if self._gathers:
            waits = {
                FORWARD: self._gather_s - forward_s * self._beside,
                BACKWARD: self._gather_s + self._scatter_s - backward_s * self._beside,
            }
            self._unhidden_s = {kind: max(0.0, wait) for kind, wait in waits.items()}
            forward_s += self._unhidden_s[FORWARD]
            backward_s += self._unhidden_s[BACKWARD]
        return {FORWARD: (forward_s, host_forward_s), BACKWARD: (backward_s, host_backward_s)}

    @property
    def _beside(self) -> bool:
        """Whether a device communicates beside its computation: on a CPU it waits."""
        return not self._on_cpu

    @cached_property
    def _context_s(self) -> dict[Kind, float]:
        """What a block waits for the other parts of its sequences, forward and backward."""
        attention = SplitAttention(self.share, self._group(self.work.context, stride=self.work.tensor))
        return {
            kind: sum(map(self._exposed_s, attention.messages(kind, self.work.attention)))
            for kind in (FORWARD, BACKWARD)
        }

    @property
    def _waits_for_context_s(self) -> tuple[float, ...]:
        """Those of a block and microbatch."""
        if self.work.context == 1:
            return ()
        forward_s, backward_s = self._context_s[FORWARD], self._context_s[BACKWARD]
        return (*(forward_s,) * (1 + self.work.recompute), backward_s)

    @cached_property
    def _experts_s(self) -> float:
        """A block sends each token to its experts and their outputs back; the backward pass the gradients.

        The router is taken to use all experts alike. Nothing is computed meanwhile.
        """
        group, share = self._group(self.work.expert, stride=1), self.share
        size = share.activation_bytes * share.decoder.per_token
        sent_s = self._exchange_s(Exchange("tokens to experts", "all_to_all", size, group))
        return (
            self._counts_s
            + sent_s
            + self._exchange_s(Exchange("outputs of experts", "all_to_all", size, group))
        )

    @cached_property
    def _counts_s(self) -> float:
        """Before that, the numbers of tokens."""
        group = self._group(self.work.expert, stride=1)
        size = COUNT_BYTES * self.work.decoder.experts
        return self._exchange_s(Exchange("numbers of tokens", "all_to_all", size, group))

    @property
    def _waits_for_experts_s(self) -> tuple[float, ...]:
        """Those of a block and microbatch."""
        if self.work.expert == 1:
            return ()
        return (*(self._experts_s,) * (1 + self.work.recompute), self._experts_s - self._counts_s)

    def _exposed_s(self, message: Message) -> float:
        """Of the messages beside which the attention of a block computes, what is left."""
        exchange, part = message.exchange, "block forward" if message.kind is FORWARD else "block backward"
        self.sent[exchange.name] = exchange
        terms = self._kernels.terms(part, self.share, precision=self.work.precision)
        hidden_s = message.beside * attention_s(terms) * self._beside
        seconds = message.count * max(0.0, exchange.seconds(self.hardware) - hidden_s)
        text = f"{message.count} x {exchange.formula(self.hardware)}, less {hidden_s:.4g} s of attention"
        return self._add(exchange.name, seconds, text)

    @property
    def _gathers(self) -> bool:
        """Whether each block's weights are gathered for each microbatch."""
        return self.work.shard > 1 and self.work.pipeline == 1

    def _sliced_s(self, name: str, operation: str, weights: float, *, number_bytes: int) -> float:
        group = self._group(self.work.shard, stride=self.work.tensor)
        exchange = Exchange(name, operation, number_bytes * weights / self.work.tensor, group)
        return self._exchange_s(exchange, self._all_busy)

    @cached_property
    def _gather_s(self) -> float:
        weights = self.work.decoder.block_weights
        return self._sliced_s(
            "weights of a block", "all_gather", weights, number_bytes=self.work.number_bytes
        )

    @cached_property
    def _scatter_s(self) -> float:
        weights, size = self.work.decoder.block_weights, self.work.gradient_bytes
        return self._sliced_s("gradients of a block", "reduce_scatter", weights, number_bytes=size)

    @cached_property
    def _ends_s(self) -> dict[tuple[Kind, str], float]:
        """Seconds of the device for the embedding and the head."""
        return {
            (FORWARD, "first"): self._sum_s("embedding") + self._tensor_sum_s,
            (BACKWARD, "first"): self._sum_s("embedding backward"),
            (FORWARD, "last"): self._sum_s("head"),
            (BACKWARD, "last"): self._sum_s("head backward") + self._tensor_sum_s,
        }

    def _action_s(self, kind: Kind, stage: int) -> float:
        """The time of a stage: the host launches its operations in order, the device runs them in order."""
        if not SCHEDULES[self.work.schedule].splits_backward:
            return 0.0 if kind is WEIGHTS else self._whole_s(kind, stage)
        if kind is FORWARD:
            return self._whole_s(kind, stage)
        # The gradients of inputs and of weights cost about the same.
        return self._whole_s(BACKWARD, stage) / 2

    def _whole_s(self, kind: Kind, stage: int) -> float:
        if (kind, stage) not in self._stages_s:
            self._stages_s[kind, stage] = self._waited_s(kind, stage, self._compute_s(kind, stage))
        return self._stages_s[kind, stage]

    def _compute_s(self, kind: Kind, stage: int) -> float:
        """Stages between the ends with as many blocks take the same time."""
        alike = (kind, self.work.blocks[stage], stage == 0, stage == self._last)
        if alike not in self._alike_s:
            self._alike_s[alike] = self._blocks_and_ends_s(kind, stage)
        return self._alike_s[alike]

    def _blocks_and_ends_s(self, kind: Kind, stage: int) -> float:
        host, layers = self.hardware.host, self.work.blocks[stage]
        ends = [name for name, at in (("first", 0), ("last", self._last)) if stage == at]
        if self._on_cpu:
            ends_s = sum(self._ends_s[kind, name] + host.microbatch_s for name in ends)
            return ends_s + layers * sum(self._block_s[kind])
        before = "first" if kind is FORWARD else "last"
        device_s = host_s = 0.0
        if before in ends:
            host_s += host.microbatch_s
            device_s = max(self._ends_s[kind, before], host_s)
        block_device_s, block_host_s = self._block_s[kind]
        host_s += layers * block_host_s
        device_s = self._together_s(device_s + layers * block_device_s, host_s)
        after = [name for name in ends if name != before]
        if after:
            host_s += host.microbatch_s
            device_s = max(device_s + self._ends_s[kind, after[0]], host_s)
        return device_s

    def _waited_s(self, kind: Kind, stage: int, compute_s: float) -> float:
        """With what an action of a pipeline waits for, and the delay of the slowest node."""
        seconds = compute_s
        if self.work.pipeline > 1:
            seconds += self.hardware.host.action_s
            if self.work.blocking:
                target = stage + 1 if kind is FORWARD else stage - 1
                seconds += self._transfers.get(min(stage, target), 0.0) if 0 <= target <= self._last else 0.0
        return seconds * self._slowest

    @property
    def _nodes(self) -> float:
        return max(1.0, self.work.devices / self.hardware.node.devices)

    @cached_property
    def _slowest(self) -> float:
        """The time of the slowest node, as a multiple of the mean."""
        return 1 + self.hardware.network.spread * math.sqrt(2 * math.log(self._nodes))

    def _add_stages(self) -> None:
        """The terms of all actions so far."""
        for (kind, stage), seconds in self._stages_s.items():
            inputs = f"blocks and ends {self._compute_s(kind, stage):.6g} s, pipeline"
            text = f"{inputs}, slowest of {self._nodes:g} nodes"
            self._add(f"stage {stage} {kind.name.lower()}", seconds, text)

    @cached_property
    def _transfers(self) -> dict[int, float]:
        """Seconds from each stage to the next one, and back.

        With `sequence_parallel` each device sends its part of the sequence, and the next stage begins with
        it. Without it each sends all. Megatron sends parts and gathers them (Narayanan et al. 2021).
        """
        work, share, devices = self.work, self.share, self.hardware.node.devices
        stride = work.tensor * work.alike
        hidden_bytes = work.stream_bytes * share.tokens * share.decoder.dim
        size = hidden_bytes / share.tensor if work.blocking or work.sequence_parallel else hidden_bytes
        owner = {stage: rank for rank in range(work.pipeline) for stage in self._pipeline.stages_of(rank)}
        seconds: dict[int, float] = {}
        for stage in range(self._last):
            source, target = owner[stage] * stride // devices, owner[stage + 1] * stride // devices
            if owner[stage] == owner[stage + 1]:
                continue
            senders = min(stride, devices)
            seconds[stage] = send_s(size, self.hardware, crosses=source != target, senders=senders)
            if work.blocking and share.tensor > 1:
                whole = self._group(share.tensor, stride=1)
                seconds[stage] += hidden_bytes / bus_bytes_per_s(whole, self.hardware)
            self._add(f"send from stage {stage}", seconds[stage], f"{size:.4g} B, {senders} senders a node")
        return seconds

    @property
    def _weights(self) -> float:
        """Those of the device that has most: its part of its stages' blocks, embedding and head."""
        return max(map(self.rank_weights, self._stages_of_ranks)) / self.work.tensor

    @property
    def _stages_of_ranks(self) -> list[list[int]]:
        return [self._pipeline.stages_of(rank) for rank in range(self.work.pipeline)]

    def rank_weights(self, stages: list[int]) -> float:
        """Those of all devices of a pipeline rank; of experts that are split, one device's."""
        return self._weights_with(self.work.decoder.experts / self.work.expert, stages)

    def averaged_weights(self, stages: list[int]) -> float:
        """Those whose gradients all replicas average: without experts that are split."""
        return self._weights_with(None if self.work.expert == 1 else 0, stages)

    def _weights_with(self, experts: float | None, stages: list[int]) -> float:
        first, last = 0 in stages, self._last in stages
        blocks = sum(self.work.blocks[stage] for stage in stages)
        return self.work.decoder.stage_weights(blocks, first=first, last=last, experts=experts)

    @cached_property
    def _gradients_s(self) -> float:
        """What the device waits for: means over replicas, slices, and the weight that both ends share."""
        work = self.work
        averaged = max(map(self.averaged_weights, self._stages_of_ranks)) / work.tensor
        size = work.gradient_bytes * averaged / work.shard
        if work.workers:
            return self._served_s(size)
        mean, seconds = self._mean(averaged), self._sent_s(averaged)
        if work.expert > 1:
            seconds += self._mean_of_experts_s
        if work.bucket_bytes is not None and seconds > 0 and (work.bucket_bytes > 0 or self._beside):
            copying_s = mean.copying_s(self._all_busy) if self._on_cpu else 0.0
            share = min(1.0, work.bucket_bytes / size)
            seconds = self._beside_backward_s(seconds, share=share, least_s=copying_s)
        if work.decoder.tied and self._last not in self._pipeline.stages_of(0):
            ends = self._group(2, stride=work.tensor * work.alike * (work.pipeline - 1))
            size = work.gradient_bytes * work.decoder.end_weights / work.tensor / work.shard
            both = Exchange("gradient of the shared weight", "all_reduce", size, ends)
            seconds += self._exchange_s(both, self._all_busy)
        return seconds

    def least_sent_s(self) -> float:
        """At least, for the gradients of a device and the gathers of its weights, hidden or not."""
        work = self.work
        whole = work.decoder.stage_weights(sum(work.blocks), first=True, last=True)
        return self._sent_s(whole / work.pipeline / work.tensor)

    def _sent_s(self, weights: float) -> float:
        """Means over replicas and slices of a device's `weights`."""
        seconds = self._exchange_s(self._mean(weights), self._all_busy)
        return seconds + self._slices_s(weights) if self.work.shard > 1 else seconds

    def _mean(self, weights: float) -> Exchange:
        work = self.work
        number_bytes = COMPRESSED_BYTES if work.compressed else work.gradient_bytes
        replicas = self._group(work.alike // work.shard, stride=work.tensor * work.shard)
        return Exchange("mean of gradients", "all_reduce", number_bytes * weights / work.shard, replicas)

    @property
    def _mean_of_experts_s(self) -> float:
        """Over the devices that hold the same ones."""
        work = self.work
        blocks = max(sum(work.blocks[stage] for stage in stages) for stages in self._stages_of_ranks)
        held = work.decoder.expert_weights * work.decoder.experts / work.expert
        group = self._group(work.alike // work.expert, stride=work.expert)
        size = work.gradient_bytes * blocks * held
        mean = Exchange("mean of the experts' gradients", "all_reduce", size, group)
        return self._exchange_s(mean, self._all_busy)

    def _served_s(self, size: float) -> float:
        """To a parameter server and, after its update, back. size: the bytes of all gradients."""
        work = self.work
        messages = math.ceil(size / work.bucket_bytes) if work.bucket_bytes else 1
        serving = Serving(work.workers, work.workers < work.data, size, messages)
        terms = serving.collect(self._alone), serving.hand_out(self._alone)
        return sum(self._add(term.name, term.seconds, term.formula) for term in terms)

    def _slices_s(self, weights: float) -> float:
        """Gathers and sums over `shard`: of a stage once, or for each microbatch outside of the blocks."""
        ends = self.work.microbatches * self.work.decoder.stage_weights(0, first=True, last=True)
        weights = ends if self._gathers else weights * self.work.tensor
        size = self.work.gradient_bytes
        gather = self._sliced_s(
            "weights of a step", "all_gather", weights, number_bytes=self.work.number_bytes
        )
        return gather + self._sliced_s("gradients of a step", "reduce_scatter", weights, number_bytes=size)

    def _beside_backward_s(self, seconds: float, *, share: float, least_s: float) -> float:
        """What is left after the last backward pass.

        share: of all gradients in one message. least_s: what a processor copies.
        """
        hidden_s = self._whole_s(BACKWARD, 0)
        left_s = max(least_s, left_after(hidden_s, seconds, share=share))
        text = f"{seconds:.6g} s in messages of {100 * share:.3g} %, beside {hidden_s:.6g} s of computation"
        return self._add("exposed gradients", left_s, text)

    @cached_property
    def _update_s(self) -> float:
        busy = self._alone if self.work.workers else self._all_busy  # a server updates alone
        traffic, device = busy.traffic, busy.device
        wider = precise_bytes(self.work.number_bytes) / FLOAT32_BYTES
        moved = wider * traffic.optimizer_bytes * self._weights / self.work.shard
        seconds = moved / (device.memory_bytes_per_s * traffic.share) + busy.host.step_s
        return self._add("update", seconds, f"{moved:.4g} B / memory bandwidth + launches of a step")


def left_after(computed_s: float, sent_s: float, *, share: float) -> float:
    """Seconds from the end of a computation to that of the messages that it makes evenly.

    A message starts when all of it is computed and the one before has arrived. share: of all bytes, in each
    but the last one; 0: each byte is sent at once.
    """
    if share == 0:
        return max(0.0, sent_s - computed_s)
    full = math.ceil(1 / share) - 1
    if full == 0:
        return sent_s
    made_s, message_s = share * computed_s, share * sent_s
    end_s = max(made_s + full * message_s, full * made_s + message_s)
    return max(0.0, end_s - computed_s) + sent_s - full * message_s


def _overlapped(device_s: float, host_s: float, *, sharpness: float) -> float:
    """(device^p + host^p)^(1/p), without an overflow."""
    longer, shorter = max(device_s, host_s), min(device_s, host_s)
    overlapped: float = longer * (1 + (shorter / longer) ** sharpness) ** (1 / sharpness)
    return overlapped
