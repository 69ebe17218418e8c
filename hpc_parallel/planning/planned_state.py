"""The bytes of parameters, gradients and optimizer state on every device, exactly.

`rank_state_bytes` of `summary.json` has the measured bytes (`Step.state_by_rank`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hpc_parallel.config.optimizer_rules import Settings, settings_for
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.layout.holdings import (
    COPY,
    EXPERT_SLICE,
    EXPERTS,
    GRADIENTS,
    LAYER,
    MEAN,
    SLICE,
    STATE,
    WEIGHTS,
    Holding,
    Part,
    Place,
    owners,
)
from hpc_parallel.layout.layout import Layout
from hpc_parallel.layout.model_weights import STEM, ModelWeights, Weight
from hpc_parallel.layout.schedules import stages_per_rank
from hpc_parallel.layout.stage_cuts import divide_blocks
from hpc_parallel.layout.step_facts import UPDATED_AT_ONCE, rounded_parts, state_bytes, weight_bytes
from hpc_parallel.record.endings import RankState

WHOLE = Part()
STEP_BYTES = 4  # a count in float32
ROUNDED_NUMBER_BYTES = 40  # of a number while it is updated: widened, with its gradient, moments and noise
Shape = tuple[int, ...]
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Division:
    """How a layout divides a model's weights. Raises ConfigError for more stages than blocks."""

    config: RunConfig
    layout: Layout
    model: ModelWeights
    _firsts: dict[Hashable, list[int]] = field(default_factory=dict, repr=False)
    _settings: dict[tuple[str, int], Settings] = field(default_factory=dict, repr=False)

    @cached_property
    def blocks(self) -> list[range]:
        strategy, model = self.config.strategy, self.model
        if self.layout.pipeline == 1:
            return [range(model.blocks)]
        costs = model.numbers if strategy.balance == "parameters" else model.flops
        stages = self.layout.pipeline * stages_per_rank(strategy)
        return divide_blocks(costs, stages=stages, options=strategy)

    def weights(self, holding: Holding) -> list[Weight]:
        """The weights of a rank with the stages of `holding`, in order."""
        return [weight for stage in holding.stages for weight in self.model.stage(self.blocks[stage])]

    def optimized(self, holding: Holding) -> list[Weight]:
        """As `weights`, without the second copy of a tied weight, which follows the first (`TiedEnds`)."""
        weights = self.weights(holding)
        names = {weight.name for weight in weights}
        return [weight for weight in weights if self.model.tied.get(weight.name) not in names]

    def settings(self, weight: Weight) -> Settings:
        """How the optimizer updates `weight`; a copy of a tied weight has the settings of the original."""
        optimizer, dims = self.config.optimizer, len(weight.shape)
        name = self.model.tied.get(weight.name, weight.name) if optimizer.groups else ""  # for the rules
        if (name, dims) not in self._settings:
            self._settings[name, dims] = settings_for(name, dims, optimizer)
        return self._settings[name, dims]

    def distributed(self, weight: Weight) -> bool:
        """Whether `weight` is a DTensor, so that ranks may hold parts of it."""
        return self.layout.by_fully_shard or self.layout.tensor > 1 or self.by_experts(weight)

    def local_shape(self, weight: Weight, holding: Holding) -> Shape:
        """The shape of a device's part of `weight`; fully_shard slices what the other axes leave."""
        shape, split = list(self.unsliced_shape(weight, holding)), self.by_experts(weight)
        dim = weight.sliced_dim if split else 0
        shape[dim] = chunk(shape[dim], _slices(holding, of_experts=split))
        return tuple(shape)

    def by_experts(self, weight: Weight) -> bool:
        return weight.of_experts and self.layout.expert > 1

    def unsliced_shape(self, weight: Weight, holding: Holding) -> Shape:
        """The shape of a device's part of `weight` while fully_shard has gathered its slices."""
        shape, parts = list(weight.shape), holding.model
        if weight.tensor_dim is not None:
            shape[weight.tensor_dim] = chunk(shape[weight.tensor_dim], parts.get(LAYER, WHOLE))
        if weight.of_experts:
            shape[0] = chunk(shape[0], parts.get(EXPERTS, WHOLE))
        return tuple(shape)

    def alike(self, holding: Holding) -> Hashable:
        """A key that is equal for devices whose parts of the same stages have the same shapes."""
        slices, layer, experts = (holding.model.get(kind, WHOLE) for kind in (SLICE, LAYER, EXPERTS))
        key = (holding.stages, layer.indices, experts.indices)
        if key not in self._firsts:
            weights = self.weights(holding)
            self._firsts[key] = sorted({self.unsliced_shape(weight, holding)[0] for weight in weights})
        return (*key, *(chunk(first, slices) for first in self._firsts[key]))

    def gradient_shape(self, weight: Weight, holding: Holding) -> Shape:
        """The shape of the rank's part, except for an embedding that is split by rows.

        The embedding's gradient is a whole matrix, this rank's term of a sum, until fully_shard or the
        exchange of tied weights makes a slice of it.
        """
        layout, tied = self.layout, self.model.tied
        rows = weight.part == STEM and layout.tensor > 1 and not layout.by_fully_shard
        return (
            weight.shape if rows and weight.name not in tied.values() else self.local_shape(weight, holding)
        )

    def rounded_update(self, holding: Holding) -> int:
        """What an update needs that is rounded to bfloat16 afterwards (`training/optimizer.py`)."""
        if rounded_parts(self.config) is None:
            return 0
        largest = max(math.prod(self.local_shape(weight, holding)) for weight in self.optimized(holding))
        at_once = UPDATED_AT_ONCE["cpu" if self.config.device == "cpu" else "cuda"]
        return ROUNDED_NUMBER_BYTES * min(at_once, largest)

    def place(self, holding: Holding, *, of_experts: bool) -> Place:
        """The position of a device on the axes that split weights, or the experts of an expert axis."""
        return tuple(part.indices[0] for part in _parts(holding, of_experts=of_experts))

    def degrees(self, weight: Weight, holding: Holding) -> Place:
        """The degree of each axis of `place`; 1 for an axis that does not split this weight."""
        slices, experts, tensor = (part.of for part in _parts(holding, of_experts=self.by_experts(weight)))
        return slices, experts if weight.of_experts else 1, 1 if weight.tensor_dim is None else tensor


def _parts(holding: Holding, *, of_experts: bool) -> tuple[Part, Part, Part]:
    experts, layer = (holding.model.get(kind, WHOLE) for kind in (EXPERTS, LAYER))
    return _slices(holding, of_experts=of_experts), experts, layer


def _slices(holding: Holding, *, of_experts: bool) -> Part:
    return holding.model.get(EXPERT_SLICE if of_experts else SLICE, WHOLE)


class States:
    """The state of each device of a division."""

    def __init__(self, division: Division) -> None:
        self._division, self._number_bytes = division, state_bytes(division.config)
        self._weight_bytes = weight_bytes(division.config)
        self._owned_by_stages: dict[tuple[int, ...], dict[tuple[bool, Place], dict[Place, int]]] = {}

    @property
    def unknown(self) -> list[str]:
        """Optimizers whose state is not known. Their state counts as 0 bytes."""
        return sorted(self._targets - KINDS.keys())

    @property
    def has_owners(self) -> bool:
        """Whether some weights have an owner: one of the ranks that hold parts, which alone updates them."""
        return any(map(self._has_owner, self._division.model.weights))

    @cached_property
    def _targets(self) -> set[str]:
        return {self._division.settings(weight).target for weight in self._division.model.weights}

    def alike(self, holding: Holding) -> Hashable:
        """A key that is equal for devices that hold the same."""
        shapes, owned = self._division.alike(holding), self._owned_bytes(holding)
        return shapes, owned, holding.keeps, holding.samples is None

    def of(self, holding: Holding) -> RankState:
        """What the device of `holding` keeps from the backward pass to the update."""
        division, keeps = self._division, {*holding.keeps}
        parameters = sum(
            math.prod(division.local_shape(weight, holding)) for weight in division.weights(holding)
        )
        optimized = division.optimized(holding)
        gradients = sum(math.prod(division.gradient_shape(weight, holding)) for weight in optimized)
        return RankState(
            parameters * self._weight_bytes if keeps & {WEIGHTS, COPY} else 0,
            gradients * self._weight_bytes if keeps & {GRADIENTS, MEAN} else 0,
            self._optimizer(optimized, holding) if STATE in keeps else 0,
        )

    def _optimizer(self, weights: list[Weight], holding: Holding) -> int:
        division, total = self._division, self._owned_bytes(holding)
        for weight in weights:
            settings = division.settings(weight)
            kind = KINDS.get(settings.target)
            if kind is not None and not self._has_owner(weight):
                shape = weight.shape if kind.whole else division.local_shape(weight, holding)
                total += kind.state_bytes(shape, settings.options, number_bytes=self._number_bytes)
        return total

    def _has_owner(self, weight: Weight) -> bool:
        """Whether only one of the ranks that hold parts of `weight` updates it."""
        if WHOLE_KINDS.isdisjoint(self._targets):
            return False
        return self._division.distributed(weight) and self._division.settings(weight).target in WHOLE_KINDS

    def _owned_bytes(self, holding: Holding) -> int:
        """The state of the weights that the device of `holding` owns."""
        total = 0
        for (of_experts, degrees), bytes_by_owner in self._owned(holding).items():
            place = self._division.place(holding, of_experts=of_experts)
            masked = tuple(index if degree > 1 else 0 for index, degree in zip(place, degrees, strict=True))
            total += bytes_by_owner.get(masked, 0)
        return total

    def _owned(self, holding: Holding) -> dict[tuple[bool, Place], dict[Place, int]]:
        """The bytes of each owner, by the degrees of the axes that split its weights.

        With the degrees: whether they are experts of an expert axis, which have owners of their own.
        """
        if holding.stages in self._owned_by_stages:
            return self._owned_by_stages[holding.stages]
        division = self._division
        groups: defaultdict[tuple[str, bool], list[Weight]] = defaultdict(list)
        for weight in filter(self._has_owner, division.optimized(holding)):
            groups[repr(division.settings(weight)), division.by_experts(weight)].append(weight)
        owned: dict[tuple[bool, Place], dict[Place, int]] = {}
        for (_, of_experts), weights in groups.items():
            settings = division.settings(weights[0])
            degrees = [division.degrees(weight, holding) for weight in weights]
            chosen = owners(("", weight.numel, split) for weight, split in zip(weights, degrees, strict=True))
            for weight, split, owner in zip(weights, degrees, chosen, strict=True):
                size = KINDS[settings.target].state_bytes(
                    weight.shape, settings.options, number_bytes=self._number_bytes
                )
                table = owned.setdefault((of_experts, split), {})
                table[owner] = table.get(owner, 0) + size
        self._owned_by_stages[holding.stages] = owned
        return owned


def chunk(length: int, part: Part) -> int:
    """The length of a part of a dim that is split as torch.chunk splits it."""
    step = -(-length // part.of)
    return max(0, min(step, length - part.indices[0] * step))


@dataclass(frozen=True)
class OptimizerKind:
    """A class of torch.optim, as `training/optimizer.py` uses it.

    kept: how many numbers it keeps for a weight, from the weight's shape and the options of the class.
    counts: whether it also counts the steps of each weight. whole: whether it needs whole weights; then one
    device, the owner, updates each split weight.
    """

    kept: Callable[[Shape, Options], int]
    counts: bool
    whole: bool = False

    def state_bytes(self, shape: Shape, options: Options, *, number_bytes: int) -> int:
        """The bytes that it keeps for a weight, or for a slice of a weight."""
        return self.kept(shape, options) * number_bytes + STEP_BYTES * self.counts


def _adam(shape: Shape, options: Options) -> int:
    return (3 if options.get("amsgrad") else 2) * math.prod(shape)


def _adafactor(shape: Shape, _: Options) -> int:
    """One row and one column of each matrix (Shazeer and Stern 2018)."""
    numbers = math.prod(shape)
    return numbers // shape[-1] + numbers // shape[-2] if len(shape) > 1 else numbers


KINDS = {
    "torch.optim.AdamW": OptimizerKind(_adam, counts=True),
    "torch.optim.Adam": OptimizerKind(_adam, counts=True),
    "torch.optim.SGD": OptimizerKind(
        lambda shape, options: math.prod(shape) if options.get("momentum") else 0, counts=False
    ),
    "torch.optim.Adafactor": OptimizerKind(_adafactor, counts=True, whole=True),
    "torch.optim.Muon": OptimizerKind(lambda shape, _: math.prod(shape), counts=False, whole=True),
}
WHOLE_KINDS = frozenset(target for target, kind in KINDS.items() if kind.whole)
