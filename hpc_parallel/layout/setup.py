"""The parts of a configuration that decide what each rank holds, sends and receives, read without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_parallel.layout.axes import DECLARED
from hpc_parallel.layout.counts import reads
from hpc_parallel.layout.layout import SPMD, Layout
from hpc_parallel.layout.model_data_schema import ConvNetConfig, HuggingFaceConfig
from hpc_parallel.layout.schedules import SCHEDULES

if TYPE_CHECKING:
    from hpc_parallel.config.schema import StrategyConfig


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model. A fact that the configuration does not state is None.

    reads: `text` or `images`. tied: stem and head share a weight. batch_norm: it has BatchNorm layers.
    whole_head: the head of a model of images needs the whole image.
    """

    reads: str | None = None
    tied: bool | None = None
    batch_norm: bool | None = None
    whole_head: bool | None = None


@dataclass(frozen=True)
class Setup:
    """A strategy, its layout, the model, and whether the devices are GPUs (None: unknown)."""

    strategy: StrategyConfig
    layout: Layout
    model: ModelFacts = ModelFacts()
    gpus: bool | None = None

    @property
    def uncovered(self) -> str | None:
        """Why this combination is not covered, in one clause; None if it can run."""
        degrees = self.layout.degrees
        used = [axis for axis in DECLARED if degrees[axis.name] > 1]
        if self.strategy.execution != SPMD and any(axis.name != "replicate" for axis in used):
            return f"execution={self.strategy.execution} has whole replicas only"
        if self.layout.pipeline > 1 and self.strategy.schedule not in SCHEDULES:
            return "the schedule is unknown"
        if self.layout.tile > 1 and not self._grid_fits:
            return "the grid does not have one tile for each device"
        for axis in used:
            if axis.reads is not None and self.model.reads not in (None, axis.reads):
                return f"{axis.name} splits {axis.reads}, and the model reads {self.model.reads}"
            for other in axis.apart:
                if degrees[other] > 1:
                    return f"{axis.name} and {other} can't be combined"
        return None

    @property
    def _grid_fits(self) -> bool:
        grid = self.strategy.tile_grid
        return grid is None or (len(grid) == 2 and min(grid) > 0 and math.prod(grid) == self.layout.tile)


def model_facts(model: Any) -> ModelFacts:
    """The facts of a recorded `model`, which may be of any type."""
    kind = reads(model)
    if kind == "images":
        whole_head = model["_target_"] == ConvNetConfig._target_
        return ModelFacts(kind, tied=False, batch_norm=True, whole_head=whole_head)
    if kind == "text":
        return ModelFacts(kind, tied=_tied(model), batch_norm=False)
    return ModelFacts()


def _tied(model: Mapping[str, Any]) -> bool | None:
    if model["_target_"] == HuggingFaceConfig._target_:
        settings = model.get("config")
        tied = settings.get("tie_word_embeddings") if isinstance(settings, dict) else None
    else:
        tied = model.get("tied_head")
    return tied if isinstance(tied, bool) else None
