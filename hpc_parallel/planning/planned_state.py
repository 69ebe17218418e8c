"""The bytes of parameters, gradients and optimizer state on every device, exactly.

`rank_state_bytes` of `summary.json` has the measured bytes (`training/state_bytes.py`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property

from hpc_parallel.config.optimizer_rules import Settings, settings_for
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.layout.holdings import (
    COPY,
    EXPERTS,
    GRADIENTS,
    LAYER,
    MEAN,
    SLICE,
    STAGE,
    STATE,
    WEIGHTS,
    Holding,
    Part,
)
from hpc_parallel.layout.layout import Layout
from hpc_parallel.layout.model_weights import STEM, ModelWeights, Weight
from hpc_parallel.layout.schedules import stages_per_rank
from hpc_parallel.layout.stage_cuts import divide_blocks
from hpc_parallel.planning.optimizer_state import KINDS, Place, Shape, owners

WHOLE = Part()
WHOLE_KINDS = frozenset(target for target, kind in KINDS.items() if kind.whole)


@dataclass(frozen=True)
class StateBytes:
    """Bytes that a device holds from the backward pass to the update, by the names of `rank_state_bytes`."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0


@dataclass(frozen=True)
class Division:
    """How a layout divides a model's weights. Raises ConfigError for more stages than blocks."""

    config: RunConfig
    layout: Layout
    model: ModelWeights
    _firsts: dict[Hashable, list[int]] = field(default_factory=dict, repr=False)
    _settings: dict[tuple[str, int], Settings] = field(default_factory=dict, repr=False)

    @property
    def number_bytes(self) -> int:
        """Bytes of one number of a weight, of its gradient and of its state."""
        return 8 if self.config.training.precision == "float64" else 4

    @cached_property
    def blocks(self) -> list[range]:
        """The blocks of each stage."""
        strategy, model = self.config.strategy, self.model
        if self.layout.pipeline == 1:
            return [range(model.blocks)]
        costs = model.numbers if strategy.balance == "parameters" else model.flops
        stages = self.layout.pipeline * stages_per_rank(strategy)
        return divide_blocks(costs, stages=stages, options=strategy)

    def weights(self, stages: tuple[int, ...]) -> list[Weight]:
        """The weights of a rank with these stages, in order."""
        return [weight for stage in stages for weight in self.model.stage(self.blocks[stage])]

    def optimized(self, stages: tuple[int, ...]) -> list[Weight]:
        """As `weights`, without the second copy of a tied weight, which follows the first (`TiedEnds`)."""
        weights = self.weights(stages)
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
        experts = weight.of_experts and self.layout.expert > 1
        return self.layout.by_fully_shard or self.layout.tensor > 1 or experts

    def local_shape(self, weight: Weight, holding: Holding) -> Shape:
        """The shape of a device's part of `weight`; fully_shard slices what the other axes leave."""
        first, *others = self.unsliced_shape(weight, holding)
        return chunk(first, holding.model.get(SLICE, WHOLE)), *others

    def unsliced_shape(self, weight: Weight, holding: Holding) -> Shape:
        """The shape of a device's part of `weight` while fully_shard has gathered its slices."""
        shape, parts = list(weight.shape), holding.model
        if weight.tensor_dim is not None:
            shape[weight.tensor_dim] = chunk(shape[weight.tensor_dim], parts.get(LAYER, WHOLE))
        if weight.of_experts:
            shape[0] = chunk(shape[0], parts.get(EXPERTS, WHOLE))
        return tuple(shape)

    def alike(self, stages: tuple[int, ...], holding: Holding) -> Hashable:
        """A key that is equal for devices whose parts of these stages have the same shapes."""
        slices, layer, experts = (holding.model.get(kind, WHOLE) for kind in (SLICE, LAYER, EXPERTS))
        key = (stages, layer.indices, experts.indices)
        if key not in self._firsts:
            weights = self.weights(stages)
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

    def place(self, holding: Holding) -> Place:
        """The position of a device on the axes that split weights."""
        return tuple(holding.model.get(kind, WHOLE).indices[0] for kind in (SLICE, EXPERTS, LAYER))

    def degrees(self, weight: Weight, holding: Holding) -> Place:
        """The degree of each axis of `place`; 1 for an axis that does not split this weight."""
        slices, experts, tensor = (holding.model.get(kind, WHOLE).of for kind in (SLICE, EXPERTS, LAYER))
        return slices, experts if weight.of_experts else 1, 1 if weight.tensor_dim is None else tensor


class States:
    """The state of each device of a division."""

    def __init__(self, division: Division) -> None:
        self._division = division
        self._owned_by_stages: dict[tuple[int, ...], dict[Place, dict[Place, int]]] = {}

    @property
    def unknown(self) -> list[str]:
        """Optimizers whose state is not known. Their state counts as 0 bytes."""
        return sorted(self._targets - KINDS.keys())

    @property
    def has_owners(self) -> bool:
        """Whether some weights have an owner: one of the ranks that hold parts, which alone updates them."""
        return not WHOLE_KINDS.isdisjoint(self._targets) and any(
            map(self._has_owner, self._division.model.weights)
        )

    @cached_property
    def _targets(self) -> set[str]:
        """The optimizers of all weights."""
        return {self._division.settings(weight).target for weight in self._division.model.weights}

    def alike(self, holding: Holding) -> Hashable:
        """A key that is equal for devices that hold the same."""
        stages = holding.model.get(STAGE, WHOLE).indices
        shapes = self._division.alike(stages, holding)
        return shapes, self._owned_bytes(holding), holding.keeps, holding.samples is None

    def of(self, holding: Holding) -> StateBytes:
        """What the device of `holding` keeps from the backward pass to the update."""
        stages = holding.model.get(STAGE, WHOLE).indices
        division, keeps = self._division, {*holding.keeps}
        parameters = sum(
            math.prod(division.local_shape(weight, holding)) for weight in division.weights(stages)
        )
        optimized = division.optimized(stages)
        gradients = sum(math.prod(division.gradient_shape(weight, holding)) for weight in optimized)
        return StateBytes(
            parameters * division.number_bytes if keeps & {WEIGHTS, COPY} else 0,
            gradients * division.number_bytes if keeps & {GRADIENTS, MEAN} else 0,
            self._optimizer(optimized, holding) if STATE in keeps else 0,
        )

    def _optimizer(self, weights: list[Weight], holding: Holding) -> int:
        division, total = self._division, self._owned_bytes(holding)
        for weight in weights:
            settings = division.settings(weight)
            kind = KINDS.get(settings.target)
            if kind is not None and not self._has_owner(weight):
                shape = weight.shape if kind.whole else division.local_shape(weight, holding)
                total += kind.state_bytes(shape, settings.options, number_bytes=division.number_bytes)
        return total

    def _has_owner(self, weight: Weight) -> bool:
        """Whether only one of the ranks that hold parts of `weight` updates it."""
        if WHOLE_KINDS.isdisjoint(self._targets):
            return False
        return self._division.distributed(weight) and self._division.settings(weight).target in WHOLE_KINDS

    def _owned_bytes(self, holding: Holding) -> int:
        """The state of the weights that the device of `holding` owns."""
        place, total = self._division.place(holding), 0
        for degrees, bytes_by_owner in self._owned(holding).items():
            masked = tuple(index if degree > 1 else 0 for index, degree in zip(place, degrees, strict=True))
            total += bytes_by_owner.get(masked, 0)
        return total

    def _owned(self, holding: Holding) -> dict[Place, dict[Place, int]]:
        """The bytes of each owner, by the degrees of the axes that split its weights."""
        stages = holding.model.get(STAGE, WHOLE).indices
        if stages in self._owned_by_stages:
            return self._owned_by_stages[stages]
        division = self._division
        groups: defaultdict[str, list[Weight]] = defaultdict(list)
        for weight in filter(self._has_owner, division.optimized(stages)):
            groups[repr(division.settings(weight))].append(weight)
        owned: dict[Place, dict[Place, int]] = {}
        for weights in groups.values():
            settings = division.settings(weights[0])
            degrees = [division.degrees(weight, holding) for weight in weights]
            chosen = owners(zip((weight.numel for weight in weights), degrees, strict=True))
            for weight, split, owner in zip(weights, degrees, chosen, strict=True):
                size = KINDS[settings.target].state_bytes(
                    weight.shape, settings.options, number_bytes=division.number_bytes
                )
                table = owned.setdefault(split, {})
                table[owner] = table.get(owner, 0) + size
        self._owned_by_stages[stages] = owned
        return owned


def chunk(length: int, part: Part) -> int:
    """The length of a part of a dim that is split as torch.chunk splits it."""
    step = -(-length // part.of)
    return max(0, min(step, length - part.indices[0] * step))
