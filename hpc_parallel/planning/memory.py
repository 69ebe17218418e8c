"""Plans, before a run starts, what each device holds when it is fullest, by kind.

A device is fullest at one of three moments of a step: at the loss of the last microbatch, with activations
and logits; right after this loss, when the last block is computed again (activation checkpointing); or when
the backward pass ends, with all gradients and no activations.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from operator import mul

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.layout.batch_plan import batch_of
from hpc_parallel.layout.counts import LOSS_CHUNK_BYTES, MIB, bytes_of_a_weight, count, is_reference_decoder
from hpc_parallel.layout.holdings import FIRST, OTHER, Holding, Setup, first_holdings, holdings, model_facts
from hpc_parallel.layout.layout import PARAMETER_SERVER, SPMD, Layout, layout_of
from hpc_parallel.layout.model_weights import HEAD, STEM, ModelWeights, Weight, sample_shape_of, weights_of
from hpc_parallel.layout.schedules import schedule_of, stages_per_rank
from hpc_parallel.layout.step_facts import (
    casts_once,
    chunks_loss,
    number_bytes,
    packs,
    product_bytes,
    rounded_parts,
    types_of,
    weight_bytes,
)
from hpc_parallel.planning.activations import kept_of
from hpc_parallel.planning.pipeline_orders import fullest_moments
from hpc_parallel.planning.planned_state import Division, StateBytes, States
from hpc_parallel.record.metrics_file import size as size_text

KINDS = (
    "parameters", "gradients", "optimizer", "activations", "gradients of results", "recomputation",
    "logits and loss", "cast weights", "gathered weights", "gradients in messages",
    "gradient of the embedding", "buffers between stages", "rounded update",
    "workspaces", "device context", "allocator slack",
)  # fmt: skip
LOSS, RECOMPUTATION, END = "at the loss", "after the loss", "at the end of the backward pass"
AT_END_ONLY = ("gradient of the embedding", "gradients in messages", "rounded update")
NOT_AT_LOSS = ("recomputation", *AT_END_ONLY)
NOT_AT_RECOMPUTATION = ("logits and loss", *AT_END_ONLY)
NOT_AT_END = ("activations", "gradients of results", "recomputation", "logits and loss")
WORKSPACE_BYTES = 2**26  # of cuBLAS on a GPU, about: 32 MiB for each of its two kinds of product
CONTEXT_BYTES = 2**29  # of CUDA, its libraries and NCCL on a GPU, about
# How far plans were from the peaks that were counted on CPUs (tests/distributed/test_planned_peaks.py).
COUNTED = {"pipelines": (-0.14, 0.21), "mixtures of experts": (-0.16, 0.11)}
SLACK = 0.05  # about the share of the memory of torch's GPU allocator that is lost in gaps between blocks


@dataclass(frozen=True)
class Held:
    """Bytes on one device, by kind (KINDS), at the `moment` when it is fullest.

    device: its rank in the world. role: `server`, `worker` and the like; empty if all devices do the same.
    state: the bytes between the backward pass and the update. stages: the bytes that each of its pipeline
    stages keeps of one microbatch; one stage without a pipeline.
    """

    device: int
    role: str
    kinds: dict[str, int]
    moment: str
    state: StateBytes
    stages: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        """The bytes of all kinds."""
        return sum(self.kinds.values())


@dataclass(frozen=True)
class MemoryPlan:
    """What all devices hold, by device.

    unknown: clauses that say what the figures leave out. unproven: clauses that say what no measured peak has
    confirmed.
    """

    devices: list[Held]
    unknown: list[str]
    unproven: list[str] = field(default_factory=list)

    @property
    def fullest(self) -> Held:
        """The device that needs most; the first one if several need the same."""
        return max(self.devices, key=lambda held: held.total)


def plan(config: RunConfig) -> MemoryPlan | None:
    """The memory of a training run, whose layout must be valid; None if the model's weights are unknown.

    Raises ConfigError if the pipeline has more stages than the model has blocks, and ValueError if the batch
    can't be split.
    """
    planner = _planner_of(config)
    if planner is None:
        return None
    devices = [planner.held(holding) for holding in holdings(_setup(config))]
    return MemoryPlan(devices, planner.unknown, list(_unproven(config, planner.layout)))


def plan_fullest(config: RunConfig, *, model: ModelWeights | None = None) -> MemoryPlan | None:
    """As `plan`, but may leave out devices that hold no more than another. model: the weights, if known."""
    planner = _planner_of(config, model)
    if planner is None:
        return None
    differ = planner.has_owners or config.strategy.execution != SPMD
    rows = holdings if differ else first_holdings
    devices = list(map(planner.planned, rows(_setup(config))))
    return MemoryPlan(devices, planner.unknown, list(_unproven(config, planner.layout)))


def may_fit(config: RunConfig, *, room: float, model: ModelWeights | None = None) -> bool:
    """A quick answer: false if weights with their state and activations alone need more than `room` bytes."""
    planner = _planner_of(config, model)
    return planner is None or max(map(planner.least, first_holdings(_setup(config)))) <= room


def _unproven(config: RunConfig, layout: Layout) -> Iterator[str]:
    """What the peaks measured on a GPU do not cover (tests/data/h200_peaks.json)."""
    if config.training.compile:
        yield "activations are those of eager mode; compiled blocks keep others, mostly fewer"
    if (what := _without_peak(config, layout)) is not None:
        counted = ""
        if what in COUNTED:
            low, high = COUNTED[what]
            counted = f"; counted on CPUs it was {100 * low:+.0f} to {100 * high:+.0f} % off"
        yield f"the plan of {what} was not compared with a GPU{counted}"


def _without_peak(config: RunConfig, layout: Layout) -> str | None:
    """The kind of this run, if no peak was measured on a GPU for this kind."""
    if not is_reference_decoder(config):
        return "models of images"
    if count(config, "experts")[1] is not None:
        return "mixtures of experts"
    if packs(config):
        return "packed documents"
    if layout.pipeline > 1:
        return "pipelines"
    if config.strategy.execution != SPMD:
        return f"strategy={config.strategy.execution}"
    if (parts := rounded_parts(config)) is not None:
        return f"{parts} in bfloat16"
    selective = config.training.activation_checkpointing == "selective"
    return "selective checkpointing" if selective else None


def _setup(config: RunConfig) -> Setup:
    layout = layout_of(config.strategy, devices=config.devices)
    return Setup(config.strategy, layout, model_facts(config.model), gpus=config.device != "cpu")


def _planner_of(config: RunConfig, model: ModelWeights | None = None) -> _MemoryPlanner | None:
    shape = sample_shape_of(config.model, config.data)
    model = model or (None if shape is None else weights_of(config.model, sample_shape=shape))
    if model is None or shape is None:
        return None
    return _MemoryPlanner(config, layout_of(config.strategy, devices=config.devices), model, shape)


class _MemoryPlanner:
    """The plan of each device of one configuration."""

    def __init__(
        self, config: RunConfig, layout: Layout, model: ModelWeights, shape: tuple[int, ...]
    ) -> None:
        batch = batch_of(config, layout)
        self._config, self.layout, self._shape = config, layout, shape
        self._division = Division(config, layout, model)
        self._states = States(self._division)
        self._numbers = model.numbers.blocks
        self._microbatches, self._samples = batch.microbatches, max(batch.sizes)
        self._kept = kept_of(config, layout, samples=self._samples)
        self._alike: dict[Hashable, Held] = {}

    @property
    def has_owners(self) -> bool:
        """Whether devices own the whole state of some weights, so no device stands for others."""
        return self._states.has_owners

    @property
    def unknown(self) -> list[str]:
        clauses = [
            f"the state of {target} counts as 0, because it is not known" for target in self._states.unknown
        ]
        if self._kept is None:
            clauses.append("activations count as 0, because they are not known for this model")
        return clauses

    def held(self, holding: Holding) -> Held:
        """The plan of the device of `holding`, computed once for devices that hold the same."""
        key = self._states.alike(holding)
        if key not in self._alike:
            self._alike[key] = self.planned(holding)
        return replace(self._alike[key], device=holding.devices[0], role=holding.role)

    def least(self, holding: Holding) -> int:
        """A quick lower bound: the blocks' weights with their state, and the activations."""
        layout, parts = self.layout, self._parts(holding)
        numbers = sum(self._numbers[block] for part in parts for block in part)
        split = layout.shard * layout.tensor * layout.expert
        owned = numbers // split if layout.context == layout.tile == 1 else 0
        state, gradients = (owned * count for count in bytes_of_a_weight(self._config))
        passing = sum(size for kind, size in self._passing(holding) if kind != "recomputation")
        return state + (gradients + passing if self._has_gradients else max(gradients, passing))

    def planned(self, holding: Holding) -> Held:
        state = self._states.of(holding)
        moments = self._moments({**vars(state), **dict(self._step(holding))})
        moment = max(moments, key=lambda name: sum(moments[name].values()))
        kinds = moments[moment]
        if self._config.device != "cpu":
            kinds["workspaces"] = WORKSPACE_BYTES
            kinds["allocator slack"] = int(SLACK * sum(kinds.values()))
            kinds["device context"] = CONTEXT_BYTES
        kinds = {kind: kinds.get(kind, 0) for kind in KINDS}
        return Held(holding.devices[0], holding.role, kinds, moment, state, self._activations(holding))

    def _parts(self, holding: Holding) -> list[range]:
        """The blocks of each stage."""
        return [self._division.blocks[stage] for stage in holding.stages]

    def _moments(self, kinds: dict[str, int]) -> dict[str, dict[str, int]]:
        """For each moment, the `kinds` that exist then."""
        absent = () if self._has_gradients else ("gradients",)
        without = {
            LOSS: (*NOT_AT_LOSS, *absent), RECOMPUTATION: (*NOT_AT_RECOMPUTATION, *absent), END: NOT_AT_END
        }  # fmt: skip
        return {
            moment: {kind: size for kind, size in kinds.items() if kind not in kinds_without}
            for moment, kinds_without in without.items()
        }

    @property
    def _has_gradients(self) -> bool:
        """Whether gradients exist before the last backward pass: of earlier microbatches, or bucket views."""
        layout, strategy = self.layout, self._config.strategy
        views = strategy.execution == SPMD and layout.averaged > 1 and not layout.by_fully_shard
        views = views and not schedule_of(strategy).splits_backward
        return views or self._microbatches > 1 or strategy.execution == PARAMETER_SERVER

    def _activations(self, holding: Holding) -> tuple[int, ...]:
        """The bytes of one microbatch in each stage."""
        if self._kept is None or holding.samples is None:
            return ()
        return tuple(map(self._kept.stage, self._parts(holding)))

    def _step(self, holding: Holding) -> Iterator[tuple[str, int]]:
        """The bytes that a step needs in addition to the state, by kind."""
        division = self._division
        yield "gradients in messages", gradient_messages(division, holding)
        yield "rounded update", division.rounded_update(holding)
        if holding.samples is None:  # a dedicated server
            return
        yield "cast weights", cast_weights(division, holding)
        yield "gathered weights", gathered_weights(division, holding)
        again = self._microbatches > 1
        yield "gradient of the embedding", embedding_gradient(division, holding, again=again)
        if self._parts(holding)[-1].stop == division.model.blocks and holding.role != OTHER:
            gathers = holding.role == FIRST  # the outputs of all replicas
            samples = self._samples * (self.layout.data if gathers else 1)
            loss = loss_buffers(division, samples=samples, sample_shape=self._shape)
            yield "logits and loss", loss
        yield from self._passing(holding)

    def _passing(self, holding: Holding) -> Iterator[tuple[str, int]]:
        """The bytes that a step keeps of its microbatches, by kind."""
        kept = self._kept
        if kept is None or holding.samples is None:
            return
        moments = fullest_moments(
            self._config.strategy, rank=min(holding.stages[0], self.layout.pipeline - 1),
            ranks=self.layout.pipeline, microbatches=self._microbatches,
        )  # fmt: skip
        parts, activations = self._parts(holding), self._activations(holding)
        kinds = [
            (sum(map(mul, live, activations)), sum(map(mul, waits, map(kept.waiting, parts))))
            for live, waits in moments
        ]
        yield from zip(("activations", "gradients of results"), max(kinds, key=sum), strict=True)
        recomputed = (kept.recomputed[block] for part in parts for block in part)
        yield "recomputation", max(recomputed)
        yield "buffers between stages", self._buffers(holding.stages)

    def _buffers(self, stages: tuple[int, ...]) -> int:
        """torch's pipelines allocate what each stage receives for all microbatches, in both directions.

        gloo also holds what a schedule sends in single messages until the step ends; NCCL lets it go.
        """
        if self.layout.pipeline == 1 or self._kept is None:
            return 0
        states, count = self._kept.states, self.layout.pipeline * stages_per_rank(self._config.strategy)
        blocks = self._division.blocks
        received = {(stage - 1, stage): states[blocks[stage].start] for stage in stages if stage > 0}
        received |= {(stage + 1, stage): states[blocks[stage].stop] for stage in stages if stage < count - 1}
        sent = [size for (other, _), size in received.items() if other not in stages]
        holds = self._config.device == "cpu" and schedule_of(self._config.strategy).two_way
        return self._microbatches * (sum(received.values()) + holds * sum(sent))


def text_table(plan: MemoryPlan) -> list[str]:
    """Lines for a terminal: the kinds on the fullest device, the sum, and what is left out."""
    fullest = plan.fullest
    kinds = {kind: size for kind, size in fullest.kinds.items() if size}
    width = max(map(len, (*kinds, "sum")))
    role = f" ({fullest.role})" if fullest.role else ""
    alike = sum(held.total == fullest.total for held in plan.devices)
    others = f", as {alike} of {len(plan.devices)} devices do" if alike > 1 else ""
    lines = [f"device {fullest.device}{role} needs most{others}, {fullest.moment}:"]
    lines += [f"  {kind:{width}}  {size_text(count):>11}" for kind, count in kinds.items()]
    lines.append(f"  {'sum':{width}}  {size_text(fullest.total):>11}")
    lines += [f"  without: {clause}" for clause in plan.unknown]
    return lines + [f"  unproven: {clause}" for clause in plan.unproven]


def cast_weights(division: Division, holding: Holding) -> int:
    """The copies in bfloat16 that a step without fully_shard computes with (working_weights.py)."""
    if division.layout.by_fully_shard or not casts_once(division.config):
        return 0
    weights = [weight for weight in division.weights(holding) if weight.casts]
    return 2 * sum(math.prod(division.local_shape(weight, holding)) for weight in weights)


def gathered_weights(division: Division, holding: Holding) -> int:
    """The weights that fully_shard has gathered at most: the ends, a block, and those gathered ahead."""
    blocks, ends = _gathered(division, holding)
    if not blocks:
        return 0
    strategy, layout = division.config.strategy, division.layout
    ahead = 1 if strategy.prefetch is None else strategy.prefetch
    reshards = strategy.reshard and layout.pipeline == 1
    held = sorted(blocks)[-1 - ahead :] if reshards else blocks
    return (sum(held) + ends) * product_bytes(division.config)


def embedding_gradient(division: Division, holding: Holding, *, again: bool) -> int:
    """Temporary bytes for the embedding's gradient, which a backward pass computes last.

    The part of a tied head waits for this gradient. again: it is added to the gradient of earlier
    microbatches. The gradient that stays is not included.
    """
    ends = [weight for weight in division.weights(holding) if weight.part == STEM and len(weight.shape) > 1]
    numbers = sum(math.prod(division.unsliced_shape(weight, holding)) for weight in ends)
    types, number = types_of(division.config, division.layout), weight_bytes(division.config)
    tied = bool(division.model.tied) and len(holding.stages) == division.layout.pipeline == 1
    if types.cast and types.product < number:
        return numbers * (2 * (1 + tied) + number * again)
    return numbers * number * (tied + again)


def gradient_messages(division: Division, holding: Holding) -> int:
    """Gradients on their way to other devices, in addition to the gradients that the device keeps."""
    config, layout = division.config, division.layout
    numbers = [math.prod(division.gradient_shape(weight, holding)) for weight in division.optimized(holding)]
    bucket = int(config.strategy.bucket_mb * MIB)
    if config.strategy.execution == PARAMETER_SERVER:
        return 2 * max(bucket, max(numbers) * number_bytes(division.config))
    if config.strategy.execution != SPMD:
        return 0
    if layout.by_fully_shard:  # of the ends and a block, and the block's again in the type of the sum
        blocks, ends = _gathered(division, holding)
        return (max(blocks) + ends) * product_bytes(config) + max(blocks) * number_bytes(division.config)
    if layout.averaged == 1:
        return 0
    if schedule_of(config.strategy).splits_backward and layout.pipeline > 1:  # replicate.py: Average
        return sum(numbers) * number_bytes(division.config)
    if config.strategy.gradient_compression == "bfloat16":
        return bucket // 2
    return 2 * bucket if weight_bytes(config) < number_bytes(config) else 0  # averaged in float32


def loss_buffers(division: Division, *, samples: int, sample_shape: tuple[int, ...]) -> int:
    """Logits, their logarithms and gradients, for the tokens that exist at a time; 0 for models of images.

    These bytes do not include what is kept for the backward pass (`activations.Kept.head`).
    """
    config, layout = division.config, division.layout
    if len(sample_shape) > 1:
        return 0
    types = types_of(config, layout)
    vocabulary, dim = _projection(division).shape
    rows = -(-vocabulary // layout.tensor)
    tokens = samples * sample_shape[0] // layout.context
    half = types.product if types.product < types.precise else 0
    if not chunks_loss(config, tensor=layout.tensor):
        columns = rows if config.strategy.loss_parallel else vocabulary
        return tokens * columns * 2 * types.precise
    chunk = LOSS_CHUNK_BYTES["cpu" if config.device == "cpu" else "cuda"]
    chunks = max(1, -(-tokens * rows * 4 // chunk))
    number = half + 2 * types.precise  # of logits as they are and in float32, and of logarithms
    total = rows * dim * types.precise if chunks > 1 else 0  # the gradient of the weight so far
    kept = rows * dim * (types.product if types.cast else types.precise)  # part of `Kept.head`
    return max(-(-tokens // chunks) * rows * number + total - kept, rows * dim * types.precise)


def _projection(division: Division) -> Weight:
    """The weight of the logits. If it is tied, the stem has it."""
    last = division.model.weights[-1]
    return last if len(last.shape) > 1 else division.model.weights[0]


def _gathered(division: Division, holding: Holding) -> tuple[list[int], int]:
    """The numbers in each block of its stages and in the ends that stay gathered (shard.py)."""
    if not division.layout.by_fully_shard:
        return [], 0
    sizes: dict[str, int] = {}
    for weight in division.weights(holding):
        sizes[weight.part] = sizes.get(weight.part, 0) + math.prod(division.unsliced_shape(weight, holding))
    stem, head = sizes.pop(STEM, 0), sizes.pop(HEAD, 0)
    shared = bool(division.model.tied) and stem and head
    return list(sizes.values()), head + (stem if shared else 0)
