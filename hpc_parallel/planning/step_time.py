"""The time of one training step of a decoder: compute, collectives, pipeline and update."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from hpc_parallel.layout.schedules import schedule_named
from hpc_parallel.planning.decoder import Kernels, Share, Term, Terms
from hpc_parallel.planning.exchange_times import ExchangeTimes
from hpc_parallel.planning.hardware import Hardware, Loads, contended, pipelines_at_once
from hpc_parallel.planning.operations import FLOAT32_BYTES, precise_bytes
from hpc_parallel.planning.pipeline_orders import (
    BACKWARD,
    FORWARD,
    WEIGHTS,
    ActionKind,
    PlannedTimeline,
    Span,
    simulate,
)
from hpc_parallel.planning.work import Work


@dataclass(frozen=True)
class StepTime:
    """The parts of a step's time. exposed_s: communication during which a device does not compute."""

    timeline: PlannedTimeline
    gradients_s: float
    update_s: float
    exposed_s: float
    terms: tuple[Term, ...] = field(repr=False)

    @property
    def total_s(self) -> float:
        return self.timeline.total_s + self.gradients_s + self.update_s


def step_time(work: Work, hardware: Hardware) -> StepTime:
    """The planned time of a step. Raises KeyError if `hardware` has no peak for the precision."""
    return StepTerms(work, hardware).result()


def tokens_per_s(work: Work, step: StepTime) -> float:
    """The tokens per second of all devices together."""
    return work.samples * work.decoder.sequence / step.total_s


class StepTerms:
    """The terms of a step, collected while they are computed.

    kernels: the kernel times of other steps on the same hardware, which need not be computed again.
    """

    def __init__(self, work: Work, hardware: Hardware, kernels: Kernels | None = None) -> None:
        ranks = work.tensor * work.alike
        everyone = contended(hardware, devices=work.computing)
        # The simulation shows how many stages of a pipeline compute at the same time.
        stage = contended(hardware, devices=ranks) if work.pipeline > 1 else everyone
        self.work, self.hardware = work, stage
        self._loads = Loads(hardware, stage, everyone)
        self._at_once = pipelines_at_once(hardware, devices=ranks)
        self._kernels = Kernels(stage) if kernels is None or stage is not hardware else kernels
        traffic = hardware.traffic.of_compiled() if work.compiled else hardware.traffic
        self.share = Share(
            work.decoder, work.microbatch_size, work.tensor, traffic, work.number_bytes,
            work.context, work.rounding, work.expert,
        )  # fmt: skip
        self._terms = Terms()
        self.exchanges = ExchangeTimes(work, self.share, self._loads, self._kernels, self._terms)
        self._pipeline = work.ranks
        self._last = self._pipeline.stages - 1
        self._stages_s: dict[tuple[ActionKind, int], float] = {}
        self._alike_s: dict[tuple[ActionKind, int, bool, bool], float] = {}
        self._unhidden_s: dict[
            ActionKind, float
        ] = {}  # gathers of a block that its computation does not hide

    def _simulated(self, spans: list[Span] | None = None) -> PlannedTimeline:
        transfers = {} if self.work.blocking else self.exchanges.stage_to_stage_s
        return simulate(
            self._pipeline,
            action_s=self._action_s,
            transfer_s=lambda source, target: transfers.get(min(source, target), 0.0),
            at_once=self._at_once,
            spans=spans,
        )

    def spans(self) -> list[Span]:
        """Every action of the pipeline's ranks; without a pipeline, of one rank."""
        spans: list[Span] = []
        self._simulated(spans)
        return [span for span in spans if span.end_s > span.start_s]

    def result(self) -> StepTime:
        work, timeline = self.work, self._simulated()
        for (kind, stage), seconds in self._stages_s.items():
            inputs = f"blocks and ends {self._compute_s(kind, stage):.6g} s, pipeline"
            text = f"{inputs}, slowest of {self._nodes:g} nodes"
            self._terms.add(f"stage {stage} {kind.name.lower()}", seconds, text)
        text = f"{work.schedule}, {work.pipeline} ranks, {work.microbatches} microbatches, simulated"
        self._terms.add("all microbatches", timeline.total_s, text)
        gradients_s, update_s = self._gradients_s, self._update_s
        blocks = work.decoder.layers / work.pipeline * work.microbatches
        sums_s = (4 + work.recomputations * work.repeated_sums) * self.exchanges.tensor_sum_s
        waits_s = sum((*self._unhidden_s.values(), *self.exchanges.waits_of_block_s))
        exposed_s = gradients_s + blocks * (sums_s + waits_s)
        return StepTime(timeline, gradients_s, update_s, exposed_s, tuple(self._terms))

    def microbatch_s(self) -> float:
        """The time of one microbatch in all stages, one after the other."""
        return sum(self._action_s(kind, stage) for kind in ActionKind for stage in range(self._last + 1))

    def block_s(self, kind: ActionKind) -> float:
        """The least time that a block adds to a stage."""
        device_s, host_s = self._block_s[kind]
        return self._together_s(device_s, host_s) * self._slowest

    def least_s(self) -> float:
        """A lower bound of the step's time, which needs no simulation.

        From the first forward pass of a stage on, the stage's rank computes this stage and its later stages
        for all microbatches. Then the last gradient goes back through the stages before this stage.
        Meanwhile, the rank may still compute gradients of weights.
        """
        stages = range(self._last + 1)
        links_s = {} if self.work.blocking else self.exchanges.stage_to_stage_s
        forward_s = [self._action_s(FORWARD, at) for at in stages]
        backward_s = [self._action_s(BACKWARD, at) for at in stages]
        weights_s = [self._action_s(WEIGHTS, at) for at in stages]
        arrives_s = [0.0, *accumulate(forward_s[at] + links_s.get(at, 0.0) for at in stages)]
        returns_s = [0.0, *accumulate(backward_s[at] + links_s.get(at, 0.0) for at in stages)]
        count, whole_s = self.work.microbatches, 0.0
        for rank_stages in map(self._pipeline.stages_of, range(self.work.pipeline)):
            chain_s = all_s = 0.0
            for stage in reversed(rank_stages):
                chain_s += count * (forward_s[stage] + backward_s[stage])
                all_s += count * (forward_s[stage] + backward_s[stage] + weights_s[stage])
                whole_s = max(whole_s, arrives_s[stage] + max(all_s, chain_s + returns_s[stage]))
        return whole_s + self._gradients_s + self._update_s

    def _sum_s(self, part: str) -> float:
        terms = self._kernels.terms(part, self.share, precision=self.work.precision)
        self._terms += terms
        return sum(term.seconds for term in terms)

    @property
    def _on_cpu(self) -> bool:
        """A CPU has no queue of launches, and torch has no streams on it: all its work runs in turn."""
        return self.hardware.device.is_cpu

    def _together_s(self, device_s: float, host_s: float) -> float:
        """Computation plus launches. A GPU overlaps them unless the host reads the sizes of messages."""
        if self._on_cpu or self.work.expert > 1:
            return device_s + host_s
        longer, shorter, p = max(device_s, host_s), min(device_s, host_s), self.hardware.host.sharpness
        return float(longer * (1 + (shorter / longer) ** p) ** (1 / p))  # the p-norm, without an overflow

    @cached_property
    def _block_s(self) -> dict[ActionKind, tuple[float, float]]:
        """Seconds of the device and of the host for one block, forward and backward."""
        work, exchanges = self.work, self.exchanges
        host, share = self.hardware.host, self.share
        sums_s = 2 * exchanges.tensor_sum_s
        forward_s = self._sum_s("block forward") + sums_s
        backward_s = self._sum_s("block backward") + sums_s
        split, unfused_s = work.tensor > 1, share.unfused * host.unfused_s
        gathers = exchanges.gathers_blocks  # once forward; once backward, with a sum of gradients
        host_forward_s = host.forward_s + (2 * split + gathers) * host.collective_s + unfused_s
        host_backward_s = host.backward_s + (4 * split + 2 * gathers) * host.collective_s + 2 * unfused_s
        forward_s += exchanges.scales_s[FORWARD]
        backward_s += exchanges.scales_s[BACKWARD]
        host_forward_s += exchanges.scale_messages(FORWARD) * host.collective_s
        host_backward_s += exchanges.scale_messages(BACKWARD) * host.collective_s
        if work.context > 1:
            forward_s += exchanges.context_s[FORWARD]
            backward_s += exchanges.context_s[BACKWARD]
        if work.expert > 1:
            forward_s += exchanges.experts_s
            backward_s += exchanges.experts_s - exchanges.counts_s
        backward_s += work.recomputations * (forward_s - (2 - work.repeated_sums) * exchanges.tensor_sum_s)
        if gathers:
            beside = exchanges.beside_compute
            waits = {
                FORWARD: exchanges.gather_s - forward_s * beside,
                BACKWARD: exchanges.gather_s + exchanges.scatter_s - backward_s * beside,
            }
            self._unhidden_s = {kind: max(0.0, wait) for kind, wait in waits.items()}
            forward_s += self._unhidden_s[FORWARD]
            backward_s += self._unhidden_s[BACKWARD]
        return {FORWARD: (forward_s, host_forward_s), BACKWARD: (backward_s, host_backward_s)}

    @cached_property
    def _ends_s(self) -> dict[tuple[ActionKind, str], float]:
        """Seconds of the device for the embedding and the head."""
        return {
            (FORWARD, "first"): self._sum_s("embedding") + self.exchanges.tensor_sum_s,
            (BACKWARD, "first"): self._sum_s("embedding backward"),
            (FORWARD, "last"): self._sum_s("head"),
            (BACKWARD, "last"): self._sum_s("head backward") + self.exchanges.tensor_sum_s,
        }

    def _action_s(self, kind: ActionKind, stage: int) -> float:
        """The time of an action. The host launches its operations in order; the device runs them in order."""
        if not schedule_named(self.work.schedule).splits_backward:
            return 0.0 if kind is WEIGHTS else self._whole_s(kind, stage)
        if kind is FORWARD:
            return self._whole_s(kind, stage)
        # The gradients of inputs and of weights cost about the same.
        return self._whole_s(BACKWARD, stage) / 2

    def _whole_s(self, kind: ActionKind, stage: int) -> float:
        if (kind, stage) not in self._stages_s:
            self._stages_s[kind, stage] = self._waited_s(kind, stage, self._compute_s(kind, stage))
        return self._stages_s[kind, stage]

    def _compute_s(self, kind: ActionKind, stage: int) -> float:
        """Stages between the ends take the same time if they have the same number of blocks."""
        alike = (kind, self.work.blocks[stage], stage == 0, stage == self._last)
        if alike not in self._alike_s:
            self._alike_s[alike] = self._blocks_and_ends_s(kind, stage)
        return self._alike_s[alike]

    def _blocks_and_ends_s(self, kind: ActionKind, stage: int) -> float:
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

    def _waited_s(self, kind: ActionKind, stage: int, compute_s: float) -> float:
        """`compute_s` with the waits of a pipeline's action and the delay of the slowest node."""
        seconds = compute_s
        if self.work.pipeline > 1:
            seconds += self.hardware.host.action_s
            if self.work.blocking:
                target = stage + 1 if kind is FORWARD else stage - 1
                if 0 <= target <= self._last:
                    seconds += self.exchanges.stage_to_stage_s.get(min(stage, target), 0.0)
        return seconds * self._slowest

    @property
    def _nodes(self) -> float:
        return max(1.0, self.work.devices / self.hardware.node.devices)

    @cached_property
    def _slowest(self) -> float:
        """The time of the slowest node, as a multiple of the mean."""
        return 1 + self.hardware.network.spread * math.sqrt(2 * math.log(self._nodes))

    @property
    def _weights(self) -> float:
        """The weights of the device that has most: its part of its stages' blocks, embedding and head."""
        return max(map(self.work.rank_weights, self.work.stages_of_ranks)) / self.work.tensor

    @cached_property
    def _gradients_s(self) -> float:
        return self.exchanges.gradients_s(backward_s=self._whole_s(BACKWARD, 0))

    @cached_property
    def _update_s(self) -> float:
        busy = self._loads.alone if self.work.workers else self._loads.all  # a server updates alone
        traffic, device = busy.traffic, busy.device
        wider = precise_bytes(self.work.number_bytes) / FLOAT32_BYTES
        moved = wider * traffic.optimizer_bytes * self._weights / self.work.shard
        seconds = moved / (device.memory_bytes_per_s * traffic.share) + busy.host.step_s
        return self._terms.add("update", seconds, f"{moved:.4g} B / memory bandwidth + launches of a step")
