"""What each device holds: its part of the model, of the optimizer state and of each batch.

`Setup` has the parts of a configuration that decide it, and what devices send (`exchanges.py`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapreplace
from itertools import product
from typing import TYPE_CHECKING, Any

from hpc_parallel.layout.axes import BATCH_AXES, DECLARED, SAMPLE_AXES
from hpc_parallel.layout.counts import reads
from hpc_parallel.layout.layout import DATAPARALLEL, PARAMETER_SERVER, SPMD, Layout, servers, tile_grid
from hpc_parallel.layout.model_data_schema import ConvNetConfig, HuggingFaceConfig, MoeTransformerConfig
from hpc_parallel.layout.schedules import schedule_of, stages_of, stages_per_rank

if TYPE_CHECKING:
    from hpc_parallel.config.schema import StrategyConfig

WEIGHTS, COPY, GRADIENTS, MEAN, STATE, SHARED = (
    "weights", "a copy of the weights", "gradients", "the mean gradient", "optimizer state",
    "shared with the first device",
)  # fmt: skip
Place = tuple[int, ...]  # a position on the axes of a mesh; 0 on the axes that do not split the weight
MOST_RUNS = 8  # ranges of numbers in one text
ALL = (WEIGHTS, GRADIENTS, STATE)
SERVER, WORKER, BOTH = "server", "worker", "server and worker"
FIRST, OTHER = "first device", "replica"
STAGE, LAYER, SLICE, EXPERTS, EXPERT_SLICE = (
    "stage", "layer", "slice", "experts", "slice of the experts",
)  # fmt: skip # of the model
BATCH, SEQUENCE, ROW, COLUMN = "batch", "sequence", "row", "column"  # of the samples


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model. A fact that the configuration does not state is None.

    reads: `text` or `images`. tied: stem and head share a weight. batch_norm: it has BatchNorm layers.
    whole_head: the head of a model of images needs the whole image. balanced: its routers have a loss that
    balances whole sequences. loads: it counts the load of each expert.
    """

    reads: str | None = None
    tied: bool | None = None
    batch_norm: bool | None = None
    whole_head: bool | None = None
    balanced: bool = False
    loads: bool = False


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
        if self.layout.pipeline > 1 and not schedule_of(self.strategy).known:
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
        balanced = model["_target_"] == MoeTransformerConfig._target_ and bool(model["balance"])
        loads = bool(model.get("balance_step"))
        return ModelFacts(kind, tied=_tied(model), batch_norm=False, balanced=balanced, loads=loads)
    return ModelFacts()


def _tied(model: Mapping[str, Any]) -> bool | None:
    if model["_target_"] == HuggingFaceConfig._target_:
        settings = model.get("config")
        tied = settings.get("tie_word_embeddings") if isinstance(settings, dict) else None
    else:
        tied = model.get("tied_head")
    return tied if isinstance(tied, bool) else None


@dataclass(frozen=True)
class Part:
    """The parts `indices` out of `of` parts. All parts are equal unless `strategy.shares` is set."""

    indices: tuple[int, ...] = (0,)
    of: int = 1

    def __str__(self) -> str:
        return f"{ranges(self.indices)} of {self.of}"


@dataclass(frozen=True)
class Holding:
    """What a device holds, or what devices in a row hold together.

    devices: the first and the last device. keeps: which of the weights, gradients and optimizer state.
    model: the parts of the model that it keeps, by STAGE, LAYER, SLICE, EXPERTS and EXPERT_SLICE (of its part
    of the experts), if they are split. With EXPERTS, SLICE is of the other weights.
    samples: the parts of each global batch that it works on, by BATCH, SEQUENCE, ROW and COLUMN (of the tiles
    of an image), if they are split; None if it works on none.
    """

    devices: tuple[int, int]
    role: str
    keeps: tuple[str, ...]
    model: dict[str, Part]
    samples: dict[str, Part] | None

    @cached_property
    def stages(self) -> tuple[int, ...]:
        return self.model.get(STAGE, Part()).indices

    @property
    def model_text(self) -> str:
        phrases = {
            STAGE: "stage{s} {}", LAYER: "part{s} {} of each layer", SLICE: "slice{s} {} of each weight",
            EXPERTS: "part{s} {} of the experts", EXPERT_SLICE: "slice{s} {} of each of their weights",
        }  # fmt: skip
        if EXPERTS in self.model:
            phrases[SLICE] = "slice{s} {} of all but the experts"
        parts = [_counted(phrases[kind], part) for kind, part in self.model.items()]
        if parts and set(self.model) == {EXPERTS}:
            parts.insert(0, "all but the experts")
        parts = parts or ["the whole model"]
        return ", ".join(parts) if self.keeps == ALL else f"{', '.join(parts)} ({', '.join(self.keeps)})"

    @property
    def samples_text(self) -> str:
        if self.samples is None:
            return "no samples"
        phrases = {
            BATCH: "part{s} {} of the batch", SEQUENCE: "slice{s} {} of each sequence",
            ROW: "tile row{s} {}", COLUMN: "tile column{s} {} of each image",
        }  # fmt: skip
        parts = [_counted(phrases[kind], part) for kind, part in self.samples.items()]
        return ", ".join(parts) or "the whole batch"


def holdings(setup: Setup, *, most: int | None = None) -> list[Holding]:
    """What the devices hold, in order of their number.

    most: the largest number of entries; neighbours on the innermost axes are merged until the entries fit.
    """
    layout, block, served = setup.layout, 1, servers(setup.strategy)
    for degree in reversed(layout.degrees.values()):
        if most is None or layout.devices // block + served <= most:
            break
        block *= degree
    rows = [
        _together([_holding(setup, position) for position in range(start, start + block)])
        for start in range(0, layout.devices, block)
    ]
    return [Holding((0, 0), SERVER, (WEIGHTS, MEAN, STATE), {}, None)] * served + rows


def first_holdings(setup: Setup) -> list[Holding]:
    """What the first device of each pipeline rank holds: uneven parts are largest there. No servers."""
    layout = setup.layout
    return [_holding(setup, at) for at in range(0, layout.devices, layout.devices // layout.pipeline)]


def sliced_over(layout: Layout, *, of_experts: bool = False) -> tuple[str, ...]:
    """The axes over which fully_shard slices the weights, as `strategies/mesh.py:slicing_axis`.

    of_experts: over which it slices the experts that the expert axis gives to a device.
    """
    if not layout.by_fully_shard:
        return ()
    axes = ("shard", *SAMPLE_AXES) if of_experts else ("shard", "expert", *SAMPLE_AXES)
    return tuple(axis for axis in axes if layout.degrees[axis] > 1)


def _holding(setup: Setup, position: int) -> Holding:
    device = position + servers(setup.strategy)
    role, keeps = _role(setup, position)
    places = setup.layout.coordinates(position)
    return Holding((device, device), role, keeps, _model(setup, places), _samples(setup, places))


def _role(setup: Setup, position: int) -> tuple[str, tuple[str, ...]]:
    strategy = setup.strategy
    if strategy.execution == DATAPARALLEL:
        copies = (SHARED,) if setup.gpus is False else (COPY, GRADIENTS)  # threads share the model
        return (FIRST, ALL) if position == 0 else (OTHER, copies)
    if strategy.execution == PARAMETER_SERVER:
        both = position == 0 and not strategy.dedicated_server
        return (BOTH, ALL) if both else (WORKER, (COPY, GRADIENTS))
    return "", ALL


def _model(setup: Setup, places: Mapping[str, int]) -> dict[str, Part]:
    strategy, layout = setup.strategy, setup.layout
    parts: dict[str, Part] = {}
    if layout.pipeline > 1:
        stages = stages_of(
            places["pipeline"], degree=layout.pipeline, per_rank=stages_per_rank(strategy),
            v_shaped=schedule_of(strategy).v_shaped,
        )  # fmt: skip
        parts[STAGE] = Part(tuple(stages), len(stages) * layout.pipeline)
    parts[LAYER] = Part((places["tensor"],), layout.tensor)
    parts[SLICE] = _place(sliced_over(layout), layout=layout, places=places)
    parts[EXPERTS] = Part((places["expert"],), layout.expert)
    if layout.expert > 1:
        parts[EXPERT_SLICE] = _place(sliced_over(layout, of_experts=True), layout=layout, places=places)
    return {kind: part for kind, part in parts.items() if part.of > 1}


def _samples(setup: Setup, places: Mapping[str, int]) -> dict[str, Part]:
    layout = setup.layout
    parts: dict[str, Part] = {}
    if layout.data > 1:
        parts[BATCH] = _place(BATCH_AXES, layout=layout, places=places)
    if layout.context > 1:
        early, late = places["context"], 2 * layout.context - 1 - places["context"]  # ring.py:slices_of
        parts[SEQUENCE] = Part((early, late), 2 * layout.context)
    if layout.tile > 1:
        rows, columns = tile_grid(layout.tile, setup.strategy.tile_grid)
        row, column = divmod(places["tile"], columns)
        parts |= {ROW: Part((row,), rows), COLUMN: Part((column,), columns)}
    return parts


def _place(axes: Sequence[str], *, layout: Layout, places: Mapping[str, int]) -> Part:
    """The position on several axes, taken as one axis."""
    index, degree, degrees = 0, 1, layout.degrees
    for axis in axes:
        index, degree = index * degrees[axis] + places[axis], degree * degrees[axis]
    return Part((index,), degree)


def _together(rows: Sequence[Holding]) -> Holding:
    """What devices in a row hold together."""
    first, last = rows[0], rows[-1]
    keeps = tuple(dict.fromkeys(kept for row in rows for kept in row.keeps))
    roles = dict.fromkeys(row.role for row in rows)
    return Holding(
        (first.devices[0], last.devices[1]),
        ", ".join(roles),
        keeps,
        {kind: _union([row.model[kind] for row in rows]) for kind in first.model},
        {kind: _union([(row.samples or {})[kind] for row in rows]) for kind in first.samples or {}},
    )


def _union(parts: Sequence[Part]) -> Part:
    return Part(tuple(sorted({index for part in parts for index in part.indices})), parts[0].of)


def _counted(phrase: str, part: Part) -> str:
    return phrase.format(part, s="s" * (len(part.indices) > 1))


def ranges(numbers: Sequence[int]) -> str:
    """`0, 2-5` for ascending numbers; `0, 8, ..., 504` if there are many gaps."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number, number])
    texts = [str(a) if a == b else f"{a}-{b}" if b - a > 1 else f"{a}, {b}" for a, b in runs]
    return ", ".join(texts if len(texts) <= MOST_RUNS else [*texts[:2], "...", texts[-1]])


def owners(weights: Iterable[tuple[Hashable, int, Sequence[int]]]) -> list[Place]:
    """The owner of each weight: the one rank that updates it, where several ranks hold its slices.

    The owners of one mesh have equally many numbers. weights: for each weight, its mesh, how many numbers it
    has, and the degree of each axis of its mesh (1 for an axis that does not split the weight).
    """
    loads: defaultdict[tuple[Hashable, Place], int] = defaultdict(int)
    queues: dict[Hashable, list[tuple[int, int, Place]]] = {}  # load, number and place; loads may be outdated
    chosen = []
    for mesh, numbers, degrees in weights:
        places = enumerate(product(*map(range, degrees)))
        queue = queues.setdefault((mesh, *degrees), [(0, number, place) for number, place in places])
        while queue[0][0] != loads[mesh, queue[0][2]]:
            heapreplace(queue, (loads[mesh, queue[0][2]], *queue[0][1:]))
        owner = queue[0][2]
        loads[mesh, owner] += numbers
        chosen.append(owner)
    return chosen
