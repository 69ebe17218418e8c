"""What a small run computes on one device and on its layout: gradients, or logits if it generates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import SGD

from hpc_parallel.layout.batch_plan import BatchPlan
from hpc_parallel.layout.layout import share_of
from hpc_parallel.models.layered import LayeredModel, materialise
from hpc_parallel.proof.small_model import SAMPLES, STEPS, SmallRun
from hpc_parallel.strategies.assemble import Assembled, assemble
from hpc_parallel.strategies.decode import Decoder
from hpc_parallel.strategies.dropout import counted_dropout, dropout_shapes
from hpc_parallel.strategies.forward_backward import Accumulate
from hpc_parallel.strategies.groups import Groups
from hpc_parallel.strategies.loss import LossTerms
from hpc_parallel.torch_internals import DispatchMode, tree_leaves
from hpc_parallel.training.optimizer import ModelOptimizer, Update
from hpc_parallel.training.step import Step

LAST = 3  # positions whose logits are compared; all but the first of them follow cached ones
LOGITS = "logits of the next token"
BUFFER = "buffer "
UPDATE = 0.1  # the norm of the first update of all weights together


@dataclass(frozen=True)
class Results:
    """The mean loss of each step, and the tensors that this rank has, by their descriptions.

    norms: for each tensor, the norm of all tensors of its kind together, such as the whole gradient of a
    step. A run that generates has the logits as its only tensor.
    """

    losses: list[float] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)

    def note_gradients(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        """Keep copies of the gradients of a 0-based step, by the names of their weights."""
        later = f" in step {step + 1}" if step else ""
        self._note({f"gradient of {name}{later}": gradient for name, gradient in gradients.items()})

    def note_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Keep copies of buffers after the last step."""
        for name, buffer in buffers.items():
            self._note({f"{BUFFER}{name}, which the forward pass writes": buffer.double()})

    def note_logits(self, logits: Tensor) -> None:
        """Keep logits of the next tokens."""
        self._note({LOGITS: logits})

    def _note(self, tensors: Mapping[str, Tensor]) -> None:
        norm = math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors.values()))
        self.norms.update(dict.fromkeys(tensors, norm))
        self.tensors.update({name: tensor.detach().clone() for name, tensor in tensors.items()})

    @property
    def is_finite(self) -> bool:
        return all(map(math.isfinite, (*self.losses, *self.norms.values())))


@dataclass(frozen=True)
class Reference(Results):
    """The results of one device.

    rate: the learning rate between the steps. written: the buffers that the steps changed. rounds: whether
    the forward pass computes something in less than float64, as norms and softmax of many models do.
    """

    rate: float = 0.0
    written: tuple[str, ...] = ()
    rounds: bool = False


class PrecisionLoss(DispatchMode):
    """Detects whether an operator converts float64 to a lower precision."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if not self.seen and _has_floats(output, double=False):
            self.seen = _has_floats((args, kwargs), double=True)
        return output


def _has_floats(values: Any, *, double: bool) -> bool:
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point())
    return any((tensor.dtype == torch.float64) == double for tensor in tensors)


def on_one_device(run: SmallRun, model: LayeredModel) -> Reference:
    """Run `model`, on meta, without any technique; every rank does it by itself."""
    generates = run.config.task.name == "generate"
    shapes = {} if generates else dropout_shapes.whole_shapes(model, sample_shape=run.sample_shape)
    materialise(model, seed=run.config.seed, device=run.device, dtype=torch.float64)
    if generates:
        results = Reference()
        with torch.no_grad():
            results.note_logits(model.eval()(run.samples(run.local_rows(0))[0])[:, -LAST:])
        return results
    model.train()
    counted_dropout.apply(
        model, shapes=shapes, part=counted_dropout.SamplePart(), seed=run.config.seed, device=run.device
    )
    return _train_alone(run, model)


def sometimes_used(run: SmallRun, model: LayeredModel) -> list[str]:
    """The weights of `model`, on meta, that get a gradient from some samples and not from others."""
    materialise(model, seed=run.config.seed, device=run.device, dtype=torch.float64)
    model.train()
    schedule = Accumulate(model, model=model, loss=model.loss, terms=LossTerms(model), microbatches=1)
    used: list[set[str]] = []
    for row in run.all_rows(0):
        rows = row.repeat(2)  # BatchNorm can't train on a single sample
        schedule.train(*run.samples(rows))
        used.append({name for name, weight in model.named_parameters() if weight.grad is not None})
        for weight in model.parameters():
            weight.grad = None
    some = set().union(*used) - used[0].intersection(*used)
    return [name for name, _ in model.named_parameters() if name in some]


def _train_alone(run: SmallRun, model: LayeredModel) -> Reference:
    schedule = Accumulate(
        model, model=model, loss=model.loss, terms=LossTerms(model), microbatches=run.microbatches
    )
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    results, rate, rounding = Results(), 0.0, PrecisionLoss()
    for step in range(STEPS):
        rows = run.all_rows(step)
        model.sample_indices.begin_batch(rows, device=run.device)
        with rounding:
            results.losses.append(float(schedule.train(*run.samples(rows))))
        weights = {model.tied.get(name, name): weight for name, weight in model.named_parameters()}
        gradients = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
        results.note_gradients(step, gradients)
        rate = rate or UPDATE / max(1e-30, next(iter(results.norms.values()), 1.0))
        with torch.no_grad():
            for name, gradient in gradients.items():
                weights[name].sub_(rate * gradient)
                weights[name].grad = None
    written = {
        name: buffer for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])
    }
    results.note_buffers(written)
    return Reference(**vars(results), rate=rate, written=tuple(written), rounds=rounding.seen)


def on_layout(run: SmallRun, model: LayeredModel, *, groups: Groups, reference: Reference) -> Results:
    """Run `model`, on meta, with all techniques of the layout. Collective over all ranks."""
    generates = run.config.task.name == "generate"
    assembled = assemble(
        model,
        config=run.config,
        batch=BatchPlan(data=run.layout.data, microbatches=run.microbatches, microbatch_size=SAMPLES),
        sample_shape=run.sample_shape,
        groups=groups,
        device=run.device,
        trains=not generates,
    )
    for part in assembled.parts:
        part.train(not generates)
    return _decode(run, assembled) if generates else _train(run, assembled, reference=reference)


def _train(run: SmallRun, assembled: Assembled, *, reference: Reference) -> Results:
    """Take the steps as a training does, with plain gradient descent."""
    _, replicas = share_of(dist.get_rank(), layout=run.layout, strategy=run.config.strategy)
    results, weights = Results(), assembled.named_parameters()
    update = Update(SGD, weights, options={"lr": reference.rate, "foreach": False})
    steps = iter(range(STEPS))
    step = Step(
        assembled,
        optimizer=ModelOptimizer(weights, {1.0: [update]}),
        clip_norm=None,
        on_gradients=lambda: results.note_gradients(next(steps), _full_gradients(weights)),
    )
    for index in range(STEPS):
        rows = run.local_rows(index)
        assembled.parts[0].sample_indices.begin_batch(rows, device=run.device)
        loss = step.run(*run.samples(rows)).loss.detach().double().clone()
        dist.all_reduce(loss)  # it is zero on ranks that do not compute it
        results.losses.append(float(loss) / replicas)
    if assembled.mesh.get_coordinate() is not None:  # a dedicated server has seen no samples
        buffers = {name: buffer for part in assembled.parts for name, buffer in part.named_buffers()}
        results.note_buffers({name: buffers[name] for name in reference.written if name in buffers})
    return results


def _decode(run: SmallRun, assembled: Assembled) -> Results:
    """The logits of the last positions, with cached keys and values, on the rank that chooses the tokens."""
    tokens = run.samples(run.local_rows(0))[0]
    length = tokens.shape[1]
    decoder = Decoder(assembled, length=length, device=run.device)
    kept: list[Tensor] = []

    def keep(logits: Tensor) -> Tensor:
        kept.append(logits)
        return logits.argmax(-1)

    start, results = 0, Results()
    for end in range(length - LAST + 1, length + 1):
        decoder(tokens[:, start:end], keep)
        start = end
    if kept:
        results.note_logits(torch.stack(kept, dim=1))
    return results


def _full_gradients(weights: Mapping[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    """The unsplit gradients of this rank's weights; with a parameter server, only the server has them."""
    return {
        name: weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad
        for name, weight in weights.items()
        if weight.grad is not None
    }
