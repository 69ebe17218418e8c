"""Measure what ranks of a run would hold, on a machine that has neither its devices nor its memory.

    python -m hpc_parallel.worker.exact_plan CONFIG.YAML RANK...

A rank's part of the model is assembled as for the run, in a world whose other ranks don't exist, with tensors
that have shapes but no numbers. One microbatch goes through each of its stages. Tests compare the formulas of
`planning/` with these figures.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import Parameter

from hpc_parallel import torch_internals
from hpc_parallel.config.batch_plan import batch_of
from hpc_parallel.config.layout import DATAPARALLEL, Layout, layout_of
from hpc_parallel.config.model_weights import sample_shape_of
from hpc_parallel.config.schedules import schedule_of
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.typed_config import typed
from hpc_parallel.models.auxiliary_loss import auxiliary_losses
from hpc_parallel.models.drawn_weights import without_values
from hpc_parallel.models.experts import Experts
from hpc_parallel.models.layered import LayeredModel, as_tuple
from hpc_parallel.problems import ConfigError
from hpc_parallel.profiling.traffic import Traffic
from hpc_parallel.record.safe_read import read_yaml
from hpc_parallel.strategies import working_weights
from hpc_parallel.strategies.assemble import Assembled, assemble, surround
from hpc_parallel.strategies.forward_backward import propagate_nonfinite
from hpc_parallel.strategies.groups import Groups, make_groups
from hpc_parallel.strategies.mesh import weight_axes
from hpc_parallel.strategies.precision import HALF, WEIGHTS
from hpc_parallel.strategies.tied_ends import TiedEnds
from hpc_parallel.strategies.whole_model import build_model
from hpc_parallel.training import weight_rules
from hpc_parallel.training.optimizer import build_optimizer
from hpc_parallel.training.state_bytes import local_bytes
from hpc_parallel.worker.saved_tensors import SavedTensors

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Measured:
    """Bytes of one rank.

    activations: what each of its stages keeps of one microbatch. sent: what this rank sends for it, by kind
    of collective, without what a schedule sends between stages and what averages over replicas.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: tuple[int, ...]
    sent: dict[str, int]


def measure(config: RunConfig, ranks: Sequence[int]) -> list[Measured]:
    """What each of `ranks` of the run's world would hold. Each is measured in a process of its own.

    torch keeps names of process groups in caches, so a process can't have one world after another. Raises
    ConfigError as `assemble` does, for tiles in a pipeline, and for data whose shape must be read.
    """
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        return [pool.apply(measure_here, (config, rank)) for rank in ranks]


def measure_here(config: RunConfig, rank: int) -> Measured:
    """`measure` of one rank in this process, which must have no default process group, now or before."""
    model = build_model(config)
    size = config.nodes if config.strategy.execution == DATAPARALLEL else config.devices
    # How many rows an expert gets depends on the numbers.
    needs_numbers = any(isinstance(module, Experts) for module in model.modules())
    needs_numbers |= config.optimizer._target_ == "torch.optim.Adafactor"  # as do its steps
    fakes = nullcontext() if needs_numbers else torch_internals.fake_tensors()
    with torch_internals.fake_world(rank, size=size):
        return Role(model, config, fakes=fakes).measure()


class Role:
    """One rank's part of a run."""

    def __init__(
        self, model: LayeredModel, config: RunConfig, *, fakes: AbstractContextManager[object]
    ) -> None:
        """`fakes`: the context in which this rank's tensors are made."""
        self._config, self._fakes = config, fakes
        self._layout = layout_of(config.strategy, devices=config.devices)
        self._batch = batch_of(config, self._layout)
        shape = sample_shape_of(config.model, config.data)
        if shape is None:
            raise ConfigError(["data: the shape of its samples is known only after it is read."])
        self._shape = shape
        pipeline = self._layout.pipeline > 1
        self._states = states_between(model, self._inputs("meta")) if pipeline else {}
        self._groups = make_groups(config, self._layout, device_type="cpu", saves=False)
        with without_values(self._zeros):
            self._assembled = assemble(
                model, config=config, batch=self._batch, sample_shape=shape, groups=self._groups, device=CPU
            )

    def _zeros(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        with self._fakes:
            return torch.zeros(shape, dtype=dtype)

    def _inputs(self, device: str) -> Tensor:
        dtype = torch.int64 if len(self._shape) == 1 else torch.uint8
        return torch.zeros((self._batch.microbatch_size, *self._shape), dtype=dtype, device=device)

    def _targets(self) -> Tensor:
        pixelwise = self._assembled.parts[0].pixelwise
        labels = self._shape[-2:] if pixelwise or len(self._shape) == 1 else ()
        dtype = torch.uint8 if pixelwise else torch.int64
        return torch.zeros((self._batch.microbatch_size, *labels), dtype=dtype)

    def measure(self) -> Measured:
        """Run one step with one microbatch."""
        assembled, server = self._assembled, self._assembled.server
        split = bool(weight_axes(assembled.mesh))
        # The other ranks, which may have the weights that a rule matches, don't exist.
        with patch.object(weight_rules, "require_matches"):
            optimizer = build_optimizer(assembled.named_parameters(), self._config.optimizer, split=split)
        weights = [weight for part in assembled.parts for weight in part.parameters()]
        updates = server is None or server.serves
        with self._fakes:
            with Traffic() as traffic:
                activations = self._train()
            if server is not None and updates:
                server.collect()
            gradients = [weight.grad for weight in weights if weight.grad is not None]
            held = local_bytes(weights), local_bytes(gradients)
            if updates:
                optimizer.step()
        state_bytes = local_bytes(optimizer.state().values())
        return Measured(*held, state_bytes, activations, dict(traffic.sent))

    def _train(self) -> tuple[int, ...]:
        mesh, options = self._assembled.mesh, self._config.strategy
        if mesh.get_coordinate() is None:  # a dedicated server
            return ()
        once = Once(self._assembled, states=self._states, groups=self._groups, config=self._config)
        casts = working_weights.applies(self._config)
        parts = self._assembled.parts
        surround(once, parts=parts, mesh=mesh, options=options, casts=casts).train(
            self._inputs("cpu"), self._targets()
        )
        return tuple(once.activations)


class Once:
    """A schedule that takes one microbatch through each stage of this rank, forward and backward."""

    copies: Sequence[Parameter] = ()

    def __init__(
        self, assembled: Assembled, *, states: dict[str, list[torch.Size]], groups: Groups, config: RunConfig
    ) -> None:
        self.activations: list[int] = []
        self._assembled, self._states, self._groups = assembled, states, groups
        self._config = config
        self._layout: Layout = layout_of(config.strategy, devices=config.devices)

    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        parts = self._assembled.parts
        for auxiliary in auxiliary_losses(parts):
            auxiliary.loss_terms = 1.0
        for part in parts:
            part.sample_indices.begin_microbatch(0, count=1)
            saved = SavedTensors([part])
            with saved.watch():
                outputs = as_tuple(part(*self._inputs(part, inputs)))
                if part.head is not None:
                    loss = self._assembled.evaluation(outputs[0], targets)
                    outputs = (propagate_nonfinite(loss),)
            self.activations.append(saved.bytes)
            needing = [output for output in outputs if output.requires_grad]
            torch.autograd.backward(needing, [torch.ones_like(output) for output in needing])
        if self._layout.pipeline > 1:
            v_shaped = schedule_of(self._config.strategy).v_shaped
            TiedEnds(parts, group=self._groups.ends, v_shaped=v_shaped).sum_gradients()
        return inputs.new_zeros((), dtype=torch.float32)

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        raise NotImplementedError("a plan trains only")

    def _inputs(self, part: LayeredModel, inputs: Tensor) -> tuple[Tensor, ...]:
        """Those of a stage, in the type in which the stage before sends them."""
        if part.stem is not None:
            return (inputs,)
        precision = self._config.training.precision
        cast = working_weights.applies(self._config) or (self._layout.by_fully_shard and precision in HALF)
        dtype = HALF[precision] if cast else WEIGHTS[precision]
        shapes = [self._local(shape, inputs) for shape in self._states[next(iter(part.blocks))]]
        return tuple(torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in shapes)

    def _local(self, shape: torch.Size, inputs: Tensor) -> torch.Size:
        """Of a state of the whole sequence, this rank's part."""
        if self._layout.tile > 1:
            raise ConfigError(["strategy.tile in a pipeline is not measured."])
        if inputs.dim() != 2:
            return shape
        length = inputs.shape[1]
        if self._config.strategy.sequence_parallel:
            length //= self._layout.tensor
        return torch.Size((shape[0], length, *shape[2:]))


def states_between(model: LayeredModel, inputs: Tensor) -> dict[str, list[torch.Size]]:
    """The shapes of the inputs of each block of the whole `model`, which is on meta, for meta `inputs`."""
    shapes: dict[str, list[torch.Size]] = {}
    state = (
        as_tuple(model.stem(inputs, **model._stem_options(inputs))) if model.stem is not None else (inputs,)
    )
    for name, block in model.blocks.items():
        shapes[name] = [tensor.shape for tensor in state]
        if inputs.dim() > 2:  # blocks of language models keep the shape
            state = as_tuple(block(*state))
    return shapes


def main(path: str, *ranks: str) -> None:
    """Print what the ranks hold as JSON, by rank."""
    config = typed(read_yaml(Path(path)))
    numbers = [int(rank) for rank in ranks]
    measured = measure(config, numbers)
    print(json.dumps({rank: asdict(held) for rank, held in zip(numbers, measured, strict=True)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
