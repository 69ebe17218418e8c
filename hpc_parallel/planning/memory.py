"""Plans, before a run starts, what each device holds when it is fullest, by kind.

A device is fullest at one of four moments of a step: at the loss of the last microbatch, with activations
and logits; right after this loss, in the backward pass of a block, which may be computed again first
(activation checkpointing); in that of the first block of the model, with the gradients of all others; or when
the backward pass ends, with all gradients and no activations.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import mul

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.layout.batch_plan import batch_of
from hpc_parallel.layout.counts import bytes_of_a_weight, count, is_reference_decoder
from hpc_parallel.layout.holdings import FIRST, OTHER, Holding, Setup, first_holdings, holdings, model_facts
from hpc_parallel.layout.layout import PARAMETER_SERVER, SPMD, Layout, layout_of
from hpc_parallel.layout.model_weights import ModelWeights, sample_shape_of, weights_of
from hpc_parallel.layout.schedules import schedule_of, stages_per_rank
from hpc_parallel.layout.step_facts import packs, rounded_parts
from hpc_parallel.planning.activations import Kept, kept_of
from hpc_parallel.planning.pipeline_orders import Counts, fullest_moments
from hpc_parallel.planning.planned_state import Division, States
from hpc_parallel.planning.planned_step import (
    cast_weights,
    early_gradients,
    embedding_gradient,
    gathered_weights,
    gradient_messages,
    gradients_before_last,
    gradients_under_way,
    has_buckets,
    head_gradient,
    loss_buffers,
)
from hpc_parallel.record.endings import RankState
from hpc_parallel.record.metrics_file import aligned
from hpc_parallel.record.metrics_file import size as size_text

KINDS = (
    "parameters", "gradients", "optimizer", "activations", "gradients of results", "recomputation",
    "logits and loss", "cast weights", "gathered weights", "gradients in messages",
    "gradients of the ends", "buffers between stages", "rounded update",
    "workspaces", "device context", "allocator slack",
)  # fmt: skip
LOSS, AFTER, LAST_BLOCK, END = (
    "at the loss", "after the loss", "in the backward pass of its first block",
    "at the end of the backward pass",
)  # fmt: skip
WORKSPACE_BYTES = 2**26  # of cuBLAS on a GPU, about: 32 MiB for each of its two kinds of product
CONTEXT_BYTES = 2**29  # of CUDA, its libraries and NCCL on a GPU, about
# How far plans were from the peaks that were counted on CPUs (tests/distributed/test_planned_peaks.py).
COUNTED = {
    "pipelines": (-0.06, 0.07), "mixtures of experts": (-0.10, 0.13), "selective checkpointing": (-0.03, 0.02)
}  # fmt: skip
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
    state: RankState
    stages: tuple[int, ...] = ()

    @property
    def total(self) -> int:
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
    model = model or weights_of(config.model, sample_shape=shape)
    if model is None or shape is None:
        return None
    return _MemoryPlanner(config, layout_of(config.strategy, devices=config.devices), model, shape)


class _MemoryPlanner:
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
        passing = 0
        if self._kept is not None and holding.samples is not None:
            passing = sum(self._passing(self._kept, holding)[0].values())
        return state + (gradients + passing if self._has_gradients else max(gradients, passing))

    def planned(self, holding: Holding) -> Held:
        state = self._states.of(holding)
        moments = dict(self._moments(holding, state))
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

    @property
    def _has_gradients(self) -> bool:
        """Whether gradients exist before the last backward pass: of earlier microbatches, or bucket views."""
        execution = self._config.strategy.execution
        return has_buckets(self._division) or self._microbatches > 1 or execution == PARAMETER_SERVER

    def _activations(self, holding: Holding) -> tuple[int, ...]:
        """The bytes of one microbatch in each stage."""
        if self._kept is None or holding.samples is None:
            return ()
        return tuple(map(self._kept.stage, self._parts(holding)))

    def _moments(self, holding: Holding, state: RankState) -> Iterator[tuple[str, dict[str, int]]]:
        """The bytes at each moment, by kind."""
        division, kept, again, early = self._division, self._kept, self._microbatches > 1, 0
        if self._has_gradients:
            early = early_gradients(division, holding, of_all=state.gradients, again=again)
        always = {**vars(state), "gradients": early}
        end = {
            "gradients": state.gradients, "gradients in messages": gradient_messages(division, holding),
            "rounded update": division.rounded_update(holding),
        }  # fmt: skip
        if holding.samples is None:  # a dedicated server
            yield END, always | end
            return
        always["cast weights"] = cast_weights(division, holding)
        always["gathered weights"] = gathered_weights(division, holding)
        passing, live = ({}, ()) if kept is None else self._passing(kept, holding)
        yield LOSS, always | passing | {"logits and loss": self._loss(holding)}
        if kept is not None:
            blocks = self._backward_passes(kept, holding, passing, live, of_all=state.gradients, early=early)
            yield from ((moment, always | kinds) for moment, kinds in blocks)
            end["buffers between stages"] = self._buffers(kept, holding.stages, (0,) * len(live))
        end["gradients of the ends"] = embedding_gradient(division, holding, again=again)
        yield END, always | end

    def _backward_passes(
        self, kept: Kept, holding: Holding, passing: dict[str, int], live: Counts, *, of_all: int, early: int
    ) -> Iterator[tuple[str, dict[str, int]]]:
        """Two moments at which the gradients of a block are computed. of_all, early: bytes of gradients."""
        division, parts = self._division, self._parts(holding)
        blocks, has_loss = [block for part in parts for block in part], parts[-1].stop == len(kept.blocks)
        under_way = gradients_under_way(division, holding, of_all=of_all, again=self._microbatches > 1)
        buffers = {"buffers between stages": passing["buffers between stages"]}
        head = kept.head if has_loss and live[-1] else 0  # the loss is over
        after = buffers | self._backward_pass(kept, blocks, passing["activations"] - head)
        after["gradients of results"] += passing["gradients of results"]
        after["gradients of the ends"] = head_gradient(division, holding, alone=not early)
        # An average is under way from the second block on, when the last one's activations are gone.
        after["gradients in messages"] = max(0, under_way - kept.blocks[blocks[-1]])
        yield AFTER, after
        activations = kept.stage(range(blocks[0], blocks[0] + 1))
        if has_loss and len(blocks) == 1:
            activations -= kept.head
        last = buffers | self._backward_pass(kept, blocks[:1], activations)
        last["gradients"] = early or gradients_before_last(division, holding, of_all=of_all)
        last["gradients of the ends"] = head_gradient(division, holding, alone=False)
        last["gradients in messages"] = under_way
        yield LAST_BLOCK, last

    def _passing(self, kept: Kept, holding: Holding) -> tuple[dict[str, int], Counts]:
        """What a step keeps of its microbatches when it keeps most, and the live ones of each stage then."""
        activations = self._activations(holding)
        waiting = list(map(kept.waiting, self._parts(holding)))
        moments = fullest_moments(
            self._config.strategy, rank=min(holding.stages[0], self.layout.pipeline - 1),
            ranks=self.layout.pipeline, microbatches=self._microbatches,
        )  # fmt: skip
        live, waits = max(
            moments, key=lambda one: sum(map(mul, one[0], activations)) + sum(map(mul, one[1], waiting))
        )
        kinds = {
            "activations": sum(map(mul, live, activations)),
            "gradients of results": sum(map(mul, waits, waiting)),
            "buffers between stages": self._buffers(kept, holding.stages, live),
        }
        return kinds, live

    def _backward_pass(self, kept: Kept, blocks: Sequence[int], activations: int) -> dict[str, int]:
        """`activations`, and what the fullest of the blocks has in its backward pass."""
        splits = schedule_of(self._config.strategy).splits_backward and self.layout.pipeline > 1
        gradients = [0] * len(kept.blocks) if splits else kept.gradients  # of results that wait already
        block = max(blocks, key=lambda block: kept.again(block) + gradients[block])
        return {
            "activations": activations, "recomputation": kept.again(block),
            "gradients of results": gradients[block],
        }  # fmt: skip

    def _loss(self, holding: Holding) -> int:
        if self._parts(holding)[-1].stop != self._division.model.blocks or holding.role == OTHER:
            return 0
        gathers = holding.role == FIRST  # the outputs of all replicas
        samples = self._samples * (self.layout.data if gathers else 1)
        return loss_buffers(self._division, samples=samples, sample_shape=self._shape)

    def _buffers(self, kept: Kept, stages: tuple[int, ...], live: Counts) -> int:
        """What stages receive and send, except for inputs that are counted as activations.

        torch's pipelines allocate what each stage receives for all microbatches, in both directions, and
        keep the outputs of live microbatches. gloo also holds what a schedule sends in single messages until
        the step ends; NCCL lets it go.
        """
        if self.layout.pipeline == 1:
            return 0
        states, last = kept.states, self.layout.pipeline * stages_per_rank(self._config.strategy) - 1
        blocks, count = self._division.blocks, self._microbatches
        holds = self._config.device == "cpu" and schedule_of(self._config.strategy).two_way
        total = 0
        for stage, alive in zip(stages, live, strict=True):
            ended = count - alive
            if stage > 0:
                inside = stage - 1 in stages
                total += states[blocks[stage].start] * (count if inside else ended + holds * ended)
            if stage < last:
                inside = stage + 1 in stages
                total += states[blocks[stage].stop] * (count if inside else count + alive + holds * ended)
        return total


def text_table(plan: MemoryPlan) -> list[str]:
    """Lines for a terminal: the kinds on the fullest device, the sum, and what is left out."""
    fullest = plan.fullest
    kinds = {kind: size for kind, size in fullest.kinds.items() if size}
    role = f" ({fullest.role})" if fullest.role else ""
    alike = sum(held.total == fullest.total for held in plan.devices)
    others = f", as {alike} of {len(plan.devices)} devices do" if alike > 1 else ""
    lines = [f"device {fullest.device}{role} needs most{others}, {fullest.moment}:"]
    rows = [(kind, f"{size_text(count):>11}") for kind, count in {**kinds, "sum": fullest.total}.items()]
    lines += [f"  {row}" for row in aligned(rows, right=())]
    lines += [f"  without: {clause}" for clause in plan.unknown]
    return lines + [f"  unproven: {clause}" for clause in plan.unproven]
