"""The bytes that a rank sends in a step, by axes, in the exchanges that a plan has a time for.

The tests compare them with the collectives of a traced step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.layout.axes import AVERAGED_AXES
from hpc_parallel.layout.holdings import sliced_over
from hpc_parallel.layout.layout import Layout, layout_of
from hpc_parallel.planning.collective_times import GroupExchange, GroupShape, bus_factor
from hpc_parallel.planning.exchange_times import PlannedSplitAttention
from hpc_parallel.planning.pipeline_orders import BACKWARD, FORWARD, Pipeline
from hpc_parallel.planning.step_time import StepTerms

SUMS = "over the tensor axis"  # how the names of sums over this axis end


def joined(axes: Iterator[str] | list[str]) -> str:
    """The label of a group over these axes."""
    return " x ".join(axes)


def sent_by_axes(step: StepTerms, config: RunConfig, *, pipeline_rank: int) -> dict[str, float]:
    """Bytes by label, of a rank at this place of the pipeline; `step.result()` must have been called."""
    layout = layout_of(config.strategy, devices=config.devices)
    rank, total = _Rank(step, config, layout, pipeline_rank), defaultdict[str, float](float)
    for label, size in rank.sent():
        total[label] += size
    return {label: size for label, size in total.items() if size}


def _bus_bytes(exchange: GroupExchange) -> float:
    if exchange.group.ranks == 1:
        return 0.0
    return exchange.bytes * bus_factor(exchange.operation, exchange.group.ranks)


@dataclass(frozen=True)
class _Rank:
    step: StepTerms
    config: RunConfig
    layout: Layout
    place: int

    @property
    def _stages(self) -> list[int]:
        return self._pipeline.stages_of(self.place)

    @property
    def _pipeline(self) -> Pipeline:
        return self.step.work.ranks

    @property
    def _last(self) -> int:
        return self._pipeline.stages - 1

    @property
    def _passes(self) -> int:
        """How often a microbatch passes a block on this rank in a step."""
        work = self.step.work
        return work.microbatches * sum(work.blocks[stage] for stage in self._stages)

    def sent(self) -> Iterator[tuple[str, float]]:
        """Label and bytes of every kind of exchange."""
        yield "tensor", self._tensor_sums()
        yield "context", self._context()
        yield "expert", self._experts()
        sliced = list(sliced_over(self.layout))
        yield joined(sliced), self._slices()
        averaged = [axis for axis in AVERAGED_AXES if axis not in sliced and self.layout.degrees[axis] > 1]
        yield joined(averaged), self._mean()
        yield joined([axis for axis in averaged if axis != "expert"]), self._mean_of_experts()
        yield "pipeline", self._stage_to_stage() + self._tied()

    def _named(self, name: str) -> float:
        """The bytes of the exchange of this name; 0 if there is none."""
        exchange = self.step.exchanges.sent.get(name)
        return 0.0 if exchange is None else _bus_bytes(exchange)

    def _tensor_sums(self) -> float:
        """A block has two sums in each pass; the embedding has one forward, and the head has one backward."""
        work = self.step.work
        one = sum(
            _bus_bytes(exchange) for name, exchange in self.step.exchanges.sent.items() if name.endswith(SUMS)
        )
        ends = (0 in self._stages) + (self._last in self._stages)
        return one * (
            self._passes * (4 + work.recomputations * work.repeated_sums) + work.microbatches * ends
        )

    def _context(self) -> float:
        work = self.step.work
        if work.context == 1:
            return 0.0
        attention = PlannedSplitAttention(
            self.step.share, GroupShape(work.context, work.tensor, work.devices)
        )
        times = {FORWARD: 1 + work.recomputations, BACKWARD: 1}
        of_block = sum(
            times[kind] * message.count * _bus_bytes(message.exchange)
            for kind in times
            for message in attention.messages(kind, work.attention)
        )
        return of_block * self._passes

    def _experts(self) -> float:
        """Both passes move tokens and outputs; only the forward pass moves the numbers of tokens."""
        times = 1 + self.step.work.recomputations
        names = ("tokens to experts", "outputs of experts")
        of_block = (times + 1) * sum(map(self._named, names)) + times * self._named("numbers of tokens")
        return of_block * self._passes

    def _slices(self) -> float:
        """A block's weights are gathered forward and backward; a pipeline's rank gathers all of them once."""
        work = self.step.work
        if work.shard == 1:
            return 0.0
        names = ("weights of a step", "gradients of a step")
        of_step = sum(map(self._named, names))
        if work.pipeline > 1:
            return of_step * self.step.work.rank_weights(self._stages) / self._most
        gathers = 1 + self.config.strategy.reshard
        of_block = gathers * self._named("weights of a block") + self._named("gradients of a block")
        return of_step + of_block * self._passes

    @property
    def _most(self) -> float:
        """The weights of the rank with the most weights: a plan takes the time of this rank."""
        return max(self.step.work.rank_weights(self._pipeline.stages_of(rank)) for rank in self._ranks)

    @property
    def _ranks(self) -> range:
        return range(self.step.work.pipeline)

    def _mean(self) -> float:
        averaged = [self.step.work.averaged_weights(self._pipeline.stages_of(rank)) for rank in self._ranks]
        return self._named("mean of gradients") * averaged[self.place] / max(averaged)

    def _mean_of_experts(self) -> float:
        """The mean of the experts' gradients, in proportion to the blocks of this rank."""
        work = self.step.work
        blocks = [sum(work.blocks[stage] for stage in self._pipeline.stages_of(rank)) for rank in self._ranks]
        return self._named("mean of the experts' gradients") * blocks[self.place] / max(blocks)

    def _stage_to_stage(self) -> float:
        """Activations to the next stage and gradients to the one before, if they are on other ranks."""
        work, stages = self.step.work, self._stages
        others = [near for stage in stages for near in (stage - 1, stage + 1) if 0 <= near <= self._last]
        share = self.step.share
        size = work.stream_bytes * share.tokens * share.decoder.dim
        if self.config.strategy.sequence_parallel:
            size //= share.tensor
        return work.microbatches * size * sum(near not in stages for near in others)

    def _tied(self) -> float:
        if not {0, self._last} & set(self._stages):
            return 0.0
        return self._named("gradient of the shared weight")
