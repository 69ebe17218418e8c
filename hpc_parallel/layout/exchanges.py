"""All messages between the ranks of a training step, in the order of the step, listed without torch.

`strategies/assemble.py` applies the techniques. Each function here lists the collectives of one technique.
`tests/distributed/test_exchanges.py` compares the lists with the collectives of real runs. The messages of
checkpoints, of metrics and of the agreement on whether to stop are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise, product

from hpc_parallel.layout.axes import AVERAGED_AXES, BATCH_AXES, SAMPLE_AXES
from hpc_parallel.layout.holdings import Setup, sliced_over
from hpc_parallel.layout.layout import DATAPARALLEL, PARAMETER_SERVER, servers
from hpc_parallel.layout.schedules import schedule_of, stages_per_rank

Group = tuple[int, ...]

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, SEND, COPY = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "copy",
)  # fmt: skip
DIRECTED = (SEND, COPY)  # their groups are pairs (sender, receiver)


class Phase(Enum):
    """The part of a step in which an exchange happens."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"  # after the last backward pass


class Often(Enum):
    """How often an exchange happens in a step."""

    STEP = "once a step"
    MICROBATCH = "each microbatch"
    BLOCK = "each block and microbatch"


EXPERTS_OF_A_BLOCK = "a block's experts"
FORWARD, BACKWARD, UPDATE = Phase
STEP, MICROBATCH, BLOCK = Often


@dataclass(frozen=True)
class Exchange:
    """One kind of message of a step.

    how: the kind of collective, as `summary.json` names it under `traffic`; a `copy` is between the devices
    of one process. groups: the ranks that take part together (for a `copy`, the numbers of the devices); for
    DIRECTED, the sender and the receiver. over: the axes on which the ranks of a group differ. only_if: the
    condition on the model or the devices, if the configuration alone does not decide.
    """

    phase: Phase
    what: str
    how: str
    often: Often
    over: str
    groups: tuple[Group, ...]
    only_if: str | None = None


def exchanges(setup: Setup) -> list[Exchange]:
    """The exchanges of one training step; none on one device. `setup.uncovered` must be None."""
    techniques = BY_EXECUTION.get(setup.strategy.execution, SPMD_TECHNIQUES)
    every = [exchange for technique in techniques for exchange in technique(setup)]
    return [exchange for phase in Phase for exchange in every if exchange.phase is phase and exchange.groups]


def groups_over(setup: Setup, *axes: str) -> tuple[Group, ...]:
    """The groups of ranks that differ on these axes only, without groups of one."""
    strides, stride = {}, 1
    for axis, degree in reversed(setup.layout.degrees.items()):
        strides[axis] = range(0, stride * degree, stride)
        stride *= degree
    inner = [sum(offsets) for offsets in product(*(strides[a] for a in setup.layout.degrees if a in axes))]
    outer = product(*(strides[axis] for axis in setup.layout.degrees if axis not in axes))
    if len(inner) == 1:
        return ()
    first = servers(setup.strategy)
    return tuple(tuple(first + sum(base) + offset for offset in inner) for base in outer)


class _On:
    """Makes exchanges between ranks that differ only on the given axes, taken together."""

    def __init__(self, setup: Setup, *axes: str) -> None:
        self._setup = setup
        self._over = " x ".join(axis for axis in axes if setup.layout.degrees[axis] > 1)
        self.groups = groups_over(setup, *axes)

    def __call__(
        self, phase: Phase, what: str, how: str, often: Often, *, only_if: str | None = None
    ) -> Exchange:
        return Exchange(phase, what, how, often, self._over, self.groups, only_if)

    def last_stage(self, phase: Phase, what: str, how: str, *, only_if: str | None = None) -> Exchange:
        """An exchange for each microbatch, only between ranks that have the model's last stage."""
        layout = self._setup.layout
        last = 0 if schedule_of(self._setup.strategy).v_shaped else layout.pipeline - 1
        groups = tuple(group for group in self.groups if layout.coordinates(group[0])["pipeline"] == last)
        return Exchange(phase, what, how, MICROBATCH, self._over, groups, only_if)

    def directed(self, phase: Phase, what: str, often: Often, pairs: Sequence[Group]) -> Exchange:
        return Exchange(phase, what, SEND, often, self._over, tuple(pairs))


def _gathered_weights(setup: Setup) -> Iterator[Exchange]:
    """shard.py: fully_shard. A stage of a pipeline keeps its weights for the next microbatch."""
    staged = setup.layout.pipeline > 1
    for what, on in _sliced(setup):
        yield on(FORWARD, f"weights of {what}", ALL_GATHER, STEP if staged else BLOCK)
        if setup.strategy.reshard and not staged:
            yield on(BACKWARD, f"weights of {what}", ALL_GATHER, BLOCK)


def _sliced(setup: Setup) -> Iterator[tuple[str, _On]]:
    """What fully_shard gathers together, and between which ranks."""
    yield "a block", _On(setup, *sliced_over(setup.layout))
    if setup.layout.expert > 1:
        yield EXPERTS_OF_A_BLOCK, _On(setup, *sliced_over(setup.layout, of_experts=True))


def _sliced_gradients(setup: Setup) -> Iterator[Exchange]:
    """shard.py: fully_shard. In a pipeline, it sums gradients in the last microbatch only."""
    often = STEP if setup.layout.pipeline > 1 else BLOCK
    for what, on in _sliced(setup):
        of = " of experts" if what == EXPERTS_OF_A_BLOCK else ""
        yield on(BACKWARD, f"gradients{of}", REDUCE_SCATTER, often)
    if setup.layout.by_fully_shard:
        yield _On(setup, "replicate")(BACKWARD, "gradients", ALL_REDUCE, STEP)


def _replicas(setup: Setup) -> Iterator[Exchange]:
    """replicate.py: DistributedDataParallel, or `Average` if a schedule splits the backward pass."""
    if not setup.layout.by_fully_shard:
        short = setup.strategy.gradient_compression == "bfloat16"
        what = "gradients in bfloat16" if short else "gradients"
        yield _On(setup, *AVERAGED_AXES)(BACKWARD, what, ALL_REDUCE, STEP)


def _tensor(setup: Setup) -> Iterator[Exchange]:
    """split_layers.py: the placements between layers. In models of images only the classifier is split."""
    on, strategy = _On(setup, "tensor"), setup.strategy
    only_if = "if the model has column and row layers" if setup.model.reads is None else None
    if setup.model.reads == "images":
        yield on.last_stage(BACKWARD, "activations' gradients", ALL_REDUCE)
    elif strategy.sequence_parallel:
        for phase, what in ((FORWARD, "activations"), (BACKWARD, "activations' gradients")):
            yield on(phase, what, ALL_GATHER, BLOCK, only_if=only_if)
            yield on(phase, what, REDUCE_SCATTER, BLOCK, only_if=only_if)
        by_fully_shard = setup.layout.by_fully_shard and setup.layout.pipeline == 1
        often = MICROBATCH if by_fully_shard else STEP
        yield on(BACKWARD, "gradients of norms", ALL_REDUCE, often, only_if=only_if)
    else:
        for phase, what in ((FORWARD, "activations"), (BACKWARD, "activations' gradients")):
            yield on(phase, what, ALL_REDUCE, BLOCK, only_if=only_if)


def _loss(setup: Setup) -> Iterator[Exchange]:
    """split_layers.py: the loss of split logits, or the logits themselves."""
    on = _On(setup, "tensor")
    if setup.strategy.loss_parallel:
        yield on.last_stage(FORWARD, "sums of the loss", ALL_REDUCE)
    else:
        yield on.last_stage(FORWARD, "logits", ALL_GATHER)


def _context(setup: Setup) -> Iterator[Exchange]:
    """ring.py, all_to_all_attention.py: the attention of a split sequence."""
    on = _On(setup, "context")
    if setup.model.balanced:
        yield on(FORWARD, "sums of the balance", ALL_REDUCE, BLOCK)
    if setup.strategy.context_attention == "all_to_all":
        yield on(FORWARD, "queries, keys, values, and outputs", ALL_TO_ALL, BLOCK)
        yield on(BACKWARD, "their gradients", ALL_TO_ALL, BLOCK)
        return
    if setup.strategy.context_attention == "gather":
        yield on(FORWARD, "keys and values", ALL_GATHER, BLOCK)
        yield on(BACKWARD, "keys and values", ALL_GATHER, BLOCK)
        yield on(BACKWARD, "their gradients", REDUCE_SCATTER, BLOCK)
        return
    ring = [pair for group in on.groups for pair in zip(group, (*group[1:], group[0]), strict=True)]
    yield on.directed(FORWARD, "keys and values", BLOCK, ring)
    yield on.directed(BACKWARD, "keys, values and gradients", BLOCK, ring)


def _expert(setup: Setup) -> Iterator[Exchange]:
    """expert.py: tokens travel to their experts and back."""
    on = _On(setup, "expert")
    yield on(FORWARD, "tokens", ALL_TO_ALL, BLOCK)
    yield on(BACKWARD, "tokens' gradients", ALL_TO_ALL, BLOCK)
    if setup.layout.expert > 1 and not setup.layout.by_fully_shard:
        on = _On(setup, "replicate", *SAMPLE_AXES)
        yield on(UPDATE, "gradients of experts", ALL_REDUCE, STEP)
    if setup.model.loads:  # expert.py
        yield _On(setup, *BATCH_AXES, *SAMPLE_AXES)(UPDATE, "loads of experts", ALL_REDUCE, STEP)


def _tile(setup: Setup) -> Iterator[Exchange]:
    """halo.py, tile/: the borders that a layer needs around its tile; the whole map for some heads."""
    on = _On(setup, "tile")
    yield on(FORWARD, "borders of tiles", ALL_TO_ALL, BLOCK)
    yield on(BACKWARD, "borders' gradients", ALL_TO_ALL, BLOCK)
    if setup.model.whole_head is not False:
        only_if = None if setup.model.whole_head else "if the head needs the whole image"
        yield on.last_stage(FORWARD, "the last map", ALL_TO_ALL, only_if=only_if)
        yield on.last_stage(BACKWARD, "the map's gradient", ALL_TO_ALL, only_if=only_if)


def _batch_norm(setup: Setup) -> Iterator[Exchange]:
    """batch_norm.py: moments over all samples of a microbatch and all their parts."""
    if setup.model.batch_norm is False:
        return
    only_if = None if setup.model.batch_norm else "if the model has BatchNorm"
    on = _On(setup, *BATCH_AXES, *SAMPLE_AXES)
    yield on(FORWARD, "moments of BatchNorm", ALL_REDUCE, BLOCK, only_if=only_if)
    yield on(BACKWARD, "moments' gradients", ALL_REDUCE, BLOCK, only_if=only_if)


def _pipeline(setup: Setup) -> Iterator[Exchange]:
    """pipeline.py: messages between neighbouring stages on different ranks, and a weight of both ends."""
    on, schedule = _On(setup, "pipeline"), schedule_of(setup.strategy)
    forth = [pair for group in on.groups for pair in pairwise(group)]
    if schedule.v_shaped:
        forth += [(target, source) for source, target in forth]
    elif stages_per_rank(setup.strategy) > 1:
        forth += [(group[-1], group[0]) for group in on.groups]
    forth = list(dict.fromkeys(forth))
    back = [(target, source) for source, target in forth]
    yield on.directed(FORWARD, "activations", MICROBATCH, forth)
    yield on.directed(BACKWARD, "activations' gradients", MICROBATCH, back)
    if setup.model.tied is not False and not schedule.v_shaped:
        only_if = None if setup.model.tied else "if stem and head share a weight"
        ends = tuple((group[0], group[-1]) for group in on.groups)
        yield Exchange(UPDATE, "gradient of the tied weight", ALL_REDUCE, STEP, "pipeline", ends, only_if)


def _gradient_norm(setup: Setup) -> Iterator[Exchange]:
    """gradients.py: one number, summed over each axis whose ranks hold different weights."""
    sliced = sliced_over(setup.layout)
    for axes in (("pipeline",), sliced, () if "expert" in sliced else ("expert",), ("tensor",)):
        yield _On(setup, *axes)(UPDATE, "norm of the gradient", ALL_REDUCE, STEP)


def _server(setup: Setup) -> Iterator[Exchange]:
    """parameter_server.py: every worker sends gradients to rank 0 and receives weights from it."""
    workers = range(1, setup.layout.devices + servers(setup.strategy))
    on = _On(setup, "replicate")
    yield on.directed(UPDATE, "gradients", STEP, [(worker, 0) for worker in workers])
    yield on.directed(UPDATE, "weights", STEP, [(0, worker) for worker in workers])


def _threads(setup: Setup) -> Iterator[Exchange]:
    """dataparallel.py: everything passes through the first device. On CPUs the threads share the model."""
    out = tuple((0, device) for device in range(1, setup.layout.devices))
    back = tuple((device, 0) for _, device in out)

    def copied(phase: Phase, what: str, pairs: tuple[Group, ...], only_if: str | None = None) -> Exchange:
        return Exchange(phase, what, COPY, MICROBATCH, "replicate", pairs, only_if)

    on_gpus = None if setup.gpus else "on GPUs"
    if setup.gpus is not False:
        yield copied(FORWARD, "weights", out, on_gpus)
    yield copied(FORWARD, "samples", out)
    yield copied(FORWARD, "outputs", back)
    yield copied(BACKWARD, "outputs' gradients", out)
    if setup.gpus is not False:
        yield copied(BACKWARD, "gradients", back, on_gpus)
    if setup.model.batch_norm is not False:
        only_if = None if setup.model.batch_norm else "if the model has BatchNorm"
        for phase, what in ((FORWARD, "moments of BatchNorm"), (BACKWARD, "moments' gradients")):
            yield copied(phase, what, back + out, only_if)


Technique = Callable[[Setup], Iterator[Exchange]]
SPMD_TECHNIQUES: tuple[Technique, ...] = (
    _gathered_weights, _tile, _expert, _context, _tensor, _batch_norm, _pipeline, _loss, _sliced_gradients,
    _replicas, _gradient_norm,
)  # fmt: skip
BY_EXECUTION: dict[str, tuple[Technique, ...]] = {
    DATAPARALLEL: (_threads,),
    PARAMETER_SERVER: (_batch_norm, _server),
}
