"""Measure what ranks of a run hold and send, on a machine without the run's devices and memory.

A rank's part of the model is assembled as for the run, in a world whose other ranks don't exist. Its tensors
have shapes but no numbers. The rank takes a step of up to three microbatches. The tests compare the formulas
of `planning/` with these figures.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hpc_parallel.config.schema import RunConfig, StrategyConfig
from hpc_parallel.layout.batch_plan import Plan
from hpc_parallel.layout.layout import DATAPARALLEL, SPMD, servers
from hpc_parallel.layout.model_weights import sample_shape_of
from hpc_parallel.layout.step_facts import casts_once, packs
from hpc_parallel.models import layered
from hpc_parallel.models.drawn_weights import Drawing, placed
from hpc_parallel.models.experts import Experts
from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.problems import ConfigError
from hpc_parallel.strategies import forward_backward, replicate, shard
from hpc_parallel.strategies.assemble import assemble, surround
from hpc_parallel.strategies.groups import make_groups
from hpc_parallel.strategies.mesh import weight_axes
from hpc_parallel.strategies.model_checks import is_own
from hpc_parallel.strategies.whole_model import build_model
from hpc_parallel.training import optimizer as optimizers
from hpc_parallel.training.optimizer import build_optimizer
from hpc_parallel.training.rounding import rounding_of
from hpc_parallel.training.step import local_bytes
from tests.oracle.fakes import fake_tensors, fake_world, replicas_in_buckets
from tests.oracle.saved_tensors import SavedTensors
from tests.oracle.traced_stages import Stages, states_between
from tests.oracle.traced_traffic import MOST, GroupTraffic, TracedCollective, of_step

CPU = torch.device("cpu")


@dataclass(frozen=True)
class HeldAndSent:
    """What one rank holds and sends.

    parameters, gradients, optimizer: bytes. activations: bytes that each of its stages keeps of one
    microbatch. collectives: the collectives of one step. Those of a parameter server and those between the
    devices of one process are not traced.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: tuple[int, ...]
    collectives: tuple[TracedCollective, ...]


def measure(config: RunConfig, ranks: Sequence[int], *, microbatches: int | None = None) -> list[HeldAndSent]:
    """What each of `ranks` of the run's world would hold. Each is measured in a process of its own.

    microbatches: the number in the traced step; None: as many as the run has.

    torch keeps names of process groups in caches, so a process can't have one world after another. Raises
    ConfigError as `assemble` does, and also for tiles in a pipeline and for data whose shape must be read.
    """
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        return [pool.apply(_measure_here, (config, rank, microbatches)) for rank in ranks]


def _measure_here(config: RunConfig, rank: int, microbatches: int | None) -> HeldAndSent:
    model = build_model(config)
    size = config.nodes if config.strategy.execution == DATAPARALLEL else config.devices
    # How many rows an expert gets depends on the numbers.
    needs_numbers = any(isinstance(module, Experts) for module in model.modules())
    needs_numbers |= config.optimizer._target_ == "torch.optim.Adafactor"  # its steps depend on them too
    fakes = nullcontext() if needs_numbers else fake_tensors()
    with fake_world(rank, size=size):
        return TracedRank(model, config, fakes=fakes).measure(microbatches=microbatches)


class TracedRank:
    """One rank's part of a run."""

    def __init__(
        self, model: LayeredModel, config: RunConfig, *, fakes: AbstractContextManager[object]
    ) -> None:
        """`fakes`: the context in which this rank's tensors are made."""
        self._config, self._fakes = config, fakes
        plan = Plan.of(config)
        self._layout, self._batch = plan.layout, plan.batch
        shape = sample_shape_of(config.model, config.data)
        if shape is None:
            raise ConfigError(["data: the shape of its samples is known only after it is read."])
        self._shape = shape
        pipeline = self._layout.pipeline > 1
        self._states = states_between(model, self._inputs(1, device="meta")) if pipeline else {}
        self._groups = make_groups(config, self._layout, device_type="cpu", saves=False)
        # The model may be too large for this machine.
        with (
            patch.object(layered, "draw", self._zeros),
            patch.object(replicate, "apply", _averaging_in_sight),
        ):
            self._assembled = assemble(
                model, config=config, batch=self._batch, sample_shape=shape, groups=self._groups, device=CPU
            )

    def _zeros(self, _: Drawing, *, like: Tensor, device: object, dtype: torch.dtype) -> Tensor:
        shape = like.to_local().shape if isinstance(like, DTensor) else like.shape
        with self._fakes:
            local = torch.zeros(shape, dtype=dtype if like.is_floating_point() else like.dtype)
        return placed(local, like=like) if isinstance(like, DTensor) else local

    def _inputs(self, microbatches: int, *, device: str = "cpu") -> Tensor:
        dtype = torch.int64 if len(self._shape) == 1 else torch.uint8
        samples = microbatches * self._batch.microbatch_size
        starts = (2,) if packs(self._config) else ()
        return torch.zeros((samples, *self._shape, *starts), dtype=dtype, device=device)

    def _targets(self, microbatches: int) -> Tensor:
        pixelwise = self._assembled.parts[0].pixelwise
        labels = self._shape[-2:] if pixelwise or len(self._shape) == 1 else ()
        dtype = torch.uint8 if pixelwise else torch.int64
        return torch.zeros((microbatches * self._batch.microbatch_size, *labels), dtype=dtype)

    def measure(self, *, microbatches: int | None = None) -> HeldAndSent:
        """Run a step with the first microbatches and the last one.

        microbatches: the number in the step; None: as many as in the run.
        """
        microbatches = microbatches or self._batch.microbatches
        assembled, server = self._assembled, self._assembled.server
        split = bool(weight_axes(assembled.mesh))
        # The other ranks, which may have the weights that a rule matches, don't exist.
        with patch.object(optimizers, "require_matches"):
            optimizer = build_optimizer(
                assembled.named_parameters(), self._config.optimizer, split=split,
                rounding=rounding_of(self._config),
            )  # fmt: skip
        weights = [weight for part in assembled.parts for weight in part.parameters()]
        updates = server is None or server.serves
        with self._fakes, patch.object(replicate, "average_in", _average_in):
            traffic = GroupTraffic()
            activations = self._train(min(MOST, microbatches), traffic=traffic)
            if server is not None and updates:
                server.collect()
            gradients = [weight.grad for weight in weights if weight.grad is not None]
            for part in assembled.parts:
                shard.release(part)
            held = local_bytes(weights), local_bytes(gradients)
            if updates:
                optimizer.step()
        state_bytes = local_bytes(optimizer.state().values())
        collectives = of_step(
            traffic, microbatches=microbatches, layout=self._layout, first=servers(self._config.strategy)
        )  # fmt: skip
        return HeldAndSent(*held, state_bytes, activations, tuple(collectives))

    def _train(self, microbatches: int, *, traffic: GroupTraffic) -> tuple[int, ...]:
        """Take the step. Returns the bytes that each stage keeps of the first microbatch."""
        mesh, strategy = self._assembled.mesh, self._config.strategy
        if mesh.get_coordinate() is None:  # a dedicated server
            return ()
        inputs, targets = self._inputs(microbatches), self._targets(microbatches)
        whole = self._layout.pipeline == 1 and strategy.execution == SPMD and not is_own(self._config)
        if whole:  # the step of the run
            with traffic, _watched_passes(self._assembled.parts[0], traffic=traffic) as watched:
                self._assembled.build_schedule(microbatches).train(inputs, targets)
            return (watched[0].bytes,)
        stages = Stages(
            self._assembled, states=self._states, groups=self._groups, config=self._config,
            microbatches=microbatches, traffic=traffic,
        )  # fmt: skip
        casts = casts_once(self._config)
        parts = self._assembled.parts
        with traffic:
            surround(
                stages, parts=parts, mesh=mesh, options=strategy, casts=casts, microbatches=microbatches,
                finds_unused=is_own(self._config),
            ).train(inputs, targets)  # fmt: skip
            stages.average()
        return tuple(stages.activations)


@contextmanager
def _watched_passes(model: LayeredModel, *, traffic: GroupTraffic) -> Iterator[list[SavedTensors]]:
    """Yields what each forward pass of `Accumulate` inside the context keeps.

    Each pass begins a microbatch of `traffic`.
    """
    watched: list[SavedTensors] = []

    def ranged(name: str) -> AbstractContextManager[object]:
        if name != "forward":
            return nullcontext()
        traffic.begin_microbatch()
        watched.append(SavedTensors([model]))
        return watched[-1].watch()

    with patch.object(forward_backward, "marked", ranged):
        yield watched


_REPLICATE = replicate.apply


def _averaging_in_sight(
    model: LayeredModel, *, axis: DeviceMesh, options: StrategyConfig, finds_unused: bool = False
) -> DistributedDataParallel:
    """Call `replicate.apply`, and replace torch's own averaging.

    torch's averaging needs a result of the collective, and a fake collective has none. Its buckets are real
    memory. It is never written, but one bucket for a large model is more than the host may promise.
    """
    with replicas_in_buckets(int(options.bucket_mb * 2**20)):
        replica = _REPLICATE(model, axis=axis, options=options, finds_unused=finds_unused)
    if replicate.message_dtype(model, options=options) is None:
        # A lambda, because torch rejects string annotations (`from __future__ import annotations`).
        replica.register_comm_hook(axis.get_group(), lambda group, bucket: _average(group, bucket))
    return replica


def _average(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    gradients = bucket.buffer()
    dist.all_reduce(gradients, group=group)
    return _done(gradients)


def _average_in(
    dtype: torch.dtype, group: dist.ProcessGroup, bucket: dist.GradBucket, *, axis: str
) -> torch.futures.Future[Tensor]:
    gradients = bucket.buffer()
    message = gradients.to(dtype)
    dist.all_reduce(message, group=group)
    return _done(gradients.copy_(message))


def _done(gradients: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(gradients)
    return future
