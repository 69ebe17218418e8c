"""A small run for `verify.py`: few blocks, short sequences, few samples, float64, random weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.data.sampler import Data, to_device
from hpc_parallel.layout.batch_plan import Plan
from hpc_parallel.layout.layout import DATAPARALLEL, Layout, divisors, layout_of, share_of
from hpc_parallel.layout.schedules import stages_per_rank
from hpc_parallel.layout.step_facts import packs
from hpc_parallel.models.drawn_weights import tensor_seed
from hpc_parallel.models.layered import LayeredModel, part_of
from hpc_parallel.strategies import packed_documents
from hpc_parallel.strategies.dropout.dropout_shapes import dry_pass
from hpc_parallel.strategies.whole_model import build_small_sizes

FEW_BLOCKS = 4
MOST_REPLICAS = 8  # this many have samples of their own; further replicas repeat these samples
LEAST_POSITIONS = 16
SAMPLES = 3  # in a microbatch of a replica; BatchNorm needs two, but turns any two into +1 and -1
STEPS = 2  # the second step sees what the first step has written


@dataclass(frozen=True)
class SmallRun:
    """A small copy of a run.

    config: the run's configuration, with SAMPLES samples in each microbatch and without compilation.
    inputs, targets: [STEPS * microbatches * distinct * SAMPLES, ...]; each microbatch has SAMPLES samples for
    each of `distinct` replicas.
    sequence: one sample of the run's own length [1, seq], if the layout splits sequences.
    """

    config: RunConfig
    layout: Layout
    inputs: Tensor
    targets: Tensor
    microbatches: int
    distinct: int
    device: torch.device
    sequence: Tensor | None = None

    @classmethod
    def of(
        cls, config: RunConfig, *, plan: Plan, model: LayeredModel, data: Data, device: torch.device
    ) -> SmallRun:
        """Take the first training samples, with sequences as short as the layout and the model allow.

        `plan`: the plan of the run. `model`: from `build_small`.
        """
        layout = plan.layout
        # A pipeline's schedule needs all its microbatches. Without a pipeline, two show the accumulation.
        microbatches = plan.batch.microbatches if layout.pipeline > 1 else 2
        distinct = max(count for count in divisors(layout.data) if count <= MOST_REPLICAS)
        count = STEPS * microbatches * distinct * SAMPLES
        indices = np.arange(count, dtype=np.int64) % len(data.train)
        inputs, targets = data.train.batch(indices)
        tokens = inputs[..., 0] if packs(config) else inputs
        sequence = tokens[:1] if layout.context > 1 else None
        if tokens.dim() == 2 and targets.shape[:2] == inputs.shape[:2]:
            length = _short_length(inputs.shape[1], config=config, layout=layout)
            if _takes(model, inputs[:, :length]) or not _takes(model, inputs):
                inputs, targets = inputs[:, :length], targets[:, :length]
        return cls(
            config=_small_config(config, samples=layout.data * microbatches * SAMPLES),
            layout=layout,
            inputs=inputs.double() if inputs.is_floating_point() else inputs,
            targets=targets,
            microbatches=microbatches,
            distinct=distinct,
            device=device,
            sequence=sequence,
        )

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of a sample, [seq] for packed documents."""
        shape = tuple(self.inputs.shape[1:])
        return shape[:1] if packs(self.config) else shape

    def samples(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these rows, on the device."""
        return to_device((self.inputs[rows], self.targets[rows]), self.device)

    def all_rows(self, step: int) -> Tensor:
        """The indices of all samples of a 0-based step."""
        count = self.microbatches * self.distinct * SAMPLES
        return torch.arange(step * count, (step + 1) * count)

    def local_rows(self, step: int) -> Tensor:
        """The indices of this rank's samples; none for a rank that takes no samples."""
        if self.config.strategy.execution == DATAPARALLEL:
            return self.all_rows(step)
        replica, _ = share_of(dist.get_rank(), layout=self.layout, strategy=self.config.strategy)
        if replica is None:
            return torch.empty(0, dtype=torch.int64)
        return self.all_rows(step)[replica % self.distinct :: self.distinct]


def build_small(config: RunConfig, *, as_random: bool = True) -> LayeredModel:
    """Build the model of `config` on meta, with the sizes of `LayeredModel.small` and few blocks.

    Its starting weights are random (`randomise`), or the model's own if `as_random` is false.

    The model keeps its first blocks and its last block. It keeps all blocks if they share weights, or if the
    shapes of their weights differ, because the remaining blocks might not fit together.
    """
    layout = layout_of(config.strategy, devices=config.devices)
    model = packed_documents.apply(build_small_sizes(config.model, seed=config.seed), config=config)
    blocks = list(model.blocks.values())
    count = max(FEW_BLOCKS, layout.pipeline * stages_per_rank(config.strategy))
    shared = any(part_of(alias) not in ("stem", "head") for alias in model.tied)
    if len(blocks) > count and not shared and len({_shapes(block) for block in blocks}) == 1:
        kept = [*blocks[: count - 1], blocks[-1]]
        model.blocks = nn.ModuleDict({str(index): block for index, block in enumerate(kept)})
    return randomise(model, seed=config.seed) if as_random else model


def _small_config(config: RunConfig, *, samples: int) -> RunConfig:
    training = replace(
        config.training, precision="float64", compile=False, microbatch_size=SAMPLES,
        global_batch_size=samples,
    )  # fmt: skip
    strategy = replace(config.strategy, cuts=None, balance="parameters", microbatches=None, shares=None)
    return replace(config, training=training, strategy=strategy)


def _short_length(length: int, *, config: RunConfig, layout: Layout) -> int:
    tensor = layout.tensor if config.strategy.sequence_parallel else 1
    unit = layout.context * math.lcm(2 if layout.context > 1 else 1, tensor)
    return min(length, unit * math.ceil(LEAST_POSITIONS / unit))


def _takes(model: LayeredModel, inputs: Tensor) -> bool:
    """Whether the model takes these inputs. It is also False if only real numbers can show it."""
    return dry_pass(model, sample_shape=tuple(inputs.shape[1:]), dtype=inputs.dtype).error is None


def _shapes(block: nn.Module) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(weight.shape)) for name, weight in block.named_parameters())


def randomise(model: LayeredModel, *, seed: int) -> LayeredModel:
    """Let the whole `model`, on meta, start with random numbers of order 1; returns it.

    Many models start with gates or heads at zero, which hide the errors of a wrong layout.

    A product with a random matrix has numbers of the size of its input. The elements of vectors and scalars
    are between 0.5 and 1.5. Each element of a buffer is multiplied by a number between 0.5 and 1.5, or
    replaced by this number if the element is zero. So an infinity in a mask stays.
    """
    initialise_model, buffers = model.initialise, {name for name, _ in model.named_buffers()}

    def initialise(name: str, tensor: Tensor, generator: torch.Generator) -> None:
        if name in buffers or not tensor.is_floating_point():
            initialise_model(name, tensor, generator)
            if tensor.is_floating_point():
                _vary(tensor, generator)
        elif tensor.dim() < 2:
            tensor.uniform_(0.5, 1.5, generator=generator)
        else:
            tensor.normal_(std=max(1, tensor.shape[1:].numel()) ** -0.5, generator=generator)

    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and not buffer.is_meta:  # a constructor has filled it
            _vary(buffer, torch.Generator().manual_seed(tensor_seed(seed, name) >> 1))
    model.initialise = initialise  # type: ignore[method-assign]
    return model


def _vary(buffer: Tensor, generator: torch.Generator) -> None:
    factor = torch.empty_like(buffer).uniform_(0.5, 1.5, generator=generator)
    buffer.copy_(torch.where(buffer == 0, factor, buffer * factor))
