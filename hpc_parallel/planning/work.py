"""What the devices do in one training step of a decoder."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_parallel.planning.decoder import DecoderSizes
from hpc_parallel.planning.operations import NUMBER_BYTES, Rounding
from hpc_parallel.planning.pipeline_orders import Pipeline


@dataclass(frozen=True)
class Work:
    """One step.

    data: the number of parts of the batch. context: the number of parts of a sequence, whose devices exchange
    keys and values by `attention`. shard: how many consecutive devices with the same weights slice them
    (ZeRO-3). recompute: blocks run forward again in the backward pass. blocking: a stage waits until its
    message has arrived. bucket_bytes: the size of the messages that average gradients during the backward
    pass of the last microbatch; None: they are averaged after it. blocks: the number of blocks in each stage.
    stream_bytes: the bytes of a number that one stage sends to the next. gradient_bytes: the bytes of a
    number in the gradients that devices exchange. compressed: the means of gradients are exchanged in
    bfloat16 instead. rounding: how the blocks' linear products round to float8. workers: how many ranks send
    gradients to a parameter server, which is one more device or the first of `data`; 0 without a server.
    expert: how many consecutive devices split the experts; each of them has a part of the batch. compiled:
    torch.compile compiles blocks and loss.
    """

    decoder: DecoderSizes
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

        torch stops at the last number that it needs, before it sums the block's result. With
        `sequence_parallel`, it has gathered the parts of the sequence by then. Megatron repeats both sums.
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
        """All devices: the computing ones, and a server that only serves."""
        return self.computing + (self.workers == self.data)

    @property
    def number_bytes(self) -> int:
        """Bytes of one number of the inputs of matrix products, and of gathered weights."""
        return NUMBER_BYTES[self.precision]

    @property
    def samples(self) -> int:
        """The samples of one step."""
        return self.data * self.microbatches * self.microbatch_size

    @property
    def ranks(self) -> Pipeline:
        """The ranks of the pipeline, with their stages and the order of their actions."""
        return Pipeline(self.schedule, self.pipeline, self.microbatches, self.per_rank)

    @property
    def stages_of_ranks(self) -> list[list[int]]:
        return [self.ranks.stages_of(rank) for rank in range(self.pipeline)]

    def rank_weights(self, stages: list[int]) -> float:
        """The weights on all devices of a pipeline rank; of split experts, only the part of one device."""
        return self._weights_with(self.decoder.experts / self.expert, stages)

    def averaged_weights(self, stages: list[int]) -> float:
        """The weights whose gradients all replicas average: without split experts."""
        return self._weights_with(None if self.expert == 1 else 0, stages)

    def _weights_with(self, experts: float | None, stages: list[int]) -> float:
        first, last = 0 in stages, len(self.blocks) - 1 in stages
        blocks = sum(self.blocks[stage] for stage in stages)
        return self.decoder.stage_weights(blocks, first=first, last=last, experts=experts)
